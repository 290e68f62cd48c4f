"""The compiled loop of `cpu_norm`: root mean square norms of bf16 rows (numba)."""

from __future__ import annotations

from numba import float32

from kvframe.kernels.cpu_norm import EPS, NEXT, OFFSET, OUT, PIECE, ROWS, N, W, X
from kvframe.kernels.cpu_vector import (
    add8,
    f32,
    fetch_add,
    fma,
    load,
    load8,
    mul8,
    pointer,
    put8,
    shift,
    splat,
    sum_of,
)


def norm_function(stamp: int):
    """The C callback."""
    def norm(address):
        a, _stamp = pointer("int64", address), stamp
        n, rows, reals = load(a, N), load(a, ROWS), pointer("float64", address)
        w, eps, offset = pointer("bfloat16", load(a, W)), load(reals, EPS), splat(float32(load(reals, OFFSET)))
        while True:
            piece = fetch_add(a, NEXT, 1)
            if piece * PIECE >= rows:
                return
            stop = (piece + 1) * PIECE if (piece + 1) * PIECE < rows else rows
            for r in range(piece * PIECE, stop):
                x, out = shift(pointer("bfloat16", load(a, X)), r * n), shift(pointer("bfloat16", load(a, OUT)), r * n)
                s0, s1 = splat(f32(0.0)), splat(f32(0.0))
                for i in range(0, n // 16 * 16, 16):
                    y, z = load8(x, i), load8(x, i + 8)
                    s0, s1 = fma(y, y, s0), fma(z, z, s1)
                for i in range(n // 16 * 16, n, 8):
                    y = load8(x, i)
                    s0 = fma(y, y, s0)
                scale = splat(float32(1.0 / (sum_of(add8(s0, s1)) / n + eps) ** 0.5))
                for i in range(0, n, 8):
                    put8(out, i, mul8(mul8(load8(x, i), scale), add8(load8(w, i), offset)))

    return norm
