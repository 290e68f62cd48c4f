"""Words for the compiled CPU kernel: typed pointers, and vectors of 8 float32 that numba keeps in registers.

numba would vectorize plain loops by itself, but needs many seconds to compile them. Here a loop says what it wants,
`acc = fma(load8(q, d), load8(k, d), acc)`, and LLVM makes two vectors of 4 of it where a machine has no wider ones.

A pointer knows what it points at and `load8` answers float32 whatever that is: a new storage dtype is one more branch
in `_widen` (and in `_narrow`, when results are written in it); numbers in one byte: `cpu_bits`. Nothing here tells
numba that NaN cannot occur.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from kvframe.kernels import cpu_bits

LOG2E = 1.4426950408889634
F32, I32, I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
V8, N8, H8 = (ir.VectorType(t, 8) for t in (F32, I32, I16))
LOOSE = ("contract", "nsz")  # per instruction; never nnan, ninf or reassoc


class Vector(types.Type):
    """numba's name for 8 float32 in a register."""

    def __init__(self):
        super().__init__(name="float32x8")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, V8)


class Code(types.Type):
    """A number in one byte, or a float16: bits that `cpu_bits` can read."""

    def __init__(self, name: str, bitwidth: int):
        super().__init__(name=f"code {name}")
        self.format, self.bitwidth = name, bitwidth


@register_model(Code)
class CodeModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, ir.IntType(fe_type.bitwidth))


vector, i64, f32 = Vector(), types.int64, types.float32
BF16 = types.uint16  # what bfloat16 pointers point at
POINTERS = {"int64": i64, "int32": types.int32, "float64": types.float64, "float32": f32, "bfloat16": BF16}
POINTERS |= {name: Code(name, 8) for name in ("int8", "float8_e4m3fn", "float8_e5m2")}
POINTERS |= {"uint8": types.uint8, "float16": Code("float16", 16)}


def code(build):
    """`build(builder, *values)` in the shape that numba asks for."""

    def lower(context, builder, signature, args):
        result = build(builder, *args)
        return context.get_dummy_value() if result is None else result

    return lower


def full(value, like=V8):
    """A constant vector."""
    return ir.Constant(like, [value] * like.count)


# ---------------------------------------------------------------- memory


@intrinsic(prefer_literal=True)
def pointer(context, dtype, address):
    """An int64 address as a pointer to `dtype`, a string constant."""
    if not isinstance(dtype, types.StringLiteral):
        return None
    target = types.CPointer(POINTERS[dtype.literal_value])

    def lower(context, builder, signature, args):
        return builder.inttoptr(args[1], context.get_value_type(target))

    return target(dtype, i64), lower


@intrinsic
def shift(context, p, n):
    """`p + n` elements."""
    return p(p, i64), code(lambda b, p, n: b.gep(p, [n]))


def _widen(b, item, value, floats, ints):
    """A loaded element or vector as float32: bf16 is the upper half of a float32."""
    if isinstance(item, Code):
        return cpu_bits.half_to_float(b, value) if floats is F32 else cpu_bits.widen(b, item.format, value)
    if item is BF16:
        return b.bitcast(b.shl(b.zext(value, ints), full(16, ints) if ints is N8 else ints(16)), floats)
    return value


def _narrow(b, item, x, ints, halves):
    """float32 to what is stored: bf16 rounds to nearest, ties to even, and NaN stays NaN."""
    if item is not BF16:
        return x
    c = (lambda n: full(n, ints)) if ints is N8 else ints
    bits = b.bitcast(x, ints)
    odd = b.and_(b.lshr(bits, c(16)), c(1))
    rounded = b.lshr(b.add(b.add(bits, c(0x7FFF)), odd), c(16))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), c(0x7FC0), rounded), halves)


@intrinsic
def load(context, p, i):
    """`p[i]`; bf16 and float16 become float32."""
    item = p.dtype
    result = f32 if item is BF16 or isinstance(item, Code) else item
    return result(p, i64), code(lambda b, p, i: _widen(b, item, b.load(b.gep(p, [i])), F32, I32))


@intrinsic
def put(context, p, i, value):
    """`p[i] = value`, a number; float32 is rounded to bf16."""
    item = p.dtype
    wanted = f32 if item is BF16 else item

    def build(b, p, i, x):
        b.store(_narrow(b, item, x, I32, ir.IntType(16)), b.gep(p, [i]))

    return types.none(p, i64, wanted), code(build)


@intrinsic
def load8(context, p, i):
    """`p[i : i + 8]` as a vector (of codes: times 1 / unit, see `cpu_bits`)."""
    item = p.dtype
    held = cpu_bits.B8 if isinstance(item, Code) else H8 if item is BF16 else V8

    def build(b, p, i):
        start = b.bitcast(b.gep(p, [i]), held.as_pointer())
        return _widen(b, item, b.load(start, align=min(item.bitwidth // 8, 4)), V8, N8)

    return vector(p, i64), code(build)


@intrinsic
def nan8(context, p, i):
    """NaN where the code `p[i : i + 8]` is NaN, else 0; for formats of HIDDEN_NAN in `cpu_bits`."""

    def build(b, p, i):
        codes = b.load(b.bitcast(b.gep(p, [i]), cpu_bits.B8.as_pointer()), align=1)
        return b.select(cpu_bits.find_nan(b, codes), full(float("nan")), full(0.0))

    return vector(p, i64), code(build)


@intrinsic(prefer_literal=True)
def sizes32(context, p, i, size, top):
    """The larger of `top`, 32 bytes, and the codes `p[i : i + size]`, pair by pair and without their signs; `size` is 8
    or 32, a constant."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    n = size.literal_value
    few, whole = (ir.VectorType(ir.IntType(8), k) for k in (n, 32))

    def build(b, p, i, size, top):
        codes = b.load(b.bitcast(b.gep(p, [i]), few.as_pointer()), align=1)
        if n < 32:
            codes = b.bitcast(b.zext(b.bitcast(codes, ir.IntType(8 * n)), ir.IntType(256)), whole)
        codes = b.or_(codes, full(0x80, whole))
        top = b.bitcast(top, whole)
        return b.bitcast(b.select(b.icmp_unsigned(">", codes, top), codes, top), V8)

    return vector(p, i64, size, vector), code(build)


@intrinsic
def any_ones(context, x):
    """Whether one of the 32 bytes of the vector is all ones."""
    whole = ir.VectorType(ir.IntType(8), 32)

    def build(b, x):
        found = b.sext(b.icmp_signed("==", b.bitcast(x, whole), full(0xFF, whole)), whole)
        return b.icmp_unsigned("!=", b.bitcast(found, ir.IntType(256)), ir.IntType(256)(0))

    return types.boolean(vector), code(build)


@intrinsic
def put8(context, p, i, x):
    """`p[i : i + 8] = x`."""
    item = p.dtype

    def build(b, p, i, x):
        x = _narrow(b, item, x, N8, H8)
        b.store(x, b.bitcast(b.gep(p, [i]), x.type.as_pointer()), align=2 if item is BF16 else 4)

    return types.none(p, i64, vector), code(build)


@intrinsic
def put_codes(context, p, i, x):
    """`p[i : i + 8] = the codes nearest to x`; x lies within the range of the format, or is NaN."""
    name = p.dtype.format

    def build(b, p, i, x):
        codes = cpu_bits.narrow(b, name, x)
        b.store(codes, b.bitcast(b.gep(p, [i]), codes.type.as_pointer()), align=1)

    return types.none(p, i64, vector), code(build)


@intrinsic
def prefetch(context, p, i):
    """Asks for the cache line of `p[i]`."""

    def build(b, p, i):
        kind = ir.FunctionType(ir.VoidType(), (p.type, I32, I32, I32))
        call = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        b.call(call, [b.gep(p, [i]), I32(0), I32(3), I32(1)])  # a read, into all caches, of data

    return types.none(p, i64), code(build)


@intrinsic
def line_of(context, p):
    """How many elements of `p` a cache line of 64 bytes holds."""
    n = 64 // (p.dtype.bitwidth // 8)
    return i64(p), code(lambda b, p: ir.IntType(64)(n))


@intrinsic
def fetch_add(context, p, i, n):
    """Atomic `old = p[i]; p[i] += n; return old`: what was written before it is seen by whoever adds after."""
    return i64(p, i64, i64), code(lambda b, p, i, n: b.atomic_rmw("add", b.gep(p, [i]), n, "seq_cst"))


@intrinsic
def copy_bytes(context, target, source, n):
    """memcpy between two addresses."""

    def build(b, target, source, n):
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(b, b.inttoptr(target, byte), b.inttoptr(source, byte), n, 1)

    return types.none(i64, i64, i64), code(build)


# ---------------------------------------------------------------- arithmetic


def _fma(b, x, y, z):
    kind = ir.FunctionType(V8, (V8, V8, V8))
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.fmuladd.v8f32"), [x, y, z], fastmath=LOOSE)


def _splat(b, x):
    one = b.insert_element(ir.Constant(V8, ir.Undefined), x, I32(0))
    return b.shuffle_vector(one, ir.Constant(V8, ir.Undefined), ir.Constant(N8, [0] * 8))


def _pick(b, x, y, lanes):
    """Lanes of x (0..) and y (count of x ..) as a new vector."""
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _exp2(b, x):
    """2 ** x for x <= 0: 2 ** n * polynomial(f) with n = round(x) and f = x - n in [-1/2, 1/2].

    2 ** n is made of bits, (n + 127) << 23; the polynomial is a minimax fit, relative error 2e-9.
    """
    x = b.select(b.fcmp_ordered("<", x, full(-126.0)), full(-126.0), x)  # NaN passes
    n = b.fptosi(b.fsub(x, full(0.5)), N8)  # cut towards zero
    f = b.fsub(x, b.sitofp(n, V8))
    y = full(1.53458116e-4)
    for c in (1.33999312e-3, 9.61848896e-3, 5.55032878e-2, 2.40226469e-1, 6.93147206e-1, 1.0):
        y = _fma(b, y, f, full(c))
    return b.fmul(y, b.bitcast(b.shl(b.add(n, full(127, N8)), full(23, N8)), V8))


def _cap(b, x, c):
    """`c * log2(e) * tanh(x / c)`: (1 - e) / (1 + e) with e = exp(-2 |x / c|), or the series where x / c is small."""
    y = b.fdiv(x, c)
    z = b.select(b.fcmp_ordered("<", y, full(0.0)), b.fsub(full(-0.0), y), y)
    e = _exp2(b, b.fmul(z, full(-2 * LOG2E)))
    far = b.fdiv(b.fsub(full(1.0), e), b.fadd(full(1.0), e))
    u, near = b.fmul(z, z), full(62 / 2835)
    for k in (-17 / 315, 2 / 15, -1 / 3, 1.0):
        near = _fma(b, near, u, full(k))
    t = b.select(b.fcmp_ordered("<", z, full(0.25)), b.fmul(near, z), far)
    t = b.select(b.fcmp_ordered("<", y, full(0.0)), b.fsub(full(-0.0), t), t)
    return b.fmul(b.fmul(t, c), full(LOG2E))


def _fold(b, x, combine):
    """All lanes into one number: halves, quarters, pairs."""
    while x.type.count > 1:
        half = x.type.count // 2
        x = combine(b, _pick(b, x, x, range(half)), _pick(b, x, x, range(half, 2 * half)))
    return b.extract_element(x, I32(0))


def _add(b, x, y):
    return b.fadd(x, y, flags=LOOSE)


def _larger(b, x, y):
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@intrinsic
def splat(context, x):
    """The number x in all lanes."""
    return vector(f32), code(_splat)


@intrinsic
def fma(context, x, y, z):
    """x * y + z."""
    return vector(vector, vector, vector), code(_fma)


@intrinsic
def mul8(context, x, y):
    return vector(vector, vector), code(lambda b, x, y: b.fmul(x, y, flags=LOOSE))


@intrinsic
def add8(context, x, y):
    return vector(vector, vector), code(_add)


@intrinsic
def max8(context, x, y):
    """The larger of each pair; y where x is NaN."""
    return vector(vector, vector), code(_larger)


@intrinsic
def div8(context, x, y):
    """x / y, rounded as IEEE says."""
    return vector(vector, vector), code(lambda b, x, y: b.fdiv(x, y))


@intrinsic
def clamp8(context, x, top):
    """x in [-top, top]; NaN stays."""

    def build(b, x, top):
        x = b.select(b.fcmp_ordered(">", x, top), top, x)
        low = b.fsub(full(-0.0), top)
        return b.select(b.fcmp_ordered("<", x, low), low, x)

    return vector(vector, vector), code(build)


def _size(b, x):
    return b.and_(b.bitcast(x, N8), full(0x7FFFFFFF, N8))


@intrinsic
def size8(context, p, x, top):
    """The larger of |x| and top, which is not negative. NaN is passed over where p points at codes that have one; else
    it is larger than all numbers."""

    def build(b, p_, x, top):
        if p.dtype.format != "int8":
            return _larger(b, b.bitcast(_size(b, x), V8), top)
        x, top = _size(b, x), b.bitcast(top, N8)
        return b.bitcast(b.select(b.icmp_signed(">", x, top), x, top), V8)

    return vector(p, vector, vector), code(build)


@intrinsic
def largest_size(context, x):
    """The largest lane of a result of `size8`."""

    def build(b, x):
        largest = _fold(b, b.bitcast(x, N8), lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
        return b.bitcast(largest, F32)

    return f32(vector), code(build)


@intrinsic
def weight8(context, x, top):
    """2 ** (x - top) for x <= top."""
    return vector(vector, vector), code(lambda b, x, top: _exp2(b, b.fsub(x, top)))


@intrinsic
def weight(context, x, top):
    """The same of two numbers."""
    return f32(f32, f32), code(lambda b, x, top: b.extract_element(_exp2(b, _splat(b, b.fsub(x, top))), I32(0)))


@intrinsic
def cap8(context, x, c):
    """`c * log2(e) * tanh(x / c)`."""
    return vector(vector, vector), code(_cap)


@intrinsic
def sum_of(context, x):
    """The sum of the lanes."""
    return f32(vector), code(lambda b, x: _fold(b, x, _add))


@intrinsic
def max_of(context, x):
    """The largest lane."""
    return f32(vector), code(lambda b, x: _fold(b, x, _larger))


@intrinsic
def put_sums(context, p, i, x0, x1, x2, x3):
    """`p[i : i + 4] = sums of the lanes of x0, x1, x2, x3`: half of the additions that four `sum_of` would need."""

    def build(b, p, i, *rows):
        fours = [_add(b, _pick(b, x, x, range(4)), _pick(b, x, x, range(4, 8))) for x in rows]
        twos = [
            _add(b, _pick(b, x, y, (0, 4, 1, 5)), _pick(b, x, y, (2, 6, 3, 7)))
            for x, y in (fours[:2], fours[2:])  # x0+x2 y0+y2 x1+x3 y1+y3
        ]
        sums = _add(b, _pick(b, *twos, (0, 1, 4, 5)), _pick(b, *twos, (2, 3, 6, 7)))
        b.store(sums, b.bitcast(b.gep(p, [i]), sums.type.as_pointer()), align=4)

    return types.none(p, i64, vector, vector, vector, vector), code(build)
