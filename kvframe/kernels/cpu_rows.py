"""Rows of keys and values against queries and weights: the inner loops of decode attention (numba).

A tile is at most TILE slots of one context. `key_scores` and `add_values` read what lies there as it is stored; scales
meet the scores and the weights (`multiply`), and only codes of a table that no format has are turned into float32
first, a tile at a time (`spread`). Shape legend: Hq/Hkv heads, G = Hq / Hkv, dim size of a vector.
"""

from __future__ import annotations

from numba import njit
from numba.extending import overload

from kvframe.kernels.cpu_bits import HIDDEN_NAN
from kvframe.kernels.cpu_vector import (
    POINTERS,
    add8,
    any_ones,
    f32,
    fma,
    i64,
    line_of,
    load,
    load8,
    mul8,
    nan8,
    prefetch,
    put,
    put8,
    put_sums,
    shift,
    sizes32,
    splat,
    sum_of,
)

TILE = 32  # keys per rescale of the online softmax; a multiple of 8
LEAF = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@njit(**LEAF)
def fetch_ahead(x, row, slots, start, stop):
    """Asks for numbers [start, stop) of the rows `slots[0..3]`, so that they are there when their tile comes."""
    for t in range(4):
        vectors = shift(x, load(slots, t) * row)
        for i in range(start, stop, line_of(x)):
            prefetch(vectors, i)


@njit(**LEAF)
def key_scores(s, q, h0, h1, heads, k, row, slots, n, dim):
    """`s[h * heads + g, t] = q[h * heads + g] . k[slots[t], h]` for the KV heads h in [h0, h1) and their query heads g.

    `q [Hq, dim]`, `s [Hq, TILE]`, `k [slots, row]` with `row = Hkv * dim`. Rows are read from left to right, as memory
    likes it. Four keys and two heads, or two keys and three heads, go together: as many sums are under way at once as
    there are registers for, and a key is widened once for all these heads.
    """
    for t in range(0, n, 4):
        fetch_ahead(k, row, shift(slots, t + TILE), h0 * dim, h1 * dim)
        for h in range(h0, h1):
            base = h * dim
            k0, k1 = shift(k, load(slots, t) * row + base), shift(k, load(slots, t + 1) * row + base)
            k2, k3 = shift(k, load(slots, t + 2) * row + base), shift(k, load(slots, t + 3) * row + base)
            head, stop = h * heads, (h + 1) * heads
            while stop - head == 3 or stop - head > 4:
                p, r, u = shift(q, head * dim), shift(q, (head + 1) * dim), shift(q, (head + 2) * dim)
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = splat(f32(0.0))
                for d in range(0, dim, 8):  # twelve sums at once would not fit
                    x, y, w = load8(p, d), load8(r, d), load8(u, d)
                    z = load8(k0, d)
                    a0, b0, c0 = fma(x, z, a0), fma(y, z, b0), fma(w, z, c0)
                    z = load8(k1, d)
                    a1, b1, c1 = fma(x, z, a1), fma(y, z, b1), fma(w, z, c1)
                for d in range(0, dim, 8):
                    x, y, w = load8(p, d), load8(r, d), load8(u, d)
                    z = load8(k2, d)
                    a2, b2, c2 = fma(x, z, a2), fma(y, z, b2), fma(w, z, c2)
                    z = load8(k3, d)
                    a3, b3, c3 = fma(x, z, a3), fma(y, z, b3), fma(w, z, c3)
                put_sums(s, head * TILE + t, a0, a1, a2, a3)
                put_sums(s, (head + 1) * TILE + t, b0, b1, b2, b3)
                put_sums(s, (head + 2) * TILE + t, c0, c1, c2, c3)
                head += 3
            while head + 1 < stop:
                p, r = shift(q, head * dim), shift(q, (head + 1) * dim)
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(f32(0.0))
                for d in range(0, dim, 8):
                    x, y = load8(p, d), load8(r, d)
                    z = load8(k0, d)
                    a0, b0 = fma(x, z, a0), fma(y, z, b0)
                    z = load8(k1, d)
                    a1, b1 = fma(x, z, a1), fma(y, z, b1)
                    z = load8(k2, d)
                    a2, b2 = fma(x, z, a2), fma(y, z, b2)
                    z = load8(k3, d)
                    a3, b3 = fma(x, z, a3), fma(y, z, b3)
                put_sums(s, head * TILE + t, a0, a1, a2, a3)
                put_sums(s, (head + 1) * TILE + t, b0, b1, b2, b3)
                head += 2
            if head < stop:
                p = shift(q, head * dim)
                a0 = a1 = a2 = a3 = splat(f32(0.0))
                for d in range(0, dim, 8):
                    x = load8(p, d)
                    a0, a1 = fma(x, load8(k0, d), a0), fma(x, load8(k1, d), a1)
                    a2, a3 = fma(x, load8(k2, d), a2), fma(x, load8(k3, d), a3)
                put_sums(s, head * TILE + t, a0, a1, a2, a3)


@njit(**LEAF)
def add_values(acc, s, h0, h1, heads, v, row, slots, n, dim):
    """`acc[h * heads + g] += sum over t of s[h * heads + g, t] * v[slots[t], h]`: `acc [Hq, dim]`. See `key_scores`."""
    for t in range(0, n, 4):
        fetch_ahead(v, row, shift(slots, t + TILE), h0 * dim, h1 * dim)
        for h in range(h0, h1):
            base = h * dim
            v0, v1 = shift(v, load(slots, t) * row + base), shift(v, load(slots, t + 1) * row + base)
            v2, v3 = shift(v, load(slots, t + 2) * row + base), shift(v, load(slots, t + 3) * row + base)
            head, stop = h * heads, (h + 1) * heads
            while stop - head == 3 or stop - head > 4:
                a, b, c = shift(acc, head * dim), shift(acc, (head + 1) * dim), shift(acc, (head + 2) * dim)
                for i in range(0, 4, 2):  # twelve weights at once would not fit
                    w = shift(s, head * TILE + t + i)
                    x0, x1 = splat(load(w, 0)), splat(load(w, 1))
                    y0, y1 = splat(load(w, TILE)), splat(load(w, TILE + 1))
                    w0, w1 = splat(load(w, 2 * TILE)), splat(load(w, 2 * TILE + 1))
                    p, r = (v0, v1) if i == 0 else (v2, v3)
                    for d in range(0, dim, 8):
                        z = load8(p, d)
                        x, y, u = fma(x0, z, load8(a, d)), fma(y0, z, load8(b, d)), fma(w0, z, load8(c, d))
                        z = load8(r, d)
                        put8(a, d, fma(x1, z, x))
                        put8(b, d, fma(y1, z, y))
                        put8(c, d, fma(w1, z, u))
                head += 3
            while head + 1 < stop:
                a, b = shift(acc, head * dim), shift(acc, (head + 1) * dim)
                w = shift(s, head * TILE + t)
                x0, x1, x2, x3 = splat(load(w, 0)), splat(load(w, 1)), splat(load(w, 2)), splat(load(w, 3))
                w = shift(w, TILE)
                y0, y1, y2, y3 = splat(load(w, 0)), splat(load(w, 1)), splat(load(w, 2)), splat(load(w, 3))
                for d in range(0, dim, 8):
                    x, y = load8(a, d), load8(b, d)
                    z = load8(v0, d)
                    x, y = fma(x0, z, x), fma(y0, z, y)
                    z = load8(v1, d)
                    x, y = fma(x1, z, x), fma(y1, z, y)
                    z = load8(v2, d)
                    x, y = fma(x2, z, x), fma(y2, z, y)
                    z = load8(v3, d)
                    x, y = fma(x3, z, x), fma(y3, z, y)
                    put8(a, d, x)
                    put8(b, d, y)
                head += 2
            if head < stop:
                a, w = shift(acc, head * dim), shift(s, head * TILE + t)
                x0, x1, x2, x3 = splat(load(w, 0)), splat(load(w, 1)), splat(load(w, 2)), splat(load(w, 3))
                for d in range(0, dim, 8):
                    x = fma(x1, load8(v1, d), fma(x0, load8(v0, d), load8(a, d)))
                    put8(a, d, fma(x3, load8(v3, d), fma(x2, load8(v2, d), x)))


@njit(**LEAF)
def multiply(s, h0, h1, heads, scales, hkv, slots, n, row):
    """`s[h * heads + g, t] *= scales[slots[t], h]`; `scales [slots, Hkv]`, `row [TILE]` is scratch."""
    for t in range(0, n, 4):
        for i in range(4):  # those of the next tile
            prefetch(scales, load(slots, t + TILE + i) * hkv + h0)
    for h in range(h0, h1):
        for t in range(n):
            put(row, t, load(scales, load(slots, t) * hkv + h))
        for head in range(h * heads, (h + 1) * heads):
            for t in range(0, n, 8):
                put8(s, head * TILE + t, mul8(load8(s, head * TILE + t), load8(row, t)))


@njit(**LEAF)
def spread(target, table, codes, h0, h1, hkv, dim, slots, n):
    """`target[t, h] = table[codes[slots[t], h]]` for n slots: `target [TILE, Hkv, dim]`, `codes [slots, Hkv, dim]`."""
    for t in range(n):
        row, source = shift(target, t * hkv * dim), shift(codes, load(slots, t) * hkv * dim)
        for i in range(h0 * dim, h1 * dim):
            put(row, i, load(table, i64(load(source, i))))


@njit(**LEAF)
def has_nan(x, row, slots, n, start, stop):
    """Whether some code [start, stop) of the rows `slots[0 .. n)` is a NaN that loading does not show; n is a multiple
    of 4, `start` and `stop` are multiples of 8."""
    x0 = x1 = x2 = x3 = splat(f32(0.0))
    for t in range(0, n, 4):
        p0, p1 = shift(x, load(slots, t) * row), shift(x, load(slots, t + 1) * row)
        p2, p3 = shift(x, load(slots, t + 2) * row), shift(x, load(slots, t + 3) * row)
        i = start
        while i + 32 <= stop:
            x0, x1 = sizes32(p0, i, 32, x0), sizes32(p1, i, 32, x1)
            x2, x3 = sizes32(p2, i, 32, x2), sizes32(p3, i, 32, x3)
            i += 32
        while i < stop:
            x0, x1 = sizes32(p0, i, 8, x0), sizes32(p1, i, 8, x1)
            x2, x3 = sizes32(p2, i, 8, x2), sizes32(p3, i, 8, x3)
            i += 8
    return any_ones(x0) or any_ones(x1) or any_ones(x2) or any_ones(x3)


@njit(**LEAF)
def spoil_scores(s, h0, h1, heads, k, row, slots, n, dim):
    """Makes the scores NaN of keys that hold one. Arguments as of `key_scores`."""
    for t in range(n):
        for h in range(h0, h1):
            codes, nan = shift(k, load(slots, t) * row + h * dim), splat(f32(0.0))
            for d in range(0, dim, 8):
                nan = add8(nan, nan8(codes, d))
            nothing = sum_of(nan)  # 0, or NaN
            for head in range(h * heads, (h + 1) * heads):
                put(s, head * TILE + t, load(s, head * TILE + t) + nothing)


@njit(**LEAF)
def spoil_values(acc, h0, h1, heads, v, row, slots, n, dim):
    """Makes the channels of `acc` NaN in which a value holds one. Arguments as of `add_values`."""
    for head in range(h0 * heads, h1 * heads):
        for t in range(n):
            codes = shift(v, load(slots, t) * row + head // heads * dim)
            for d in range(0, dim, 8):
                put8(acc, head * dim + d, add8(load8(acc, head * dim + d), nan8(codes, d)))


def scores_of(s, q, h0, h1, heads, k, row, slots, n, dim, table, room, order):
    """`key_scores`, with what the type of `k` asks for: `spread` before it where keys are codes of a table, and NaN
    after it where loading does not show them. numba chooses."""


def add_to(acc, s, h0, h1, heads, v, row, slots, n, dim, table, room, order):
    """`add_values`, likewise."""


def hides_nan(x) -> bool:
    return getattr(x.dtype, "format", None) in HIDDEN_NAN


@overload(scores_of, strict=False)
def _scores_of(s, q, h0, h1, heads, k, row, slots, n, dim, table, room, order):
    def direct(s, q, h0, h1, heads, k, row, slots, n, dim, table, room, order):
        key_scores(s, q, h0, h1, heads, k, row, slots, n, dim)

    def by_table(s, q, h0, h1, heads, k, row, slots, n, dim, table, room, order):
        spread(room, table, k, h0, h1, row // dim, dim, slots, n)
        key_scores(s, q, h0, h1, heads, room, row, order, n, dim)

    def mended(s, q, h0, h1, heads, k, row, slots, n, dim, table, room, order):
        key_scores(s, q, h0, h1, heads, k, row, slots, n, dim)
        if has_nan(k, row, slots, n, h0 * dim, h1 * dim):
            spoil_scores(s, h0, h1, heads, k, row, slots, n, dim)

    return mended if hides_nan(k) else by_table if k.dtype == POINTERS["uint8"] else direct


@overload(add_to, strict=False)
def _add_to(acc, s, h0, h1, heads, v, row, slots, n, dim, table, room, order):
    def direct(acc, s, h0, h1, heads, v, row, slots, n, dim, table, room, order):
        add_values(acc, s, h0, h1, heads, v, row, slots, n, dim)

    def by_table(acc, s, h0, h1, heads, v, row, slots, n, dim, table, room, order):
        spread(room, table, v, h0, h1, row // dim, dim, slots, n)
        add_values(acc, s, h0, h1, heads, room, row, order, n, dim)

    def mended(acc, s, h0, h1, heads, v, row, slots, n, dim, table, room, order):
        add_values(acc, s, h0, h1, heads, v, row, slots, n, dim)
        if has_nan(v, row, slots, n, h0 * dim, h1 * dim):
            spoil_values(acc, h0, h1, heads, v, row, slots, n, dim)

    return mended if hides_nan(v) else by_table if v.dtype == POINTERS["uint8"] else direct
