"""What the kernels have to know of a codec to read and write its planes.

    kind    payload            a number is
    PLAIN   the model's dtype  what is stored
    INT8    int8               code * scale
    E4M3    uint8              value of the float8 code * scale
    E5M2    uint8              value of the float8 code * scale
    TABLE   uint8              table[code] * scale
    RANGED  uint8, packed      zero + scale * code, see ranged.py

Shape legend: N blocks, S block_size, G sealing group, Hkv KV heads, D size of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvframe.interfaces import Codec
from kvframe.kernels.cpu_codes import Reader, reader
from kvframe.tails import Tail

PLAIN, INT8, E4M3, E5M2, TABLE, RANGED = range(6)
KINDS = {"int8": INT8, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "uint8": TABLE}
DTYPES = ("float32", "bfloat16", "float16")
FAR = 2.0**126  # see kvframe.types.Ranged


@dataclass(frozen=True)
class Side:
    """K or V of a layer.

    Attributes:
        payload: [N, S, Hkv, D]; scale: [N, S, Hkv, 1] float32 or float16, or None.
        table: float32 [256] or None. fixed: the scale of all vectors where there is no plane.
        peak, most: see `Codec.peak`, and the largest scale; peak None: only the codec makes codes.
        bits, span, zero: of RANGED, whose `scale` and `zero` are planes per group [N, S // G, Hkv, D] (span 0) or per
            token [N, S, Hkv, ceil(D / span)]; `most` is then that of Ranged.
        group: G; 1 for codecs that do not seal. tail: their open groups, or None.
    """

    kind: int
    dim: int
    payload: torch.Tensor
    scale: torch.Tensor | None = None
    table: torch.Tensor | None = None
    fixed: float = 1.0
    peak: float | None = None
    most: float = 1.0
    bits: int = 8
    span: int = 0
    zero: torch.Tensor | None = None
    group: int = 1
    tail: Tail | None = None

    @property
    def written(self) -> bool:
        """The store or the seal kernel can write it."""
        return self.kind == PLAIN or self.peak is not None or self.group > 1

    def number(self, dtype: torch.dtype, weighed: bool) -> torch.dtype:
        """The dtype in which the tensor cores multiply its numbers, exact for codes.

        weighed: V, whose scales are multiplied into the weights. These may be smaller than float16 can say.
        """
        if dtype == torch.float32 or self.kind == TABLE:
            return torch.float32
        return torch.bfloat16 if weighed and self.kind not in (PLAIN, RANGED) else dtype

    def numbers(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain twin of load.py: `slots [n]` -> numbers float32 [n, Hkv, D], scales float32 [n, Hkv, 1]."""
        codes = self.payload.view(-1, *self.payload.shape[2:])[slots]
        if self.kind == RANGED:
            return self._ranged(codes, slots)
        if self.kind == E4M3:
            numbers = codes.view(torch.float8_e4m3fn).float()
        elif self.kind == E5M2:
            numbers = codes.view(torch.float8_e5m2).float()
        else:
            numbers = codes.float() if self.table is None else self.table[codes.long()]
        if self.scale is None:
            return numbers, torch.full_like(numbers[..., :1], self.fixed)
        return numbers, self.scale.view(-1, *self.scale.shape[2:])[slots].float()

    def _ranged(self, packed: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=packed.device)
        codes = (packed[..., None] >> shifts & ((1 << self.bits) - 1)).flatten(-2)[..., : self.dim].float()
        where, size = slots, self.payload.shape[1]
        if self.span == 0:
            where = slots // size * (size // self.group) + slots % size // self.group
        scale, zero = (
            plane.view(-1, *plane.shape[2:])[where].float().repeat_interleave(self.span or 1, -1)[..., : self.dim]
            for plane in (self.scale, self.zero)
        )
        return zero + scale * codes, torch.ones_like(codes[..., :1])


def side(codec: Codec, dim: int, planes: dict[str, torch.Tensor], dtype: str, tail: Tail | None = None) -> Side:
    """The Side of a codec that `unreadable` has no reason against."""
    payload = planes["payload"]
    if codec.plain:
        return Side(PLAIN, dim, payload)
    if codec.ranged is not None:
        how, scale = codec.ranged, planes["scale"]
        most = min(torch.finfo(scale.dtype).max, FAR)
        return Side(
            RANGED, dim, payload, scale, most=most, bits=how.bits, span=how.span, zero=planes["zero"],
            group=codec.group, tail=tail,
        )  # fmt: skip
    how = reader(codec, dim, dtype)
    assert isinstance(how, Reader), how
    table = None if how.table is None else torch.from_numpy(how.table).to(payload.device)
    return Side(KINDS[how.type], dim, payload, planes.get("scale"), table, how.fixed, how.peak, how.most)


def unreadable(codec: Codec, dim: int, dtype: str) -> str | None:
    """Why vectors `[dim]` of a model of this dtype cannot be read; None when they can."""
    if codec.ranged is not None:
        return None
    if codec.group > 1:
        return "it seals groups of tokens as a range of steps only (Codec.ranged), and this codec stores something else"
    found = reader(codec, dim, dtype)
    return found if isinstance(found, str) else None
