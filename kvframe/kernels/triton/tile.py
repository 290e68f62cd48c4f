"""One tile of keys under the running softmax, for the decode and the prefill kernel.

    score   s = q . k * scale (* scale of the key)      softcap * tanh(s / softcap)      in base 2: s * log2(e)
    weight  p = 2 ** (s - most)                         most: the largest score so far
    sums    total = sum of p;  acc = sum of p * v       both shrink by 2 ** (old most - new most) when most grows

Running softmax: Milakov and Gimelshein, arXiv:1805.02867; tiles: Dao et al., FlashAttention, arXiv:2205.14135.

Which slots. With block_size 4 and table [7, 0, 3], the keys 4 .. 11 of a tile of eight that starts at 4:

    position   4 5 6 7 |  8  9 10 11
    block      0       |  3             table[position // 4]; 0: dropped, not loaded, not seen
    slot       - - - - | 12 13 14 15    block * 4 + position % 4

What a query does not see must not touch it, even where it is NaN or infinite: scores are replaced by -inf, and values
that are not finite are left out of the product, and added at the end for those who see them (see
kvframe.kernels.weighing). Both are for tiles that are not WHOLE; where all queries see the same keys, only these are
loaded. And the second one is for prefill when it has seen that something is not finite (CAREFUL).

Shape legend: M rows of queries, n keys, DK/DV sizes of vectors padded to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvframe.kernels.triton.load import PLAIN, RANGED, numbers, scales

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """`a [M, d] @ b [d, n]` in float32. WIDE: the interpreter cannot multiply bfloat16."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def tanh(x):
    """By a series where `exp` loses digits: its first term left out is below 1e-7 of the result."""
    y = x * x
    near = x * (1.0 - y * (1.0 / 3 - y * (2.0 / 15 - y * (17.0 / 315 - y * (62.0 / 2835)))))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def logits(products, scale, softcap, SOFTCAP: tl.constexpr):
    """Products of queries and keys -> scores in base 2."""
    if SOFTCAP:
        return tanh(products * (scale / softcap)) * (softcap * LOG2E)
    else:
        return products * (scale * LOG2E)


@triton.jit
def find(table, start, first, last, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, N: tl.constexpr):
    """Positions of the keys start .. start + N - 1, which of them some query sees (bool), and their slots (int64)."""
    pos = start + tl.arange(0, N)
    live = pos <= last
    if WINDOW:
        live = live & ((pos > first - WINDOW) | (pos < SINKS))
    if BLOCK % N == 0:  # all of one block
        block = tl.load(table + start // BLOCK)
        slots = block.to(tl.int64) * BLOCK + (start % BLOCK + tl.arange(0, N))
    else:
        block = tl.load(table + pos // BLOCK, mask=live, other=0)
        slots = block.to(tl.int64) * BLOCK + pos % BLOCK
    return pos, live & (block != 0), slots


@triton.jit
def sees(pos, live, q_pos, WINDOW: tl.constexpr, SINKS: tl.constexpr):
    """bool [M, N]: the query sees the key."""
    seen = live[None, :] & (pos[None, :] <= q_pos[:, None])
    if WINDOW:
        seen = seen & ((q_pos[:, None] - pos[None, :] < WINDOW) | (pos < SINKS)[None, :])
    return seen


@triton.jit
def scored(q, second, keys, pos, start, SINKS: tl.constexpr, WIDE: tl.constexpr):
    """Products `[M, N]` of queries and `keys [N, DK]`; `second` meets the keys < SINKS."""
    s = product(q, tl.trans(keys), WIDE)
    if second is not None:
        if start < SINKS:
            s = tl.where((pos < SINKS)[None, :], product(second, tl.trans(keys), WIDE), s)
    return s


@triton.jit
def weighed(s, most, total):
    """Scores `[M, N]` under the running softmax: weights, what the sums shrink by, and the new `most` and `total`."""
    higher = tl.maximum(most, tl.max(s, axis=1))
    top = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: no difference of infinities
    p = tl.exp2(s - top[:, None])
    shrink = tl.exp2(most - top)
    return p, shrink, higher, total * shrink + tl.sum(p, axis=1)


@triton.jit
def finite(values, NUMBER: tl.constexpr):
    """The same with 0 for what is not finite."""
    wide = values.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0).to(NUMBER)


@triton.jit
def attend_tile(
    acc, most, total, q, second, q_pos, first, last, start, table, head, scale, softcap,
    k, k_scale, k_table, k_fixed, k_zero, v, v_scale, v_table, v_fixed, v_zero,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, N: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_NUMBER: tl.constexpr, V_NUMBER: tl.constexpr,
    K_BITS: tl.constexpr, K_SPAN: tl.constexpr, K_GROUP: tl.constexpr, V_BITS: tl.constexpr, V_SPAN: tl.constexpr,
    V_GROUP: tl.constexpr, WHOLE: tl.constexpr, CAREFUL: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`acc [M, DV]`, `most [M]`, `total [M]` with the keys start .. start + N - 1 in them.

    Args:
        q, second: [M, DK] in K_NUMBER; second: the queries for keys < SINKS, or None.
        q_pos: int32 [M]. first, last: the least and largest position of a query that counts.
        table: of the request. k, k_scale, k_table, k_fixed, k_zero, v ..: see Side.
        WHOLE: every query sees every key that is loaded. CAREFUL: leaves out values that are not finite, where not
            WHOLE; `spoil_tile` adds them.
    """
    pos, live, slots = find(table, start, first, last, BLOCK, WINDOW, SINKS, N)
    keys = numbers(k, k_table, k_scale, k_zero, slots, head, live, HEADS, BLOCK, K_DIM, DK, N, K_KIND, K_NUMBER,
                   K_BITS, K_SPAN, K_GROUP, HARDWARE)  # fmt: skip
    s = scored(q, second, keys, pos, start, SINKS, WIDE)
    if K_KIND != PLAIN and K_KIND != RANGED:
        s = s * scales(k_scale, k_fixed, slots, head, live, HEADS)[None, :]
    s = logits(s, scale, softcap, SOFTCAP)
    if WHOLE:
        seen = live[None, :]
    else:
        seen = sees(pos, live, q_pos, WINDOW, SINKS)
    s = tl.where(seen, s, float("-inf"))
    p, shrink, most, total = weighed(s, most, total)
    acc = acc * shrink[:, None]
    if V_KIND != PLAIN and V_KIND != RANGED:
        p = p * scales(v_scale, v_fixed, slots, head, live, HEADS)[None, :]
        if not WHOLE:
            p = tl.where(seen, p, 0.0)  # a scale may be NaN
    values = numbers(v, v_table, v_scale, v_zero, slots, head, live, HEADS, BLOCK, V_DIM, DV, N, V_KIND, V_NUMBER,
                     V_BITS, V_SPAN, V_GROUP, HARDWARE)  # fmt: skip
    if CAREFUL and not WHOLE:
        values = finite(values, V_NUMBER)
    acc += product(p.to(V_NUMBER), values, WIDE)
    return acc, most, total


@triton.jit
def spoilers(seen, values, V_NUMBER: tl.constexpr, WIDE: tl.constexpr):
    """Who of `seen [M, N]` sees which values that are not finite: int32 [M, DV], to be added up.

    One product counts infinities, their opposites and NaN at once: a tile has at most 64 keys, so 1, 128 and 128 ** 2
    do not mix, and float16 holds them.
    """
    wide = values.to(tl.float32)
    worth = tl.where(wide == float("inf"), 1.0, tl.where(wide == float("-inf"), 128.0, 0.0))
    worth = tl.where(wide != wide, 16384.0, worth).to(V_NUMBER)
    return product(seen.to(tl.float32).to(V_NUMBER), worth, WIDE).to(tl.int32)


@triton.jit
def spoiled(acc, count):
    """`acc` with the values in it that `spoilers` counted."""
    up, down, none = count & 127, (count >> 7) & 127, count >> 14
    more = tl.where(up > 0, float("inf"), tl.where(down > 0, float("-inf"), 0.0))
    return acc + tl.where((none > 0) | ((up > 0) & (down > 0)), float("nan"), more)


@triton.jit
def spoil_tile(
    acc, q_pos, first, last, start, table, head, v, v_table, v_scale, v_zero,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, V_DIM: tl.constexpr,
    DV: tl.constexpr, N: tl.constexpr, V_KIND: tl.constexpr, V_NUMBER: tl.constexpr, V_BITS: tl.constexpr,
    V_SPAN: tl.constexpr, V_GROUP: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`acc [M, DV]` with the values in it that `attend_tile` left out, for those who see them."""
    pos, live, slots = find(table, start, first, last, BLOCK, WINDOW, SINKS, N)
    values = numbers(v, v_table, v_scale, v_zero, slots, head, live, HEADS, BLOCK, V_DIM, DV, N, V_KIND, V_NUMBER,
                     V_BITS, V_SPAN, V_GROUP, HARDWARE)  # fmt: skip
    return spoiled(acc, spoilers(sees(pos, live, q_pos, WINDOW, SINKS), values, V_NUMBER, WIDE))
