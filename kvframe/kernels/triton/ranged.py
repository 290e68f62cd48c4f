"""Numbers as steps of a range, `zero + scale * code` (see kvframe.types.Ranged), and back.

Several codes share a byte, the first number in the lowest bits. With 4 bits:

    codes      1 2 3 4 5 6 ..          bytes      0x21 0x43 0x65 ..
    low = byte & 15: 1 3 5 ..          high = byte >> 4: 2 4 6 ..          interleaved: 1 2 3 4 5 6 ..

Scale and zero belong to the same number of all tokens of a group (SPAN 0: keys), or to SPAN neighbouring numbers of one
token (values). With blocks of S slots and groups of G, a group is entry `block * (S // G) + offset // G` of its plane.

Shape legend: n keys of a tile, D size of a vector, P the power of two it is padded to, G group, B bytes of a vector,
PER codes of a byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvframe.kernels.triton import sides

FAR = tl.constexpr(sides.FAR)  # no difference of two numbers up to this one overflows float32
LEAST = tl.constexpr(2.0**-126)  # smallest normal float32
HALF = tl.constexpr(65504.0)  # the largest float16
WIDEST = tl.constexpr(3.3895313892515355e38)  # the largest bfloat16


@triton.jit
def within(x, low, high):
    """x limited to low .. high; NaN stays."""
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def spread(packed, BITS: tl.constexpr):
    """uint8 [n, B] -> codes [n, B * 8 / BITS]."""
    if BITS == 8:
        return packed
    elif BITS == 4:
        return tl.interleave(packed & 15, packed >> 4)
    else:
        even = tl.interleave(packed & 3, (packed >> 4) & 3)
        odd = tl.interleave((packed >> 2) & 3, packed >> 6)
        return tl.interleave(even, odd)


@triton.jit
def entry(slots, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Number of the group that a slot lies in."""
    return slots // BLOCK * (BLOCK // GROUP) + slots % BLOCK // GROUP


@triton.jit
def ranged_numbers(payload, scale, zero, slots, head, live, HEADS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
                   P: tl.constexpr, N: tl.constexpr, NUMBER: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr,
                   GROUP: tl.constexpr):  # fmt: skip
    """The vectors `[N, P]` in dtype NUMBER at `slots [N]`; zeros where not `live [N]`, and behind D."""
    PER: tl.constexpr = 8 // BITS
    places = slots * HEADS + head
    b, d = tl.arange(0, P // PER), tl.arange(0, P)
    mask = live[:, None] & (b < D // PER)[None, :]
    packed = tl.load(payload + (places[:, None] * (D // PER) + b[None, :]), mask=mask, other=0)
    codes = spread(packed, BITS).to(tl.float32)  # [N, P]
    inside = live[:, None] & (d < D)[None, :]
    if SPAN > 0:
        at = places[:, None] * ((D + SPAN - 1) // SPAN) + (d // SPAN)[None, :]
        scales = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        zeros = tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    elif GROUP % N == 0 and BLOCK % N == 0:  # the tile lies in one group
        group = tl.min(entry(slots, BLOCK, GROUP), axis=0)
        at = (group * HEADS + head) * D + d
        there = (d < D) & (tl.max(live.to(tl.int32), axis=0) > 0)
        scales = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)[None, :]
        zeros = tl.load(zero + at, mask=there, other=0.0).to(tl.float32)[None, :]
    else:
        at = (entry(slots, BLOCK, GROUP) * HEADS + head)[:, None] * D + d[None, :]
        scales = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        zeros = tl.load(zero + at, mask=inside, other=0.0).to(tl.float32)
    x = zeros + scales * codes
    if NUMBER == tl.float16:  # the last code may stand for a little more than there is
        x = within(x, -HALF, HALF)
    return tl.where(inside, x, 0.0).to(NUMBER)


@triton.jit
def toward(x, DTYPE: tl.constexpr, UP: tl.constexpr):
    """float32 x, at most as large as the largest of DTYPE, rounded to DTYPE: never down (UP) or never up. float32."""
    if DTYPE == tl.float32:
        return x
    elif DTYPE == tl.bfloat16:  # the upper half of a float32: cut, and one more where that went the wrong way
        bits = x.to(tl.int32, bitcast=True)
        more = ((bits & 0xFFFF) != 0) & ((x > 0) == UP)
        made = ((bits & -65536) + tl.where(more, 65536, 0)).to(tl.float32, bitcast=True)
        return tl.where(x == x, within(made, -WIDEST, WIDEST), x)
    else:
        near = x.to(tl.float16)
        back = near.to(tl.float32)
        if UP:
            wrong = back < x
        else:
            wrong = back > x
        # the next number away from zero is the next integer, whatever the sign
        bits = near.to(tl.int16, bitcast=True).to(tl.int32)
        first: tl.constexpr = 1 if UP else -32767  # the smallest number of either sign
        beside = tl.where(back == 0, first, tl.where((back > 0) == UP, bits + 1, bits - 1))
        made = tl.where(wrong, beside, bits).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return tl.where(x == x, within(made, -HALF, HALF), x)


@triton.jit
def factors(low, high, bad, most, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Scale and zero (float32) of numbers between `low` and `high`, NaN where `bad`; most: see Ranged."""
    zero = toward(within(low, -most, most), DTYPE, False)
    wide = within(high, -most, most) - zero
    scale = toward(tl.div_rn(wide, tl.full(wide.shape, 1.0, tl.float32) * ((1 << BITS) - 1)), DTYPE, True)
    return tl.where(bad, float("nan"), scale), tl.where(bad, float("nan"), zero)


@triton.jit
def ranged_codes(x, scale, zero, BITS: tl.constexpr):
    """Codes (int32) of float32 x, all of one shape."""
    levels: tl.constexpr = (1 << BITS) - 1
    steps = tl.div_rn(within(x, -FAR, FAR) - zero, tl.where(scale < LEAST, LEAST, scale))
    steps = tl.where(steps == steps, within(steps, 0.0, levels * 1.0), 0.0)
    return ((steps + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2 ** 23: no bits behind the point


@triton.jit
def pack(codes, BITS: tl.constexpr, PER: tl.constexpr):
    """int32 [.., B, PER] -> uint8 [.., B]."""
    return tl.sum(codes << (tl.arange(0, PER) * BITS)[None, None, :], axis=2).to(tl.uint8)
