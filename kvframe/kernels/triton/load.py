"""How a tile of K or V becomes numbers.

Numbers and scales are answered apart: the scale of a key goes on its scores, that of a value into its weight, so the
tensor cores multiply codes, which float16 and bfloat16 hold exactly.

Numbers of a range are the exception: their scale and zero differ within a vector, so they are answered whole.

Planes are contiguous, `payload [N, S, Hkv, D]` and `scale [N, S, Hkv, 1]`. With S = 16, Hkv = 2, D = 64, the vector of
head 1 at slot 35 (block 2, offset 3) begins at number (35 * 2 + 1) * 64 of the payload, its scale is number 35 * 2 + 1.

Shape legend: n keys of a tile, D size of a vector, P the power of two it is padded to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvframe.kernels.triton import sides
from kvframe.kernels.triton.bits import e4m3_numbers, e5m2_numbers
from kvframe.kernels.triton.ranged import ranged_numbers

PLAIN, INT8 = tl.constexpr(sides.PLAIN), tl.constexpr(sides.INT8)
E4M3, E5M2, TABLE = tl.constexpr(sides.E4M3), tl.constexpr(sides.E5M2), tl.constexpr(sides.TABLE)
RANGED = tl.constexpr(sides.RANGED)


@triton.jit
def place(slots, head, HEADS: tl.constexpr):
    """slots int [n] -> int64 [n]: the number of the vector of a head."""
    return slots.to(tl.int64) * HEADS + head


@triton.jit
def numbers(payload, table, scale, zero, slots, head, live, HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
            P: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr,
            SPAN: tl.constexpr, GROUP: tl.constexpr, HARDWARE: tl.constexpr):  # fmt: skip
    """The vectors `[N, P]` in dtype NUMBER at `slots [N]`; zeros where not `live [N]`, and behind D.

    scale, zero, BITS, SPAN, GROUP: of RANGED. HARDWARE: the chip turns e4m3 into numbers by itself.
    """
    if KIND == RANGED:
        return ranged_numbers(
            payload, scale, zero, slots, head, live, HEADS, BLOCK, D, P, N, NUMBER, BITS, SPAN, GROUP
        )  # fmt: skip
    else:
        d = tl.arange(0, P)
        mask = live[:, None]
        if P != D:
            mask = mask & (d < D)[None, :]
        places = place(slots, head, HEADS)
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
def scales(scale, fixed, slots, head, live, HEADS: tl.constexpr):
    """float32 [n]: the scale of each vector, 0 where not live; `fixed` where there is no plane."""
    if scale is None:
        return tl.where(live, fixed, 0.0)
    else:
        return tl.load(scale + place(slots, head, HEADS), mask=live, other=0.0).to(tl.float32)


@triton.jit
def raw_numbers(raw, base, pos, live, head, HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr,
                NUMBER: tl.constexpr):  # fmt: skip
    """The vectors `[n, P]` in full precision of the positions `pos [n]`, see kvframe.tails: the one at position p is
    vector base + p of `raw [.., Hkv, D]`; zeros where not live."""
    d = tl.arange(0, P)
    mask = live[:, None] & (d < D)[None, :]
    places = (base.to(tl.int64) + pos) * HEADS + head
    return tl.load(raw + (places[:, None] * D + d[None, :]), mask=mask, other=0.0).to(NUMBER)
