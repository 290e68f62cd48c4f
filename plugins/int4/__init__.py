"""4 bits per number: keys quantized per channel over a group of tokens, values per token.

Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML 2024 (arXiv:2402.02750). Some
channels of the keys are large in every token, so a key quantized by itself loses its small channels; along a channel
the numbers of neighbouring tokens resemble each other. Values have no such channels.

A scale per channel needs all tokens of a group before the first one can be encoded, so the codec seals (see
kvframe.sealing): the last, open group of each request stays in full precision, keys and values.

    key     code = round((x - zero[channel]) / scale[channel])     scale, zero per group of tokens
    value   code = round((x - zero[part])    / scale[part])        scale, zero per token and `value_group` channels
    x' = zero + scale * code,  |x - x'| <= scale / 2

Numbers that share a scale suffer together, and nobody else does: of a key the same channel of all tokens of the group,
of a value `value_group` channels of one token and head. A huge number costs the others among them their precision. What
is beyond the range of scales, infinities too, counts as its end: 65,504 for float16, 2 ** 126 else; so whatever is not
NaN comes back as a finite number. Codes have no NaN: one makes all that share its scale NaN.

For 2 x 64 numbers of one token and head, against 256 bytes in bf16: 32 + 32 bytes of codes, 8 for scales and zeros of
the keys (4 * 64 / 32), 8 for those of the values: 80 bytes, 0.3125.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvframe.errors import OptionError
from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec, Ranged

if TYPE_CHECKING:
    import torch

BITS = (4, 2, 8)
SCALES = ("float16", "bfloat16", "float32")
FAR = 2.0**126  # no difference of two numbers up to this one overflows float32
HALF = 65504.0  # the largest float16


@dataclass(frozen=True)
class Int4(Codec):
    """Asymmetric codes of `bits` bits, keys per channel over `group` tokens, values per token (KIVI).

    Args:
        bits: 4; 2 (KIVI's other width: visibly worse) and 8 are allowed, and are then what they are.
        group: tokens that are sealed together, an even number; paged blocks hold a multiple of it.
        value_group: channels of a value that share a scale; the last ones of a vector may be fewer.
        scale_dtype: of scales and zeros. float16 is finer; bfloat16 has the range of float32 and errors as large as
            1/256 of a channel's mean.
    Raises: OptionError for a value that cannot be.
    """

    bits: int = 4
    group: int = 32
    value_group: int = 32
    scale_dtype: str = "float16"
    exact = False

    def __post_init__(self):
        rules = (
            ("bits", _integer(self.bits) and self.bits in BITS, [str(b) for b in BITS]),
            ("group", _integer(self.group) and self.group >= 2 and self.group % 2 == 0, ["an even integer >= 2"]),
            ("value_group", _integer(self.value_group) and self.value_group >= 1, ["an integer >= 1"]),
            ("scale_dtype", self.scale_dtype in SCALES, SCALES),
        )
        usual = {field.name: field.default for field in fields(self)}
        for name, fine, options in rules:
            if not fine:
                raise OptionError(name, getattr(self, name), options=options, fix=f"{{name}}={usual[name]}")

    @property
    def notes(self) -> str:
        """What it is, for lists."""
        return f"int{self.bits}; the last tokens of a request, up to {self.group}, stay in full precision"

    @property
    def ranged(self):
        return Ranged(self.bits)

    def for_layer(self, layer, kind):
        return self if kind == "k" else Int4Values(**{f.name: getattr(self, f.name) for f in fields(self)})

    def planes(self, dim):
        factor = PlaneSpec((dim,), self.scale_dtype, per="group")
        return {"payload": PlaneSpec((dim * self.bits // 8,), "uint8"), "scale": factor, "zero": factor}

    def encode(self, x):
        x = x.float()  # [n, G, Hkv, D]
        scale, zero = self._factors(x.amin(1, keepdim=True), x.amax(1, keepdim=True))  # [n, 1, Hkv, D]
        return self._stored(self._codes(x, scale, zero), scale.squeeze(1), zero.squeeze(1))

    def decode(self, planes, dtype):
        scale, zero = planes["scale"].float()[:, None], planes["zero"].float()[:, None]
        return saturated(zero + scale * unpack(planes["payload"], self.bits), dtype)

    def conflicts(self, others):
        per = 8 // self.bits
        wrong = {dim for _, _, dim in others.stored if dim % per}
        if not wrong:
            return []
        sizes, fix = " and ".join(map(str, sorted(wrong))), f"{others.codec_key}.bits=8"
        return [f"{per} codes share a byte, and heads of {sizes} numbers do not fill theirs: {fix}"]

    def _stored(self, codes, scale, zero):
        import torch

        dtype = getattr(torch, self.scale_dtype)
        return {"payload": pack(codes, self.bits), "scale": scale.to(dtype), "zero": zero.to(dtype)}

    def _factors(self, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero as they will be stored (float32 here), so that every x is between the first and last code.

        The zero is rounded down and the scale up: what is gained by rounding them to nearest is lost at the ends.
        """
        import torch

        dtype = getattr(torch, self.scale_dtype)
        most = min(torch.finfo(dtype).max, FAR)
        zero = toward(low.clamp(-most, most), dtype, up=False)
        scale = (high.clamp(-most, most) - zero) / ((1 << self.bits) - 1)
        return toward(scale, dtype, up=True), zero

    def _codes(self, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        """uint8 codes; where the scale is 0 all numbers are the zero itself. A NaN shows in scale and zero."""
        import torch

        steps = ((x.clamp(-FAR, FAR) - zero) / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
        return steps.nan_to_num(0.0).clamp(0, (1 << self.bits) - 1).to(torch.uint8)


class Int4Values(Int4):
    """The same for values: a scale per token and `value_group` channels."""

    @property
    def ranged(self):
        return Ranged(self.bits, self.value_group)

    def planes(self, dim):
        factor = PlaneSpec((-(-dim // self.value_group),), self.scale_dtype)
        return {"payload": PlaneSpec((dim * self.bits // 8,), "uint8"), "scale": factor, "zero": factor}

    def encode(self, x):
        parts = _parts(x.float(), self.value_group)  # [n, G, Hkv, parts, value_group]
        scale, zero = self._factors(parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True))
        codes = self._codes(parts, scale, zero).flatten(-2)[..., : x.shape[-1]]
        return self._stored(codes, scale.squeeze(-1), zero.squeeze(-1))

    def decode(self, planes, dtype):
        codes = unpack(planes["payload"], self.bits)  # [n, G, Hkv, D]
        scale, zero = (
            planes[name].float().repeat_interleave(self.value_group, -1)[..., : codes.shape[-1]]
            for name in ("scale", "zero")
        )
        return saturated(zero + scale * codes, dtype)


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 `x` in `dtype`. The last code may stand for a little more than the number it was made of, and in float16
    for more than there is."""
    import torch

    return (x.clamp(-HALF, HALF) if dtype == torch.float16 else x).to(dtype)


def toward(x: torch.Tensor, dtype: torch.dtype, up: bool) -> torch.Tensor:
    """`x` (float32, |x| at most the largest of `dtype`) rounded to `dtype`, never down (`up`) or never up; float32."""
    import torch

    near = x.to(dtype)
    if dtype == torch.float32:
        return near
    wrong = near.float() < x if up else near.float() > x
    # the next number away from zero is the next integer, whatever the sign; behind the last one comes infinity
    bits = near.view(torch.int16)
    away = (near > 0) == up
    zero = torch.tensor(1 if up else -(1 << 15) + 1, dtype=torch.int16, device=x.device)
    step = torch.where(near == 0, zero, torch.where(away, bits + 1, bits - 1))
    return torch.where(wrong, step, bits).view(dtype).float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)


def _parts(x: torch.Tensor, size: int) -> torch.Tensor:
    """`[..., D]` -> `[..., ceil(D / size), size]`, the last number repeated to fill the last part."""
    import torch

    missing = -x.shape[-1] % size
    if missing:
        x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1)
    return x.unflatten(-1, (-1, size))


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[..., D]` of small numbers -> uint8 `[..., D * bits / 8]`, the first one in the lowest bits.

    bits=4:  1 2 3 4   ->   0x21 0x43
    """
    codes = codes.unflatten(-1, (-1, 8 // bits))
    packed = codes[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= codes[..., i] << (bits * i)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack`: `[..., B]` -> uint8 `[..., B * 8 / bits]`."""
    import torch

    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & ((1 << bits) - 1)).flatten(-2)


def _integer(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
