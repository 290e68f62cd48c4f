"""How a tile of K or V becomes numbers.

Numbers and scales are answered apart: the scale of a key goes on its scores, that of a value into its weight, so the
tensor cores multiply codes, which float16 and bfloat16 hold exactly.

Planes are contiguous, `payload [N, S, Hkv, D]` and `scale [N, S, Hkv, 1]`. With S = 16, Hkv = 2, D = 64, the vector of
head 1 at slot 35 (block 2, offset 3) begins at number (35 * 2 + 1) * 64 of the payload, its scale is number 35 * 2 + 1.

Shape legend: n keys of a tile, D size of a vector, P the power of two it is padded to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvframe.kernels.triton import sides
from kvframe.kernels.triton.bits import e4m3_numbers, e5m2_numbers

PLAIN, INT8 = tl.constexpr(sides.PLAIN), tl.constexpr(sides.INT8)
E4M3, E5M2, TABLE = tl.constexpr(sides.E4M3), tl.constexpr(sides.E5M2), tl.constexpr(sides.TABLE)


@triton.jit
def place(slots, head, HEADS: tl.constexpr):
    """slots int [n] -> int64 [n]: the number of the vector of a head."""
    return slots.to(tl.int64) * HEADS + head


@triton.jit
def numbers(payload, table, places, live, D: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr, NUMBER: tl.constexpr,
            HARDWARE: tl.constexpr):  # fmt: skip
    """The vectors `[n, P]` in dtype NUMBER; zeros where not `live [n]`, and behind D.

    HARDWARE: the chip turns e4m3 into numbers by itself.
    """
    d = tl.arange(0, P)
    mask = live[:, None]
    if P != D:
        mask = mask & (d < D)[None, :]
    codes = tl.load(payload + (places[:, None] * D + d[None, :]), mask=mask, other=0)
    if KIND == E4M3:
        if HARDWARE:
            return codes.to(tl.float8e4nv, bitcast=True).to(NUMBER)
        else:
            return e4m3_numbers(codes).to(NUMBER)
    elif KIND == E5M2:
        return e5m2_numbers(codes).to(tl.float32).to(NUMBER)
    elif KIND == TABLE:
        return tl.load(table + codes.to(tl.int32), mask=mask, other=0.0).to(NUMBER)
    elif KIND == INT8:
        return codes.to(tl.float32).to(NUMBER)
    else:
        return codes.to(NUMBER)


@triton.jit
def scales(scale, fixed, places, live):
    """float32 [n]: the scale of each vector, 0 where not live; `fixed` where there is no plane."""
    if scale is None:
        return tl.where(live, fixed, 0.0)
    else:
        return tl.load(scale + places, mask=live, other=0.0).to(tl.float32)
