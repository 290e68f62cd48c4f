"""A tile of keys at the end of what is sealed: some queries see a key as a code, those of its group in full precision
(see kvframe.sealing). With groups of 4 and queries at 6 .. 9:

    key        0 1 2 3   4 5 6 7   8 9
    query 6    codes     raw
    query 8    codes     codes     raw        codes of 8, 9 are not there yet

So scores are computed of both and chosen pair by pair, and weights go to values of one or the other. Groups of K and V
may differ; a side whose group is 1 has codes only.

Shape legend: M rows of queries, N keys, DK/DV sizes of vectors padded to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvframe.kernels.triton.load import PLAIN, RANGED, numbers, raw_numbers, scales
from kvframe.kernels.triton.tile import find, finite, logits, product, scored, sees, spoiled, spoilers, weighed


@triton.jit
def coded(pos, live, last, GROUP: tl.constexpr):
    """bool [N]: the key is a code for some query."""
    if GROUP == 1:
        return live
    else:
        return live & (pos < last // GROUP * GROUP)


@triton.jit
def within_own(pos, q_pos, GROUP: tl.constexpr):
    """bool [M, N]: key and query are of one group."""
    return (q_pos // GROUP)[:, None] == (pos // GROUP)[None, :]


@triton.jit
def attend_open_tile(
    acc, most, total, q, second, q_pos, first, last, start, table, head, scale, softcap,
    k, k_scale, k_table, k_fixed, k_zero, k_raw, k_base, v, v_scale, v_table, v_fixed, v_zero, v_raw, v_base,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_NUMBER: tl.constexpr, V_NUMBER: tl.constexpr,
    K_BITS: tl.constexpr, K_SPAN: tl.constexpr, K_GROUP: tl.constexpr, V_BITS: tl.constexpr, V_SPAN: tl.constexpr,
    V_GROUP: tl.constexpr, CAREFUL: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As `attend_tile`; k_raw, k_base, v_raw, v_base: see `raw_numbers`, None and 0 for a side whose group is 1."""
    pos, live, slots = find(table, start, first, last, BLOCK, WINDOW, SINKS, N)
    there = coded(pos, live, last, K_GROUP)
    keys = numbers(k, k_table, k_scale, k_zero, slots, head, there, HEADS, BLOCK, K_DIM, DK, N, K_KIND, K_NUMBER,
                   K_BITS, K_SPAN, K_GROUP, HARDWARE)  # fmt: skip
    s = scored(q, second, keys, pos, start, SINKS, WIDE)
    if K_KIND != PLAIN and K_KIND != RANGED:
        s = s * scales(k_scale, k_fixed, slots, head, there, HEADS)[None, :]
    if K_GROUP > 1:
        open_k = live & (pos >= first // K_GROUP * K_GROUP)
        keys = raw_numbers(k_raw, k_base, pos, open_k, head, HEADS, K_DIM, DK, K_NUMBER)
        s = tl.where(within_own(pos, q_pos, K_GROUP), scored(q, second, keys, pos, start, SINKS, WIDE), s)
    s = logits(s, scale, softcap, SOFTCAP)
    seen = sees(pos, live, q_pos, WINDOW, SINKS)
    s = tl.where(seen, s, float("-inf"))
    p, shrink, most, total = weighed(s, most, total)
    acc = acc * shrink[:, None]
    if V_GROUP > 1:
        own = within_own(pos, q_pos, V_GROUP)
        open_v = live & (pos >= first // V_GROUP * V_GROUP)
        values = raw_numbers(v_raw, v_base, pos, open_v, head, HEADS, V_DIM, DV, V_NUMBER)
        if CAREFUL:
            values = finite(values, V_NUMBER)
        acc += product(tl.where(own, p, 0.0).to(V_NUMBER), values, WIDE)
        p = tl.where(own, 0.0, p)
    there = coded(pos, live, last, V_GROUP)
    if V_KIND != PLAIN and V_KIND != RANGED:
        p = tl.where(seen, p * scales(v_scale, v_fixed, slots, head, there, HEADS)[None, :], 0.0)
    values = numbers(v, v_table, v_scale, v_zero, slots, head, there, HEADS, BLOCK, V_DIM, DV, N, V_KIND, V_NUMBER,
                     V_BITS, V_SPAN, V_GROUP, HARDWARE)  # fmt: skip
    if CAREFUL:
        values = finite(values, V_NUMBER)
    acc += product(p.to(V_NUMBER), values, WIDE)
    return acc, most, total


@triton.jit
def spoil_open_tile(
    acc, q_pos, first, last, start, table, head, v, v_table, v_scale, v_zero, v_raw, v_base,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, V_DIM: tl.constexpr,
    DV: tl.constexpr, N: tl.constexpr, V_KIND: tl.constexpr, V_NUMBER: tl.constexpr, V_BITS: tl.constexpr,
    V_SPAN: tl.constexpr, V_GROUP: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`acc [M, DV]` with the values in it that `attend_open_tile` left out, for those who see them."""
    pos, live, slots = find(table, start, first, last, BLOCK, WINDOW, SINKS, N)
    seen = sees(pos, live, q_pos, WINDOW, SINKS)
    values = numbers(v, v_table, v_scale, v_zero, slots, head, coded(pos, live, last, V_GROUP), HEADS, BLOCK, V_DIM, DV,
                     N, V_KIND, V_NUMBER, V_BITS, V_SPAN, V_GROUP, HARDWARE)  # fmt: skip
    if V_GROUP > 1:
        own = within_own(pos, q_pos, V_GROUP)
        open_v = live & (pos >= first // V_GROUP * V_GROUP)
        raws = raw_numbers(v_raw, v_base, pos, open_v, head, HEADS, V_DIM, DV, V_NUMBER)
        count = spoilers(seen & own, raws, V_NUMBER, WIDE)
        count += spoilers(seen & (own == 0), values, V_NUMBER, WIDE)
        return spoiled(acc, count)
    else:
        return spoiled(acc, spoilers(seen, values, V_NUMBER, WIDE))
