"""Hadamard: four bits per number after a rotation that spreads outliers over the whole vector.

    y = H x / sqrt(n)      H: the Hadamard matrix of size n, its own inverse
    code = round(y / s) + 8 in 1 .. 15,      s = max |y| / 7 per token and KV head

One large channel, which keys of most models have, would cost all others their precision: the scale must reach it.
Rotated, its size is shared by n numbers. Source: QuaRot (Ashkboos et al., arXiv:2404.00456), where the rotation is
merged into the weights; here it is part of the codec, so any model will do.

Shape legend: D size of a vector, n of a rotation (a power of two that divides D), H KV heads, `...` any leading shape.
"""

import functools

import torch

from kvframe.errors import OptionError
from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec

LEAST, MOST = 2.0**-126, 2.0**110  # of a scale and of a number: zeros are not divided by, and sums stay finite


class Hadamard(Codec):
    """Bytes of a vector: D / 2 for the codes and 4 for the scale.

    Args:
        rotate: most numbers that are rotated together; 1 is plain 4-bit storage, to compare with.
    Raises: OptionError for a size that is no power of two.
    """

    exact = False

    def __init__(self, rotate: int = 128):
        if isinstance(rotate, bool) or not isinstance(rotate, int) or rotate < 1 or rotate & (rotate - 1):
            raise OptionError("rotate", rotate, options=["a power of two"], fix="{name}=128")
        self.rotate = rotate

    def conflicts(self, others):
        odd = {d for layer in others.layers for d in (layer.k_dim, layer.v_dim) if d % 2}
        return [f"vectors of an odd size {min(odd)} cannot be packed in pairs: cache/codec=none"] if odd else []

    def planes(self, dim):
        return {"payload": PlaneSpec((dim // 2,), "uint8"), "scale": PlaneSpec((1,), "float32")}

    def encode(self, x):
        """`x [..., H, D]` -> payload uint8 `[..., H, D / 2]`, two codes in a byte, and scale float32 `[..., H, 1]`."""
        y = self._turn(x.float().clamp(-MOST, MOST))  # NaN stays NaN
        scale = (y.abs().amax(-1, keepdim=True) / 7).clamp_min(LEAST)
        code = ((y / scale).round().nan_to_num() + 8).to(torch.uint8)  # [..., H, D]
        return {"payload": code[..., ::2] | code[..., 1::2] << 4, "scale": scale}

    def decode(self, planes, dtype):
        """Planes as `encode` answers them -> `x [..., H, D]` in `dtype`."""
        packed = planes["payload"]
        code = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # [..., H, D]
        return self._turn((code.float() - 8) * planes["scale"]).to(dtype)

    def _turn(self, x):
        """The rotation and its inverse: `x [..., D]`, n numbers at a time."""
        n = min(self.rotate, x.shape[-1] & -x.shape[-1])  # the largest power of two that divides D
        return (x.unflatten(-1, (-1, n)) @ matrix(n).to(x.device)).flatten(-2)


@functools.cache
def matrix(n: int) -> torch.Tensor:
    """The orthogonal Hadamard matrix `[n, n]` (Sylvester's): `[[M, M], [M, -M]] / sqrt(2)` from that of n / 2."""
    if n == 1:
        return torch.ones(1, 1)
    half = matrix(n // 2) / 2**0.5
    return torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])
