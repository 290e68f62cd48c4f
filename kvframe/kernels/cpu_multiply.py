"""The compiled loops of `cpu_linear`: rows of bf16 or fp32 times bf16 weights (numba)."""

from __future__ import annotations

from numba import njit

from kvframe.kernels.cpu_linear import FIELDS, FIRST, GROUP, OUT, PIECE, PIECES, I, M, S, X
from kvframe.kernels.cpu_vector import add8, f32, fetch_add, fma, load, load8, pointer, put, shift, splat, sum_of
from kvframe.kernels.native import NEXT


@njit(error_model="numpy")
def one(address):
    """One row of bf16."""
    a = pointer("int64", address)
    size, x, out = load(a, I), pointer("bfloat16", load(a, X)), pointer("bfloat16", load(a, OUT))
    whole = size // 32 * 32
    while True:
        piece = fetch_add(a, NEXT, 1)
        if piece >= load(a, PIECES):
            return
        o, stop = piece * PIECE, (piece + 1) * PIECE
        stop = stop if stop < load(a, S) else load(a, S)
        part, begin = FIRST, 0
        while o < stop:
            while o >= load(a, part + 2):
                begin = load(a, part + 2)
                part += FIELDS
            w = shift(pointer("bfloat16", load(a, part)), (o - begin) * size)
            s0, s1, s2, s3 = splat(f32(0.0)), splat(f32(0.0)), splat(f32(0.0)), splat(f32(0.0))
            for i in range(0, whole, 32):
                s0 = fma(load8(w, i), load8(x, i), s0)
                s1 = fma(load8(w, i + 8), load8(x, i + 8), s1)
                s2 = fma(load8(w, i + 16), load8(x, i + 16), s2)
                s3 = fma(load8(w, i + 24), load8(x, i + 24), s3)
            for i in range(whole, size, 8):
                s0 = fma(load8(w, i), load8(x, i), s0)
            y = sum_of(add8(add8(s0, s1), add8(s2, s3)))
            if load(a, part + 1) != 0:
                y += load(pointer("bfloat16", load(a, part + 1)), o - begin)
            put(out, o, y)
            o += 1


@njit(error_model="numpy")
def several(address):
    """2 to ROWS rows of fp32."""
    a = pointer("int64", address)
    size, rows, outputs, out = load(a, I), load(a, M), load(a, S), pointer("bfloat16", load(a, OUT))
    x, last = pointer("float32", load(a, X)), load(a, M) - 1
    while True:
        piece = fetch_add(a, NEXT, 1)
        if piece >= load(a, PIECES):
            return
        begin, part = 0, FIRST
        while piece * PIECE >= load(a, part + 2):
            begin = load(a, part + 2)
            part += FIELDS
        first, first_part, stop = begin, part, (piece + 1) * PIECE
        stop = stop if stop < outputs else outputs
        for r in range(0, rows, GROUP):  # the weights of a piece are read from the cache from the second group on
            x0 = shift(x, r * size)
            x1 = shift(x, (r + 1 if r + 1 < last else last) * size)  # rows that are not there repeat the last one
            x2 = shift(x, (r + 2 if r + 2 < last else last) * size)
            x3 = shift(x, (r + 3 if r + 3 < last else last) * size)
            x4 = shift(x, (r + 4 if r + 4 < last else last) * size)
            x5 = shift(x, (r + 5 if r + 5 < last else last) * size)
            x6 = shift(x, (r + 6 if r + 6 < last else last) * size)
            x7 = shift(x, (r + 7 if r + 7 < last else last) * size)
            begin, part = first, first_part
            for o in range(piece * PIECE, stop):
                while o >= load(a, part + 2):
                    begin = load(a, part + 2)
                    part += FIELDS
                w = shift(pointer("bfloat16", load(a, part)), (o - begin) * size)
                s0, s1, s2, s3 = splat(f32(0.0)), splat(f32(0.0)), splat(f32(0.0)), splat(f32(0.0))
                s4, s5, s6, s7 = splat(f32(0.0)), splat(f32(0.0)), splat(f32(0.0)), splat(f32(0.0))
                for i in range(0, size, 8):
                    weights = load8(w, i)
                    s0 = fma(weights, load8(x0, i), s0)
                    s1 = fma(weights, load8(x1, i), s1)
                    s2 = fma(weights, load8(x2, i), s2)
                    s3 = fma(weights, load8(x3, i), s3)
                    s4 = fma(weights, load8(x4, i), s4)
                    s5 = fma(weights, load8(x5, i), s5)
                    s6 = fma(weights, load8(x6, i), s6)
                    s7 = fma(weights, load8(x7, i), s7)
                bias = f32(0.0)
                if load(a, part + 1) != 0:
                    bias = load(pointer("bfloat16", load(a, part + 1)), o - begin)
                y = shift(out, r * outputs + o)
                put(y, 0, sum_of(s0) + bias)
                if r + 1 < rows:
                    put(y, outputs, sum_of(s1) + bias)
                if r + 2 < rows:
                    put(y, 2 * outputs, sum_of(s2) + bias)
                if r + 3 < rows:
                    put(y, 3 * outputs, sum_of(s3) + bias)
                if r + 4 < rows:
                    put(y, 4 * outputs, sum_of(s4) + bias)
                if r + 5 < rows:
                    put(y, 5 * outputs, sum_of(s5) + bias)
                if r + 6 < rows:
                    put(y, 6 * outputs, sum_of(s6) + bias)
                if r + 7 < rows:
                    put(y, 7 * outputs, sum_of(s7) + bias)


def linear_function(many: bool, stamp: int):
    """The C callback for one row, or for several."""
    if many:

        def linear(address):
            _stamp = stamp
            several(address)
    else:

        def linear(address):
            _stamp = stamp
            one(address)

    return linear
