"""Float8 bits to numbers and back, bit by bit what torch makes of them, by integer operations that every chip has.

A code is the upper end of a float16, of other width:

    e5m2    s eeeee mm          float16 has the same exponent: the code, and eight zeros behind it
    e4m3    s eeee mmm          float16 with the exponent filled up by a zero in front: its bias is 15 and not 7, so
                                the number is 2 ** 8 times as large; all ones is NaN

    1.75 in e4m3 is 0 0111 110     0 00111 1100000000 in float16 is 1.75 * 2 ** -8

Encoding rounds to nearest, ties to even; kvframe's codec draws it in plugins/fp8/formats.py, which is also the plain
twin of `float8_codes`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3_numbers(codes):
    """uint8 -> float32, any shape."""
    wide = codes.to(tl.uint16)
    rest = wide & 0x7F
    half = ((wide & 0x80) << 8) | (rest << 7)
    numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(rest == 0x7F, float("nan"), numbers)


@triton.jit
def e5m2_numbers(codes):
    """uint8 -> float16, any shape."""
    return (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def float8_codes(x, sign_of, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 in [-largest, largest] or NaN -> uint8. `sign_of` is a number with the sign of x: a NaN loses its sign
    in a division on some chips."""
    sign = (sign_of.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    odd = (size >> (23 - MANTISSA)) & 1
    normal = ((size + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    # below the smallest normal number float32 rounds to whole steps when `step` is added
    step_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    step = tl.full(size.shape, step_bits, tl.int32).to(tl.float32, bitcast=True)
    fine = (size.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) - step_bits
    code = tl.where(size < ((128 - BIAS) << 23), fine, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | sign).to(tl.uint8)
