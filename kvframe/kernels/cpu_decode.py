"""The compiled half of the `cpu` kernel: paged decode attention and the scatter of new tokens (numba).

The functions are C callbacks of one argument, the address of an int64 array of sizes and addresses, so that
any thread pool can run them (`kvframe.kernels.cpu` gives them to torch's own OpenMP threads). All threads of a
call run the same function and share the array: each takes the next piece of work from a counter in it.

    args [NARGS] int64      index  name        meaning
                            0      TICKET      counter: number of the next thread that comes in
                            1      NEXT        counter: next piece of work
                            2..    see the constants below

A piece of work is (one item) x (some KV heads). An item is one token and at most SPLIT positions of its
context; the grid of SPLITs starts at position 0, so it never depends on the rest of the batch. With SPLIT 256,
a window of 300 and 4 sinks the token at position 700 sees 0..3 and 401..700 and makes three items:

    split      0           1             2
    positions  0..3        401..511      512..700          -> three partial (max, sum, acc), merged by the
                                                              thread that finishes last, in this order

An item reads the query of its token; the result goes to the row of the last item's token. A token with a second query
for its sinks has it in another row, which the items of its sinks name; these hold nothing of the window then.

Numbers are read through typed pointers with `load`, which makes float32 of bf16 by a shift of 16 bits, and of codes of
one byte by what `cpu_bits` says. Scales never meet them: `q . (scale * code) = scale * (q . code)`, so the K scale
of a token multiplies its scores, and its V scale the weight that its values get. A factor that all tokens share goes
into the query, or into the result. The loops over keys and values are in `cpu_rows`.

Shape legend: Hq/Hkv heads, G = Hq / Hkv, Dk/Dv sizes.
"""

from __future__ import annotations

from numba import njit

from kvframe.kernels.cpu_rows import LEAF, TILE, add_to, multiply, scores_of
from kvframe.kernels.cpu_vector import (
    LOG2E,
    add8,
    cap8,
    copy_bytes,
    f32,
    fetch_add,
    fma,
    i64,
    load,
    load8,
    max8,
    max_of,
    mul8,
    pointer,
    put,
    put8,
    shift,
    splat,
    sum_of,
    weight,
    weight8,
)

TICKET, NEXT, WORK, HEADS_PER_WORK, SCRATCH, SCRATCH_SIZE = range(6)
Q, Q_TOKEN, Q_HEAD, K, V, OUT, SINKS, ITEMS, TABLES, COLUMNS, PARTIAL, DONE = range(6, 18)
HQ, HKV, DK, DV, BLOCK = range(18, 23)
SCALE, SOFTCAP, FACTOR = range(23, 26)  # float64 bits; softcap 0 is off; FACTOR of the results
K_SCALES, V_SCALES, K_TABLE, V_TABLE = range(26, 30)  # addresses, 0 where there are none
NARGS = 30
STORE_T, STORE_SLOTS, STORE_HKV = range(3)  # args of `scatter`; then for k and for v: source address, bytes
STORE_NARGS = 13  # between tokens and between heads, target address, bytes per vector

SPLIT = 256  # positions per item
SLOTS = SPLIT + TILE + 8  # slots of an item, and some repeats of its last one
ORDER = 2 * TILE + 8  # slots of a tile that was spread, and what is fetched ahead of it
ITEM = 8  # int64 fields per item: token, table row, sinks [a, b), window [a, b), item of its first split, splits
LOWEST = -1e30


@njit(**LEAF)
def soften(s, acc, state, n, padded, dim, softcap):
    """One step of the online softmax of one query head: scores `s [n]` become weights, `acc [dim]` is rescaled.

    `state` holds the running maximum and sum, in base 2 (scores carry a factor log2(e)):

        m' = max(m, max s);  p = 2 ** (s - m');  sum' = sum * 2 ** (m - m') + sum p;  acc' = acc * 2 ** (m - m')
    """
    if softcap > f32(0.0):
        for t in range(0, padded, 8):
            put8(s, t, cap8(load8(s, t), splat(softcap)))
    for t in range(n, padded):  # repeats of a key, with a weight of 2 ** -126
        put(s, t, f32(LOWEST))
    old = load(state, 0)
    top = splat(old)
    for t in range(0, padded, 8):
        top = max8(load8(s, t), top)
    new = max_of(top)
    top, total = splat(new), splat(f32(0.0))
    for t in range(0, padded, 8):
        p = weight8(load8(s, t), top)
        put8(s, t, p)
        total = add8(total, p)
    before = load(state, 1)
    if new > old:
        shrink = weight(old, new)
        before *= shrink
        put(state, 0, new)
        for d in range(0, dim, 8):
            put8(acc, d, mul8(load8(acc, d), splat(shrink)))
    put(state, 1, before + sum_of(total))


@njit(**LEAF)
def list_slots(table, block, start, stop, slots, n):
    """Appends the slots of positions [start, stop) to the n that `slots` has; answers the new n. Skips dropped blocks.

    With block 4 and table [7, 0, 3], positions 2..9 give

        28+2 28+3 | dropped | 12+0 12+1
    """
    while start < stop:
        logical = start // block
        end = (logical + 1) * block
        end = stop if stop < end else end
        physical = i64(load(table, logical))
        if physical != 0:
            first = physical * block + (start - logical * block)
            for i in range(end - start):
                put(slots, n + i, first + i)
            n += end - start
        start = end
    return n


@njit(**LEAF)
def finish(out, acc, dim, top, total, sinks, head, common):
    """Writes `out = acc / sum * common`, both `[dim]`; a learned sink adds its weight to the sum."""
    scale = f32(1.0)
    if sinks != 0:
        sink = load(pointer("float32", sinks), head) * f32(LOG2E)
        high = sink if sink > top else top
        scale = weight(top, high)
        total = total * scale + weight(sink, high)
    factor = splat(scale / total * common if total != f32(0.0) else f32(0.0))
    for d in range(0, dim, 8):
        put8(out, d, mul8(load8(acc, d), factor))


@njit(**LEAF)
def merge(acc, parts, stride, splits, dim):
    """Adds up partial results `[max, sum, acc [dim]]` that lie `stride` apart, in order, into `acc [dim]`."""
    top = load(parts, 0)
    for j in range(1, splits):
        x = load(parts, j * stride)
        top = x if x > top else top
    for d in range(0, dim, 8):
        put8(acc, d, splat(f32(0.0)))
    total = f32(0.0)
    for j in range(splits):
        part = shift(parts, j * stride)
        w = weight(load(part, 0), top)
        total += load(part, 1) * w
        for d in range(0, dim, 8):
            put8(acc, d, fma(splat(w), load8(part, 2 + d), load8(acc, d)))
    return top, total


def attend_function(dtype: str, k_type: str, v_type: str, k_scale: str, v_scale: str, stamp: int):
    """The function that every thread runs.

    Args:
        dtype: of queries and results. k_type, v_type: of keys and values, or of their codes (see POINTERS of
            `cpu_vector`; uint8: codes of a table). k_scale, v_scale: of their scales, where there are any.
    The arguments are constants of the function and thereby part of the name under which numba caches it.
    """

    def attend(address):
        a, floats, _stamp = pointer("int64", address), pointer("float64", address), stamp
        hq, hkv, dk, dv, block = load(a, HQ), load(a, HKV), load(a, DK), load(a, DV), load(a, BLOCK)
        heads, row_k, row_v, sinks = hq // hkv, hkv * dk, hkv * dv, load(a, SINKS)
        q, out = pointer(dtype, load(a, Q)), pointer(dtype, load(a, OUT))
        k, v = pointer(k_type, load(a, K)), pointer(v_type, load(a, V))
        k_scales, v_scales = pointer(k_scale, load(a, K_SCALES)), pointer(v_scale, load(a, V_SCALES))
        k_table, v_table = pointer("float32", load(a, K_TABLE)), pointer("float32", load(a, V_TABLE))
        scale, softcap = f32(load(floats, SCALE)), f32(load(floats, SOFTCAP))
        if softcap == f32(0.0):
            scale *= f32(LOG2E)
        common = f32(load(floats, FACTOR))
        partial, size = pointer("float32", load(a, PARTIAL)), hq * (dv + 2)
        step = load(a, HEADS_PER_WORK)
        pieces = (hkv + step - 1) // step

        scratch = load(a, SCRATCH) + fetch_add(a, TICKET, 1) * load(a, SCRATCH_SIZE)
        slots = pointer("int64", scratch)  # [SLOTS]
        s = shift(pointer("float32", scratch), 2 * SLOTS)  # [Hq, TILE]
        state = shift(s, hq * TILE)  # [Hq, 2]
        queries = shift(state, 2 * hq)  # [Hq, Dk]
        acc = shift(queries, hq * dk)  # [Hq, Dv]
        row = shift(acc, hq * dv)  # [TILE]
        order = shift(pointer("int64", scratch), load(a, SCRATCH_SIZE) // 8 - ORDER)  # [ORDER] 0, 1, 2, ...
        room = shift(row, TILE)  # [TILE, Hkv, Dk or Dv], where a table is in use
        for t in range(ORDER):
            put(order, t, i64(t) if t < TILE else i64(0))
        while True:
            work = fetch_add(a, NEXT, 1)
            if work >= load(a, WORK):
                return
            number, h0 = work // pieces, (work % pieces) * step
            h1 = h0 + step if h0 + step < hkv else hkv
            item = shift(pointer("int64", load(a, ITEMS)), number * ITEM)
            token, first, splits = load(item, 0), load(item, 6), load(item, 7)
            table = shift(pointer("int32", load(a, TABLES)), load(item, 1) * load(a, COLUMNS))

            for head in range(h0 * heads, h1 * heads):
                source, target = shift(q, token * load(a, Q_TOKEN) + head * load(a, Q_HEAD)), shift(queries, head * dk)
                for d in range(0, dk, 8):
                    put8(target, d, mul8(load8(source, d), splat(scale)))
                put(state, 2 * head, f32(LOWEST))
                put(state, 2 * head + 1, f32(0.0))
                for d in range(0, dv, 8):
                    put8(acc, head * dv + d, splat(f32(0.0)))

            n = load(item, 3) - load(item, 3)
            n = list_slots(table, block, load(item, 2), load(item, 3), slots, n)  # the sinks
            n = list_slots(table, block, load(item, 4), load(item, 5), slots, n)  # the window
            for t in range(n, n + 8 + TILE):
                put(slots, t, load(slots, n - 1) if n > 0 else 0)
            for t in range(0, n, TILE):
                tile, m = shift(slots, t), n - t if n - t < TILE else TILE
                padded = (m + 7) // 8 * 8
                scores_of(s, queries, h0, h1, heads, k, row_k, tile, padded, dk, k_table, room, order)
                if load(a, K_SCALES) != 0:
                    multiply(s, h0, h1, heads, k_scales, hkv, tile, padded, row)
                for head in range(h0 * heads, h1 * heads):
                    soften(shift(s, head * TILE), shift(acc, head * dv), shift(state, 2 * head), m, padded, dv, softcap)
                if load(a, V_SCALES) != 0:
                    multiply(s, h0, h1, heads, v_scales, hkv, tile, padded, row)
                add_to(acc, s, h0, h1, heads, v, row_v, tile, padded, dv, v_table, room, order)

            last = True
            if splits > 1:
                for head in range(h0 * heads, h1 * heads):
                    mine = shift(partial, number * size + head * (dv + 2))
                    put(mine, 0, load(state, 2 * head))
                    put(mine, 1, load(state, 2 * head + 1))
                    for d in range(0, dv, 8):
                        put8(mine, 2 + d, load8(acc, head * dv + d))
                last = fetch_add(pointer("int64", load(a, DONE)), first * hkv + h0, 1) == splits - 1
            if last:
                token = load(pointer("int64", load(a, ITEMS)), (first + splits - 1) * ITEM)
                for head in range(h0 * heads, h1 * heads):
                    values, top, total = shift(acc, head * dv), load(state, 2 * head), load(state, 2 * head + 1)
                    if splits > 1:
                        top, total = merge(values, shift(partial, first * size + head * (dv + 2)), size, splits, dv)
                    finish(shift(out, (token * hq + head) * dv), values, dv, top, total, sinks, head, common)

    return attend


def scatter_function(stamp: int):
    """Copies the vectors of T tokens to their slots, byte by byte: keys, then values. See STORE_*."""

    def scatter(address):
        a, _stamp = pointer("int64", address), stamp
        slots, hkv = pointer("int64", load(a, STORE_SLOTS)), load(a, STORE_HKV)
        for part in range(2):
            b = shift(a, 3 + 5 * part)
            source, token, head, target, size = load(b, 0), load(b, 1), load(b, 2), load(b, 3), load(b, 4)
            runs, length = (1, hkv * size) if head == size else (hkv, size)  # heads that lie side by side: one copy
            for t in range(load(a, STORE_T)):
                row = target + load(slots, t) * hkv * size
                for h in range(runs):
                    copy_bytes(row + h * size, source + t * token + h * head, length)

    return scatter


def scratch_bytes(hq: int, dk: int, dv: int, spread: int = 0) -> int:
    """Bytes that one thread works in. A multiple of 64, with a cache line between threads. spread: numbers of a tile
    that is spread from a table, of one token."""
    floats = 2 * (SLOTS + ORDER) + hq * (TILE + 2 + dk + dv) + TILE * (1 + spread)
    return (floats * 4 + 127) // 64 * 64
