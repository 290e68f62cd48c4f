"""What the kernels have to know of a codec to read and write its planes.

    kind    payload            a number is
    PLAIN   the model's dtype  what is stored
    INT8    int8               code * scale
    E4M3    uint8              value of the float8 code * scale
    E5M2    uint8              value of the float8 code * scale
    TABLE   uint8              table[code] * scale

Shape legend: N blocks, S block_size, Hkv KV heads, D size of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvframe.interfaces import Codec
from kvframe.kernels.cpu_codes import Reader, reader

PLAIN, INT8, E4M3, E5M2, TABLE = range(5)
KINDS = {"int8": INT8, "float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "uint8": TABLE}
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Side:
    """K or V of a layer.

    Attributes:
        payload: [N, S, Hkv, D]; scale: [N, S, Hkv, 1] float32 or float16, or None.
        table: float32 [256] or None. fixed: the scale of all vectors where there is no plane.
        peak, most: see `Codec.peak`, and the largest scale; peak None: only the codec makes codes.
    """

    kind: int
    dim: int
    payload: torch.Tensor
    scale: torch.Tensor | None = None
    table: torch.Tensor | None = None
    fixed: float = 1.0
    peak: float | None = None
    most: float = 1.0

    @property
    def written(self) -> bool:
        """The store kernel can write it."""
        return self.kind == PLAIN or self.peak is not None

    def number(self, dtype: torch.dtype, weighed: bool) -> torch.dtype:
        """The dtype in which the tensor cores multiply its numbers, exact for codes.

        weighed: V, whose scales are multiplied into the weights. These may be smaller than float16 can say.
        """
        if dtype == torch.float32 or self.kind == TABLE:
            return torch.float32
        return torch.bfloat16 if weighed and self.kind != PLAIN else dtype

    def numbers(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain twin of load.py: `slots [n]` -> numbers float32 [n, Hkv, D], scales float32 [n, Hkv, 1]."""
        codes = self.payload.view(-1, *self.payload.shape[2:])[slots]
        if self.kind == E4M3:
            numbers = codes.view(torch.float8_e4m3fn).float()
        elif self.kind == E5M2:
            numbers = codes.view(torch.float8_e5m2).float()
        else:
            numbers = codes.float() if self.table is None else self.table[codes.long()]
        if self.scale is None:
            return numbers, torch.full_like(numbers[..., :1], self.fixed)
        return numbers, self.scale.view(-1, *self.scale.shape[2:])[slots].float()


def side(codec: Codec, dim: int, planes: dict[str, torch.Tensor], dtype: str) -> Side:
    """The Side of a codec that `unreadable` has no reason against."""
    payload = planes["payload"]
    if codec.plain:
        return Side(PLAIN, dim, payload)
    how = reader(codec, dim, dtype)
    assert isinstance(how, Reader), how
    table = None if how.table is None else torch.from_numpy(how.table).to(payload.device)
    return Side(KINDS[how.type], dim, payload, planes.get("scale"), table, how.fixed, how.peak, how.most)


def unreadable(codec: Codec, dim: int, dtype: str) -> str | None:
    """Why vectors `[dim]` of a model of this dtype cannot be read; None when they can."""
    if codec.group > 1:
        return "it stores and reads token by token, and this codec seals groups of tokens"
    found = reader(codec, dim, dtype)
    return found if isinstance(found, str) else None
