"""Numbers in one byte, and in half precision, for the compiled CPU kernel: how bits become float32 and back.

    name            bits                          loaded as                       unit
    int8            two's complement              n                               1
    float8_e4m3fn   s eeee mmm, bias 7, no inf    value / 256 (a float16's bits)  256
    float8_e5m2     s eeeee mm, bias 15           value (a float16's bits)        1

An e4m3 number moved left by 7 bits is a float16 that is 2 ** 8 times too small, since the bias of float16 is 15; the
kernel multiplies once per query and once per result instead of once per number. Its NaN, all ones, comes out as 480:
to put it in 8 numbers at a time made attention a fifth slower. Whoever reads many codes asks whether there is one, 32
codes at a time, and puts it in afterwards (see `has_nan` in `cpu_rows`).
Machines without conversions from float16 do the same one size larger, in float32 (and multiply by 2 ** 112).

Format of float8: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433).
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir

F16, F32, I8, I16, I32 = ir.HalfType(), ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
V8, N8, H8, B8, P8 = (ir.VectorType(t, 8) for t in (F32, I32, I16, I8, F16))
UNIT = {"float8_e4m3fn": 256.0}  # what a loaded number has to be multiplied by; 1 for all others
MANTISSA = {"float8_e4m3fn": 3, "float8_e5m2": 2}  # bits
BIAS = {"float8_e4m3fn": 7, "float8_e5m2": 15}
HIDDEN_NAN = ("float8_e4m3fn",)  # formats whose NaN is not a NaN when it is loaded
NAN = 0x7F
MAGIC = 12582912.0  # 1.5 * 2 ** 23: a float32 of this size has no bits behind the point


@cache
def converts_halves() -> bool:
    """The processor that numba compiles for turns float16 into float32 by itself."""
    from numba.core.registry import cpu_target

    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith(("aarch64", "arm64")) or "+f16c" in features.split(",")


def full(value, like):
    """A constant vector."""
    return ir.Constant(like, [value] * like.count)


def widen(b, name: str, x):
    """`x` 8 loaded bytes -> 8 float32, see the table above."""
    if name == "int8":
        return b.sitofp(b.sext(x, N8), V8)
    if converts_halves():
        if name == "float8_e5m2":
            bits = b.shl(b.zext(x, H8), full(8, H8))
        else:
            bits = b.and_(b.shl(b.sext(x, H8), full(7, H8)), full(0xBF80, H8))
        return b.fpext(b.bitcast(bits, P8), V8)
    left = 23 - MANTISSA[name]
    bits = b.shl(b.sext(x, N8), full(left, N8))
    small = b.and_(bits, full(0x7F << left, N8))
    sign = b.and_(bits, full(0x80000000, N8))
    value = b.fmul(b.bitcast(b.or_(small, sign), V8), full(2.0**112, V8))
    if name != "float8_e5m2":
        return value
    wild = b.icmp_signed(">=", small, full(0x7C << left, N8))  # infinities and NaN
    return b.select(wild, b.bitcast(b.or_(b.or_(small, sign), full(0x7F800000, N8)), V8), value)


def find_nan(b, x):
    """Codes of a format of HIDDEN_NAN, any number of them -> as many bits, set where one is NaN."""
    most = full(NAN, x.type)
    return b.icmp_signed("==", b.and_(x, most), most)


def narrow(b, name: str, y):
    """8 float32 within the range of the format -> 8 bytes, to nearest, ties to even; NaN stays NaN (0 in int8).

    Numbers under the smallest normal one have steps of their own, q = 2 ** (1 - bias - mantissa): what is added to them
    makes float32 round at that step.
    """
    known = b.fcmp_ordered("ord", y, y)
    if name == "int8":
        bits = b.bitcast(b.fadd(b.select(known, y, full(0.0, V8)), full(MAGIC, V8)), N8)
        return b.trunc(bits, B8)
    m, bias = MANTISSA[name], BIAS[name]
    bits = b.bitcast(y, N8)
    sign = b.and_(b.lshr(bits, full(24, N8)), full(0x80, N8))
    size = b.and_(bits, full(0x7FFFFFFF, N8))
    odd = b.and_(b.lshr(size, full(23 - m, N8)), full(1, N8))
    half = full((1 << (22 - m)) - 1, N8)
    normal = b.lshr(b.add(b.add(size, half), odd), full(23 - m, N8))
    normal = b.sub(normal, full((127 - bias) << m, N8))
    step = full(2.0 ** (23 + 1 - bias - m), V8)
    fine = b.sub(b.bitcast(b.fadd(b.bitcast(size, V8), step), N8), b.bitcast(step, N8))
    least = full((128 - bias) << 23, N8)  # bits of 2 ** (1 - bias), the smallest normal number
    code = b.select(b.icmp_signed("<", size, least), fine, normal)
    code = b.select(known, code, full(NAN, N8))
    return b.trunc(b.or_(code, sign), B8)


def half_to_float(b, x):
    """One float16, as int16, to float32 by integer operations: no processor lacks them."""
    size = b.shl(b.zext(b.and_(x, I16(0x7FFF)), I32), I32(13))
    wild = b.icmp_signed(">=", size, I32(0x7C00 << 13))
    value = b.bitcast(b.fmul(b.bitcast(size, F32), ir.Constant(F32, 2.0**112)), I32)
    bits = b.select(wild, b.or_(size, I32(0x7F800000)), value)
    sign = b.shl(b.zext(b.and_(x, I16(-0x8000)), I32), I32(16))
    return b.bitcast(b.or_(bits, sign), F32)
