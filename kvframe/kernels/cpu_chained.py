"""The compiled loop of `cpu_chain`: one operation after the other, the threads meeting between them (numba)."""

from __future__ import annotations

from numba import njit

from kvframe.kernels.cpu_chain import (
    ADD,
    ARRIVED,
    COUNT,
    GENERATION,
    LINEAR,
    LIST,
    MULTIPLY,
    NORM,
    NOTHING,
    OUT,
    PATIENCE,
    ROTATE,
    ROWS,
    SEVERAL,
    SILU,
    THREADS,
    WIDTH,
    X_S,
    Y_S,
    X,
    Y,
)  # fmt: skip
from kvframe.kernels.cpu_math import give_way, rounded_add8, rounded_mul8, silu8, team_size
from kvframe.kernels.cpu_multiply import one, several
from kvframe.kernels.cpu_rowwise import norm, rotate_bf16
from kvframe.kernels.cpu_vector import fetch_add, load, load8, pointer, put, put8, shift
from kvframe.kernels.native import NEXT


@njit(error_model="numpy")
def elementwise(op, address):
    """A row is a piece. x, y and out: bf16; out of WIDEN: fp32."""
    a = pointer("int64", address)
    rows, width = load(a, ROWS), load(a, WIDTH)
    while True:
        r = fetch_add(a, NEXT, 1)
        if r >= rows:
            return
        x = shift(pointer("bfloat16", load(a, X)), r * load(a, X_S))
        y = shift(pointer("bfloat16", load(a, Y)), r * load(a, Y_S))
        out = shift(pointer("bfloat16", load(a, OUT)), r * width)
        if op == ADD:
            for i in range(0, width, 8):
                put8(out, i, rounded_add8(load8(x, i), load8(y, i)))
        elif op == MULTIPLY:
            for i in range(0, width, 8):
                put8(out, i, rounded_mul8(load8(x, i), load8(y, i)))
        elif op == SILU:
            for i in range(0, width, 8):
                put8(out, i, silu8(load8(x, i)))
        else:
            wide = shift(pointer("float32", load(a, OUT)), r * width)
            for i in range(0, width, 8):
                put8(wide, i, load8(x, i))


@njit(error_model="numpy")
def meet(a, block, threads):
    """Nobody goes on before everybody is here. The last one makes the block ready for the next time."""
    generation = fetch_add(a, GENERATION, 0)
    if fetch_add(a, ARRIVED, 1) == threads - 1:
        put(block, NEXT, 0)
        put(a, ARRIVED, 0)
        fetch_add(a, GENERATION, 1)
        return
    turns = 0
    while fetch_add(a, GENERATION, 0) == generation:
        turns += 1
        if turns > PATIENCE:
            give_way()


def chain_function(stamp: int):
    """The C callback."""

    def chain(address):
        a, _stamp = pointer("int64", address), stamp
        threads = team_size(load(a, THREADS)) if load(a, THREADS) != 0 else 1
        for i in range(load(a, COUNT)):
            op, place = load(a, LIST + 2 * i), load(a, LIST + 2 * i + 1)
            if op == NOTHING:
                continue
            if op == LINEAR:
                one(place)
            elif op == SEVERAL:
                several(place)
            elif op == NORM:
                norm(place)
            elif op == ROTATE:
                rotate_bf16(place)
            else:
                elementwise(op, place)
            if threads > 1:
                meet(a, pointer("int64", place), threads)
            else:
                put(pointer("int64", place), NEXT, 0)

    return chain
