"""Products of a few rows with bf16 weights, for CPUs without bf16 instructions (numba).

With one row a product reads each weight once and does little with it, so it is bound by the bytes of the weights, and
bf16 has half as many as fp32. Weights become fp32 in a register, sums are fp32, the result is rounded once. Up to ROWS
rows share what was read.

The weights of several layers that multiply the same x lie where they are; a call takes them one after the other:

    out [M, S] = x [M, I] [w0; w1; ...]^T + [b0, b1, ...]        S: outputs of all layers

    args [NARGS] int64      index  name      meaning
                            0      TICKET    (not used)
                            1      NEXT      counter: next piece of PIECE outputs
                            2      PIECES    number of pieces
                            3..    see the constants below; then for each layer WEIGHT, BIAS (address or 0), STOP (its
                                   last output + 1, in all)

Shape legend: M rows, I input size (a multiple of 8), S outputs of all layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kvframe.kernels import cpu

NEXT, PIECES, M, I, S, X, OUT, PARTS = range(1, 9)
FIRST, FIELDS = 9, 3
GROUP = 8  # rows that share a weight in a register
ROWS = 32  # from more rows on a product with packed fp32 weights is faster
PIECE = 32  # outputs
ALONE = 1 << 17  # bytes of weights that one thread has read before another one would be awake


def linear_function(many: bool, stamp: int):
    """The C callback for one row, or for 2 to ROWS of them."""
    from kvframe.kernels.cpu_vector import add8, f32, fetch_add, fma, load, load8, pointer, put, shift, splat, sum_of

    def one(address):
        a, _stamp = pointer("int64", address), stamp
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

    def several(address):
        a, _stamp = pointer("int64", address), stamp
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

    return several if many else one


class FewRows:
    """`x [..., I]`, at most ROWS rows of bf16 -> `[..., S]`, with the weights where they are.

    Args:
        layers: (weight bf16 [O, I], bias bf16 [O] or None) of each.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]):
        self.layers = layers  # keeps the memory
        self.inputs, self.outputs = layers[0][0].shape[1], sum(len(weight) for weight, _ in layers)
        self._pieces = -(-self.outputs // PIECE)
        self._args = (ctypes.c_int64 * (FIRST + FIELDS * len(layers)))()
        self._at, stop = ctypes.addressof(self._args), 0
        self._args[PIECES], self._args[I], self._args[S] = self._pieces, self.inputs, self.outputs
        for n, (weight, bias) in enumerate(layers):
            stop += len(weight)
            place = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), stop
            self._args[FIRST + FIELDS * n : FIRST + FIELDS * (n + 1)] = place
        self._large = self.inputs * self.outputs * 2 > ALONE

    @classmethod
    def can(cls, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> bool:
        tensors = [tensor for layer in layers for tensor in layer if tensor is not None]
        fine = all(tensor.dtype is torch.bfloat16 and tensor.is_contiguous() for tensor in tensors)
        return fine and layers[0][0].shape[1] % 8 == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.inputs
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=torch.bfloat16)
        if not rows:  # a step in which nobody wants logits
            return out
        x = (x if rows == 1 else x.float()).contiguous()
        args = self._args
        args[NEXT], args[M], args[X], args[OUT] = 0, rows, x.data_ptr(), out.data_ptr()
        threads = torch.get_num_threads() if self._large and cpu.team() is not None else 1
        cpu.run(cpu.callback("linear", rows > 1), self._at, min(threads, self._pieces))
        return out
