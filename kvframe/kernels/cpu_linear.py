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

from kvframe.kernels import native

PIECES, M, I, S, X, OUT, PARTS = range(2, 9)
FIRST, FIELDS = 9, 3
GROUP = 8  # rows that share a weight in a register
ROWS = 32  # from more rows on a product with packed fp32 weights is faster
PIECE = 32  # outputs
ALONE = 1 << 17  # bytes of weights that one thread has read before another one would be awake


class FewRows:
    """`x [..., I]`, at most ROWS rows of bf16 -> `[..., S]`, with the weights where they are.

    Args:
        layers: (weight bf16 [O, I], bias bf16 [O] or None) of each.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]):
        self.layers = layers  # keeps the memory
        self.inputs, self.outputs = layers[0][0].shape[1], sum(len(weight) for weight, _ in layers)
        self._pieces = -(-self.outputs // PIECE)
        self._args = self.block()
        self._at = ctypes.addressof(self._args)
        self._large = self.inputs * self.outputs * 2 > ALONE

    def block(self) -> ctypes.Array:
        """Arguments of the compiled function, without M, X and OUT."""
        args, stop = (ctypes.c_int64 * (FIRST + FIELDS * len(self.layers)))(), 0
        args[PIECES], args[I], args[S] = self._pieces, self.inputs, self.outputs
        for n, (weight, bias) in enumerate(self.layers):
            stop += len(weight)
            place = weight.data_ptr(), 0 if bias is None else bias.data_ptr(), stop
            args[FIRST + FIELDS * n : FIRST + FIELDS * (n + 1)] = place
        return args

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
        args[native.NEXT], args[M], args[X], args[OUT] = 0, rows, x.data_ptr(), out.data_ptr()
        threads = native.threads(self._large)
        native.run(native.callback("linear", rows > 1), self._at, min(threads, self._pieces))
        return out
