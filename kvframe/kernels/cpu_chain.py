"""What a forward does between two attention layers, as one native call on rows of bf16 (numba).

At few tokens such a stretch (a product, a residual, a norm, two products around an activation, ...) takes less time
than Python needs to call its operations. A chain has them as instructions:

    args [NARGS] int64      index  name                 meaning
                            0      (not used)
                            1      COUNT                number of instructions
                            2      THREADS              address of what says how many threads run them, or 0: one
                            3, 4   ARRIVED, GENERATION  where threads meet
                            5..    LIST                 of each instruction: what it is, address of its block

A block has the layout of the function that does it alone (`cpu_linear`, `cpu_norm`, `cpu_rotary`); that of element-wise
operations has, from word 2 on, ROWS, WIDTH, and address and numbers between rows of x and of y, and the address of the
result. Results are rounded to bf16 after each operation, as torch rounds them.

Shape legend: M rows.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvframe.kernels import cpu_linear, cpu_norm, cpu_rotary, native

NOTHING, LINEAR, SEVERAL, NORM, ROTATE, ADD, MULTIPLY, SILU, WIDEN = range(9)
COUNT, THREADS, ARRIVED, GENERATION, LIST = 1, 2, 3, 4, 5
ROWS, WIDTH, X, X_S, Y, Y_S, OUT = range(2, 9)  # block of an element-wise operation, and of WIDEN (bf16 -> fp32)
PATIENCE = 2000  # looks at a counter before a waiting thread gives way


@dataclass(frozen=True)
class Rows:
    """M rows of `width` numbers, `stride` numbers apart, from `offset` on, in input or buffer `source`.

    Inputs count from 0, buffers from -1 downwards: -1 is the first one.
    """

    source: int
    offset: int
    stride: int
    width: int


@dataclass(frozen=True)
class Instruction:
    """`out = op(x, y)`: out is all of a buffer.

    Attributes:
        more: of LINEAR the `FewRows`; of NORM (weight, eps, offset); of ROTATE (heads, cos, sin), the latter two Rows.
    """

    op: int
    x: Rows
    out: int
    y: Rows | None = None
    more: tuple = ()


@dataclass(frozen=True)
class Output:
    """A tensor that shows rows of a buffer.

    Attributes:
        shape, strides: of the tensor; `at` is its dimension of rows.
        kept: others see it, who may keep it: it gets memory of its own in each call. Otherwise it is good until the
            next call.
    """

    rows: Rows
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int
    kept: bool


class Scratch:
    """Memory that chains share which never run at once: the n-th buffer of each that nobody sees from outside.

    Args:
        rows: most rows of the chains.
    """

    def __init__(self, rows: int):
        self.rows, self._held = rows, {}

    def take(self, n: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for rows of this width, the same one whenever it is asked for again."""
        key = n, width, dtype
        if key not in self._held:
            self._held[key] = torch.zeros(self.rows * width, dtype=dtype)
        return self._held[key]


class Chain:
    """Called with the inputs, each a bf16 tensor whose flat memory is M rows; answers the outputs. For one thread at a
    time. Raises ValueError: inputs that are something else, or more rows than there is room for.

    Args:
        instructions: in their order.
        buffers: width of each. inputs: width of each.
        outputs: what is answered. scratch: room for what is not.
    """

    def __init__(
        self,
        instructions: Sequence[Instruction],
        buffers: Sequence[int],
        inputs: Sequence[int],
        outputs: Sequence[Output],
        scratch: Scratch,
    ):
        self.widths, self.outputs, self._scratch = tuple(inputs), tuple(outputs), scratch
        shown = {-1 - output.rows.source for output in outputs}
        kept = sorted({-1 - output.rows.source for output in outputs if output.kept})
        self._buffers = [
            None if i in kept else torch.zeros(scratch.rows * width, dtype=torch.bfloat16) if i in shown
            else scratch.take(i, width, torch.bfloat16)
            for i, width in enumerate(buffers)
        ]  # fmt: skip
        starts = itertools.accumulate((buffers[i] for i in kept), initial=0)
        self._kept = dict(zip(kept, starts))  # buffer -> where it begins in the memory of a call, in units of M
        self._kept_width = sum(buffers[i] for i in kept)
        self._moved: list[tuple[ctypes.Array, int, int, int]] = []  # block, word, begin, byte offset
        self._instructions = tuple(instructions)
        self._weights: list[torch.Tensor] = []  # their memory stays, whatever becomes of the parameters
        self._inputs: list[list[tuple[ctypes.Array, int, int]]] = [[] for _ in inputs]  # block, word, byte offset
        self._lists: list[tuple[int, ctypes.Array, int]] = []  # op, block, its word for M
        for instruction in instructions:
            self._add(instruction)
        self._args = (ctypes.c_int64 * (LIST + 2 * len(self._lists)))()
        self._at, self._args[COUNT] = ctypes.addressof(self._args), len(self._lists)
        for i, (op, block, _) in enumerate(self._lists):
            self._args[LIST + 2 * i], self._args[LIST + 2 * i + 1] = op, ctypes.addressof(block)
        self._m, self._shown = -1, {}
        self._call = native.callback("chain")

    def _add(self, i: Instruction) -> None:
        if i.op == LINEAR:
            wide = self._scratch.take(0, i.x.width, torch.float32)
            narrow, several = i.more[0].block(), i.more[0].block()
            self._list(LINEAR, narrow, cpu_linear.M, {cpu_linear.X: i.x, cpu_linear.OUT: self._whole(i.out)})
            self._list(WIDEN, self._rowwise(i.x.width), ROWS, {X: i.x}, {OUT: wide})
            self._list(SEVERAL, several, cpu_linear.M, {cpu_linear.OUT: self._whole(i.out)}, {cpu_linear.X: wide})
        elif i.op == NORM:
            weight, eps, offset = i.more
            weight = weight.detach()
            self._weights.append(weight)
            block = (ctypes.c_int64 * cpu_norm.NARGS)()
            struct.pack_into("7q2d", block, 0, 0, 0, 0, i.x.width, 0, 0, weight.data_ptr(), eps, offset)
            self._list(NORM, block, cpu_norm.ROWS, {cpu_norm.X: i.x, cpu_norm.OUT: self._whole(i.out)})
        elif i.op == ROTATE:
            heads, cos, sin = i.more
            block, size = (ctypes.c_int64 * cpu_rotary.NARGS)(), i.x.width // heads
            block[cpu_rotary.H], block[cpu_rotary.D] = heads, size
            block[cpu_rotary.X_T], block[cpu_rotary.X_H] = i.x.stride, size
            block[cpu_rotary.C_T], block[cpu_rotary.S_T] = cos.stride, sin.stride
            places = {cpu_rotary.X: i.x, cpu_rotary.COS: cos, cpu_rotary.SIN: sin, cpu_rotary.OUT: self._whole(i.out)}
            self._list(ROTATE, block, cpu_rotary.T, places)
        else:
            block, y = self._rowwise(i.x.width), i.x if i.y is None else i.y
            block[X_S], block[Y_S] = i.x.stride, y.stride
            self._list(i.op, block, ROWS, {X: i.x, Y: y, OUT: self._whole(i.out)})

    @staticmethod
    def _rowwise(width: int) -> ctypes.Array:
        block = (ctypes.c_int64 * (OUT + 1))()
        block[WIDTH] = block[X_S] = width
        return block

    @staticmethod
    def _whole(buffer: int) -> Rows:
        return Rows(buffer, 0, 0, 0)

    def _list(self, op: int, block: ctypes.Array, rows: int, places: dict[int, Rows], fixed: dict | None = None):
        """Takes an instruction. rows: word of its block that says M. places: word -> what it is the address of."""
        self._lists.append((op, block, rows))
        for word, place in places.items():
            if -1 - place.source in self._kept:
                self._moved.append((block, word, 2 * self._kept[-1 - place.source], 2 * place.offset))
            elif place.source < 0:
                block[word] = self._buffers[-1 - place.source].data_ptr() + 2 * place.offset
            else:
                self._inputs[place.source].append((block, word, 2 * place.offset))
        for word, tensor in (fixed or {}).items():
            block[word] = tensor.data_ptr()

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        inputs = [x.contiguous() for x in inputs]
        m = inputs[0].numel() // self.widths[0]
        for x, width in zip(inputs, self.widths):
            if x.dtype is not torch.bfloat16 or x.numel() != m * width:
                raise ValueError(f"a chain wants bfloat16 [{m}, {width}], not {x.dtype} {list(x.shape)}")
        if m != self._m:
            self._set_rows(m)
        if m:
            for x, places in zip(inputs, self._inputs):
                at = x.data_ptr()
                for block, word, offset in places:
                    block[word] = at + offset
            threads = native.threads()
            self._args[THREADS] = native.team_size() if threads > 1 else 0
            memory = torch.empty(m * self._kept_width, dtype=torch.bfloat16)
            at = memory.data_ptr()
            for block, word, begin, offset in self._moved:
                block[word] = at + m * begin + offset
            native.run(self._call, self._at, threads)
        else:
            memory = torch.empty(0, dtype=torch.bfloat16)
        return [torch.as_strided(memory, *show) if type(show) is tuple else show for show in self._shown[m]]

    def _set_rows(self, m: int) -> None:
        if m > self._scratch.rows:
            raise ValueError(f"a chain for at most {self._scratch.rows} rows got {m}")
        self._m = -1  # until all of it is done
        for i, (op, block, rows) in enumerate(self._lists):
            block[rows] = m
            idle = m != 1 if op == LINEAR else m == 1 and op in (WIDEN, SEVERAL)
            self._args[LIST + 2 * i] = NOTHING if idle else op
        if m not in self._shown:
            self._shown[m] = [self._show(m, output) for output in self.outputs]
        self._m = m

    def _show(self, m: int, output: Output) -> tuple | torch.Tensor:
        """The output, or how it is seen in the memory of a call."""
        shape = (*output.shape[: output.at], m, *output.shape[output.at + 1 :])
        buffer = -1 - output.rows.source
        if buffer in self._kept:
            return shape, output.strides, m * self._kept[buffer] + output.rows.offset
        return torch.as_strided(self._buffers[buffer], shape, output.strides, output.rows.offset)
