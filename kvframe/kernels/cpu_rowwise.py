"""The compiled loops of `cpu_norm` and `cpu_rotary` (numba)."""

from __future__ import annotations

from numba import float32, njit

from kvframe.kernels import cpu_rotary
from kvframe.kernels.cpu_math import rounded_add8, rounded_mul8
from kvframe.kernels.cpu_norm import EPS, OFFSET, OUT, PIECE, ROWS, N, W, X
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
from kvframe.kernels.native import NEXT


@njit(inline="always", error_model="numpy")
def turned(out, i, x, cos, y, sin):
    """`out[i:] = x * cos + y * sin`, rounded after each of the three."""
    put8(out, i, rounded_mul8(x, cos))
    first = load8(out, i)
    put8(out, i, rounded_mul8(y, sin))
    put8(out, i, rounded_add8(first, load8(out, i)))


@njit(error_model="numpy")
def norm(address):
    """The root mean square norms of rows; the block is that of `cpu_norm`."""
    a = pointer("int64", address)
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


def norm_function(stamp: int):
    """The C callback."""

    def normed(address):
        _stamp = stamp
        norm(address)

    return normed


def rotation(dtype: str):
    """The loop for tensors of this dtype."""

    @njit(error_model="numpy")
    def rotate(address):
        """The block is that of `cpu_rotary`."""
        a = pointer("int64", address)
        tokens, heads, half = load(a, cpu_rotary.T), load(a, cpu_rotary.H), load(a, cpu_rotary.D) // 2
        while True:
            t = fetch_add(a, NEXT, 1)
            if t >= tokens:
                return
            cos = shift(pointer(dtype, load(a, cpu_rotary.COS)), t * load(a, cpu_rotary.C_T))
            sin = shift(pointer(dtype, load(a, cpu_rotary.SIN)), t * load(a, cpu_rotary.S_T))
            for h in range(heads):
                x = shift(
                    pointer(dtype, load(a, cpu_rotary.X)), t * load(a, cpu_rotary.X_T) + h * load(a, cpu_rotary.X_H)
                )
                out = shift(pointer(dtype, load(a, cpu_rotary.OUT)), (t * heads + h) * 2 * half)
                for i in range(0, half, 8):
                    left, right = load8(x, i), load8(x, half + i)
                    turned(out, i, left, load8(cos, i), mul8(right, splat(f32(-1.0))), load8(sin, i))
                    turned(out, half + i, right, load8(cos, half + i), left, load8(sin, half + i))

    return rotate


rotate_bf16, rotate_f32 = rotation("bfloat16"), rotation("float32")


def rotate_function(dtype: str, stamp: int):
    """The C callback. dtype: of all tensors."""
    if dtype == "bfloat16":

        def rotated(address):
            _stamp = stamp
            rotate_bf16(address)
    else:

        def rotated(address):
            _stamp = stamp
            rotate_f32(address)

    return rotated
