"""Int8: eight bits per channel, and a scale per token and KV head.

    symmetric      x ~ scale * code               code in -127..127, scale = max|x| / 127
    asymmetric     x ~ zero + scale * (code + 128)    code in -128..127, zero = min x, scale = (max x - min x) / 255

A vector is encoded from itself alone: a huge number costs the precision of its own vector (of its group of channels)
and of no other. Codes are nearest, ties to even, so that |error| <= scale / 2 unless clipped. A row of zeros
comes back as zeros, and an asymmetric row of one number as that number. An infinity counts as the largest number that
the scale can stand for. Eight bits have no NaN: it makes the scale, and thereby the vector, NaN.

Source: Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339), for vector-wise scales; percentiles clip as in
Wu et al., "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602). Shape legend: D size of a vector, g
channels of a group, n = D / g.
"""

from __future__ import annotations

import numpy as np

from kvframe.errors import OptionError
from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec

PEAK = 127.0
LEAST = 2.0**-126  # smallest normal float32
MOST = 2.6793883890187504e36  # the largest float32 whose product with PEAK is finite
FAR = 2.0**126  # asymmetric: numbers beyond it count as this one, so that no difference overflows
HALF_LEAST, HALF_MOST = 2.0**-24, 65504.0
SCALES = ("float32", "float16")


class Int8(Codec):
    """Symmetric or asymmetric integers with vector-wise scales.

    Args:
        symmetric: False stores the smallest number as a zero point (float32) and uses all 256 codes.
        percentile: how much of a vector's numbers, in percent from the smallest size up, the scale must reach; what is
            larger is clipped. 100 clips nothing. Asymmetric codes clip that much at each end, so there it is over 50.
        group_size: channels that share a scale; None: all of the vector.
        scale_dtype: float32, or float16, rounded up so that the bound stands; what exceeds 8.3e6 is clipped then.
    Raises: OptionError for a value that cannot be.
    """

    exact = False

    def __init__(self, symmetric: bool = True, percentile: float = 100, group_size=None, scale_dtype: str = "float32"):
        number = isinstance(percentile, int | float) and not isinstance(percentile, bool)
        least = 50 if symmetric is False else 0
        size = group_size is None or (type(group_size) is int and group_size >= 1)
        rules = (
            ("symmetric", symmetric, isinstance(symmetric, bool), ["true", "false"], "true"),
            ("percentile", percentile, number and least < percentile <= 100, [f"a number in ({least}, 100]"], "100"),
            ("group_size", group_size, size, ["null", "an integer >= 1"], "null"),
            ("scale_dtype", scale_dtype, scale_dtype in SCALES, SCALES, "float32"),
        )  # fmt: skip
        for name, value, fine, options, fix in rules:
            if not fine:
                raise OptionError(name, value, options=options, fix=f"{{name}}={fix}")
        self.symmetric, self.percentile = symmetric, percentile
        self.group_size, self.scale_dtype = group_size, scale_dtype
        self.affine = symmetric and group_size is None
        self.peak = PEAK if self.affine and percentile == 100 and scale_dtype == "float32" else None

    def conflicts(self, others):
        """Vectors whose size is not a multiple of the group."""
        if self.group_size is None:
            return []
        option = f"{others.codec_key}.group_size"
        return [
            f"{option}={self.group_size} does not divide head size {dim}: {option}=null"
            for dim in sorted({dim for _, _, dim in others.stored if dim % self.group_size})
        ]

    def planes(self, dim):
        n = 1 if self.group_size is None else dim // self.group_size
        found = {"payload": PlaneSpec((dim,), "int8"), "scale": PlaneSpec((n,), self.scale_dtype)}
        if not self.symmetric:
            found["zero"] = PlaneSpec((n,), "float32")
        return found

    def encode(self, x):
        import torch

        groups = x.float().unflatten(-1, (-1, self.group_size or x.shape[-1]))  # [..., Hkv, n, g]
        if self.symmetric:
            scale = self._scale(self._largest(groups.abs()) / PEAK)  # [..., Hkv, n, 1]
            codes = torch.round(groups / scale.float()).clamp(-PEAK, PEAK)
            more = {}
        else:
            groups = groups.clamp(-FAR, FAR)
            zero, most = self._ends(groups)
            scale = self._scale((most - zero) / 255.0)
            codes = torch.round((groups - zero) / scale.float()).clamp(0.0, 255.0) - 128.0
            more = {"zero": zero.squeeze(-1)}
        codes = torch.nan_to_num(codes).to(torch.int8).flatten(-2)
        return {"payload": codes, "scale": scale.squeeze(-1), **more}

    def _largest(self, x):
        """`x [..., g]` -> `[..., 1]`: the largest number, or the one that `percentile` of all numbers do not exceed."""
        return x.amax(-1, keepdim=True) if self.percentile == 100 else self._reached(_ordered(x), up=True)

    def _ends(self, x):
        """The same from both ends: the smallest and the largest number."""
        if self.percentile == 100:
            return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        ordered = _ordered(x)
        return self._reached(ordered, up=False), self._reached(ordered, up=True)

    def _reached(self, ordered, up: bool):
        """How far one gets on `percentile` of the way through `ordered [..., g]`, up or down; NaN if there is one."""
        import torch

        last = ordered.shape[-1] - 1
        whole, part = divmod(self.percentile / 100 * last, 1)
        this, beyond = (int(whole), int(whole) + 1) if up else (last - int(whole), last - int(whole) - 1)
        found = ordered[..., this, None]
        if part:
            found = found * (1 - part) + ordered[..., beyond, None] * part
        return torch.where(ordered[..., -1:].isnan(), torch.nan, found)

    def _scale(self, scale):
        """The scale as it is stored: never 0, never infinite, never smaller than asked for (up to 65504 in float16)."""
        import torch

        if self.scale_dtype == "float32":
            return scale.clamp(LEAST, MOST)
        scale = scale.clamp(HALF_LEAST, HALF_MOST)
        half = scale.half()
        up = (half.view(torch.int16) + 1).view(torch.float16)
        return torch.where(half.float() < scale, up, half)

    def decode(self, planes, dtype):
        import torch

        payload, scale = planes["payload"], planes["scale"].float().unsqueeze(-1)  # scale [..., Hkv, n, 1]
        numbers = payload.float().unflatten(-1, (scale.shape[-2], -1))
        if self.symmetric:
            x = numbers * scale
        else:
            x = (numbers + 128.0) * scale + planes["zero"].unsqueeze(-1)
        if dtype == torch.float16:  # the last code may stand for a little more than the number it was made of
            x = x.clamp(-HALF_MOST, HALF_MOST)
        return x.flatten(-2).to(dtype)


def _ordered(x):
    """float32 `x [..., g]`, the smallest number first, NaN last."""
    import torch

    if x.device.type == "cpu":  # short rows are sorted many times faster by numpy than by torch
        return torch.from_numpy(np.sort(x.detach().numpy(), axis=-1))
    return x.sort(-1).values
