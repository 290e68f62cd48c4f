"""The compiled encoder of the `cpu` kernel: vectors of new tokens become codes in their slots, in one pass (numba).

    scale = min(max(max|x| / peak, LEAST), most)         most: the largest float32 with most * peak finite
    code  = the code nearest to x / scale, ties to even, numbers beyond peak as peak

This is what `Codec.peak` promises of a codec; its own `encode` stands beside it, and tests hold them together.
Shape legend: T tokens of the step, Hkv heads, D size.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from kvframe.kernels.cpu_vector import (
    clamp8,
    div8,
    f32,
    largest_size,
    load,
    load8,
    pointer,
    put,
    put_codes,
    shift,
    size8,
    splat,
)

LEAST = float(np.finfo(np.float32).tiny)
# args of `encode`: int64, the last ones float64 bits
TOKENS, HEADS, DIM, SLOTS, SOURCE, TOKEN, HEAD, PAYLOAD, SCALES = range(9)  # strides in elements; SCALES 0: `FIXED`
PEAK, MOST, FIXED = range(9, 12)
NARGS = 12
LEAF = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@njit(**LEAF)
def scale_of(size, peak, most):
    """The scale of a vector whose largest size is `size`; NaN stays NaN."""
    scale = size / peak
    scale = f32(LEAST) if scale < f32(LEAST) else scale
    return most if scale > most else scale


def encode_function(dtype: str, code_type: str, stamp: int):
    """Codes of one kind from vectors of one dtype. A NaN is a code where there is one (float8), and else makes the
    scale of its vector NaN."""

    def encode(address):
        a, floats, _stamp = pointer("int64", address), pointer("float64", address), stamp
        hkv, dim, slots = load(a, HEADS), load(a, DIM), pointer("int64", load(a, SLOTS))
        x, payload = pointer(dtype, load(a, SOURCE)), pointer(code_type, load(a, PAYLOAD))
        scales = pointer("float32", load(a, SCALES))
        peak, most, fixed = f32(load(floats, PEAK)), f32(load(floats, MOST)), f32(load(floats, FIXED))
        limit = splat(peak)
        for t in range(load(a, TOKENS)):
            for h in range(hkv):
                vector = shift(x, t * load(a, TOKEN) + h * load(a, HEAD))
                place = load(slots, t) * hkv + h
                codes, scale = shift(payload, place * dim), fixed
                if load(a, SCALES) != 0:
                    top = splat(f32(0.0))
                    for d in range(0, dim, 8):
                        top = size8(codes, load8(vector, d), top)
                    scale = scale_of(largest_size(top), peak, most)
                    put(scales, place, scale)
                divisor = splat(scale)
                for d in range(0, dim, 8):
                    put_codes(codes, d, clamp8(div8(load8(vector, d), divisor), limit))

    return encode
