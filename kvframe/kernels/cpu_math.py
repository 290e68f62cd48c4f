"""More words for compiled functions, as `cpu_vector` has them: rounded arithmetic, sigmoids, and how threads wait."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvframe.kernels.cpu_vector import I32, LOG2E, _exp2, code, full, vector


@intrinsic
def rounded_mul8(context, x, y):
    """x * y, rounded before anything is added to it."""
    return vector(vector, vector), code(lambda b, x, y: b.fmul(x, y))


@intrinsic
def rounded_add8(context, x, y):
    """x + y, of rounded products where they are such."""
    return vector(vector, vector), code(lambda b, x, y: b.fadd(x, y))


@intrinsic
def silu8(context, x):
    """x / (1 + exp(-x)), by way of e = exp(-|x|) <= 1."""

    def build(b, x):
        below = b.fcmp_ordered("<", x, full(0.0))
        power = b.fmul(b.select(below, x, b.fsub(full(-0.0), x)), full(LOG2E))
        e = b.select(b.fcmp_ordered("<", power, full(-126.0)), full(0.0), _exp2(b, power))
        return b.fdiv(b.fmul(x, b.select(below, e, full(1.0))), b.fadd(full(1.0), e))

    return vector(vector), code(build)


@intrinsic
def give_way(context):
    """Another thread of this core may run."""

    def build(b):
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, ()), "sched_yield"), ())

    return types.none(), code(build)


@intrinsic
def team_size(context, function):
    """What `int function()` answers, the address of `omp_get_num_threads`."""

    def build(b, function):
        kind = ir.FunctionType(I32, ()).as_pointer()
        return b.sext(b.call(b.inttoptr(function, kind), ()), ir.IntType(64))

    return types.int64(types.int64), code(build)
