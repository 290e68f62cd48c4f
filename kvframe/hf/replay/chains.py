"""Stretches of a program that become one native call each (see kvframe.kernels.cpu_chain).

A stretch is a run of steps on rows of bf16 on a CPU: products, norms, rotary embeddings, sums, element-wise products,
SiLU, and the views between them, which are no work there. Attention, and whatever else a forward calls, stands between
stretches. Each chain is held against what torch computed when it was recorded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from kvframe.hf.linear import ByRows
from kvframe.hf.replay.layout import Layout, layout
from kvframe.hf.replay.patterns import ADD, MULTIPLY
from kvframe.hf.replay.program import Name, Program, Step, names, storage
from kvframe.kernels import cpu_chain
from kvframe.kernels.cpu_chain import Chain, Instruction, Output, Rows, Scratch
from kvframe.kernels.cpu_linear import ROWS
from kvframe.kernels.cpu_norm import norm
from kvframe.kernels.cpu_rotary import rotate

log = logging.getLogger(__name__)

FEWEST = 2  # instructions of a chain
NEAR = 2**-6  # of the largest number: roundings to bf16, one after the other


@dataclass
class _Stretch:
    """What is known while a stretch grows.

    Attributes:
        size: of its rows, "T" or "K". inputs: names that come from outside. buffers: width of each.
        held: storage of a recording's tensor -> its buffer. made: steps that it replaces. width: of each input.
    """

    size: str
    inputs: list[Name] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    made: list[Step] = field(default_factory=list)
    width: dict[Name, int] = field(default_factory=dict)


class _Finder:
    """Walks through a program and cuts out its stretches."""

    def __init__(self, program: Program, rows: int):
        self.program, self.samples, self.rows = program, program.samples, rows
        self.written = program.written()
        self.steps: list[Step | _Stretch] = []
        self.open: _Stretch | None = None
        self._by_name = {step.name: step for step in program.steps}
        self._made: dict[str, list[Name]] = {}  # step -> the tensors that it made
        for name in self.samples:
            self._made.setdefault(name.whole, []).append(name)

    def run(self) -> Program:
        for step in self.program.steps:
            if step.writes or not (self._instruction(step) or self._view(step)):
                self._close()
                self.steps.append(step)
        self._close()
        while True:
            steps, renamed, wrong = self._with_chains()
            if not wrong:
                break
            log.info("%d stretches are run as they are: as chains they would give other numbers", len(wrong))
            self.steps = [
                step for part in self.steps for step in (part.made if any(part is w for w in wrong) else [part])
            ]
        if not renamed:
            return self.program
        return _without_idle_views(self.program.of(steps).renamed(renamed))

    def _with_chains(self) -> tuple[list[Step], dict[Name, Name], list[_Stretch]]:
        """The steps, where results of chains are from now on, and stretches whose chain computes something else."""
        seen = {name for step in self._plain() for name in names((step.args, step.kwargs))} | {self.program.out}
        used = seen | {name for part in self.steps if isinstance(part, _Stretch) for name in part.inputs}
        renamed: dict[Name, Name] = {}
        steps: list[Step] = []
        wrong: list[_Stretch] = []
        scratch = Scratch(self.rows)  # no two chains run at once
        for number, part in enumerate(self.steps):
            if isinstance(part, Step):
                steps.append(part)
                continue
            shown = [name for step in part.made for name in self._names_of(step) if name in used]
            chain = self._chain(part, shown, seen, scratch)
            if not self._right(chain, part, shown):
                wrong.append(part)
            steps.append(Step(Name(f"s{number}"), chain, tuple(part.inputs), {}))
            renamed |= {name: Name(f"s{number}[{i}]") for i, name in enumerate(shown)}
        return steps, renamed, wrong

    def _plain(self) -> list[Step]:
        return [part for part in self.steps if isinstance(part, Step)]

    def _names_of(self, step: Step) -> list[Name]:
        """The tensors that a step made."""
        return self._made.get(step.name.text, [])

    def _close(self) -> None:
        """The stretch ends here."""
        stretch, self.open = self.open, None
        if stretch is None:
            return
        self.steps += [stretch] if len(stretch.instructions) >= FEWEST else stretch.made

    def _layout(self, name: Name) -> Layout | None:
        found = self.samples.get(name)
        fine = found is not None and found[0].dtype is torch.bfloat16 and found[0].device.type == "cpu"
        return layout(*found, self.program.sizes) if fine else None

    def _instruction(self, step: Step) -> bool:
        """Takes a step that computes."""
        read = _reading(step)
        out = self._layout(step.name)
        if read is None or out is None or not out.dense:
            return False
        op, values, more = read
        layouts = [self._layout(value) if isinstance(value, Name) else None for value in values]
        if any(found is None or found.size != out.size or found.width % 8 for found in layouts):
            return False
        x = layouts[0]
        if op in (cpu_chain.ADD, cpu_chain.MULTIPLY) and any(found.inner() != out.inner() for found in layouts):
            return False
        if op in (cpu_chain.LINEAR, cpu_chain.NORM) and not (x.stride == x.width and x.shape[-1] == x.width):
            return False
        if op == cpu_chain.ROTATE and (x.shape[3] != layouts[1].width or x.strides[1] != x.shape[3]):
            return False
        stretch = self.open
        if stretch is None or stretch.size != out.size:
            self._close()
            stretch = self.open = _Stretch(out.size)
        if not all(self._reachable(stretch, value, found) for value, found in zip(values, layouts)):
            return False
        places = [self._rows(stretch, value, found) for value, found in zip(values, layouts)]
        stretch.buffers.append(out.width)
        buffer = -len(stretch.buffers)
        for sample in self.samples[step.name]:
            stretch.held[storage(sample)] = buffer
        if op == cpu_chain.ROTATE:
            more, y = (x.shape[1], *places[1:]), None
        else:
            y = places[1] if len(places) > 1 else None
        stretch.instructions.append(Instruction(op, places[0], buffer, y, more))
        stretch.made.append(step)
        return True

    def _reachable(self, stretch: _Stretch, name: Name, found: Layout) -> bool:
        """Does a value lie in a buffer of the stretch, or row after row in a tensor that may be an input?"""
        inside = storage(self.samples[name][0]) in stretch.held
        return inside or self.samples[name][0].is_contiguous() and found.stride == found.width

    def _rows(self, stretch: _Stretch, name: Name, found: Layout) -> Rows:
        """Where a value lies: in a buffer of the stretch, or in an input, which comes into its own memory."""
        buffer = stretch.held.get(storage(self.samples[name][0]))
        if buffer is not None:
            return Rows(buffer, found.offset, found.stride, found.width)
        name = self._origin(name)
        if name not in stretch.inputs:
            stretch.inputs.append(name)
            stretch.width[name] = found.width
        return Rows(stretch.inputs.index(name), 0, found.width, found.width)

    def _origin(self, name: Name) -> Name:
        """The value of which this one is nothing but another shape: `Chain` looks at memory only."""
        while True:
            step = self._by_name.get(name)
            read = [] if step is None else [n for n in names((step.args, step.kwargs)) if n in self.samples]
            if len(read) != 1:
                return name
            for mine, other in zip(self.samples[name], self.samples[read[0]]):
                if mine.data_ptr() != other.data_ptr() or mine.numel() != other.numel() or not other.is_contiguous():
                    return name
            name = read[0]

    def _view(self, step: Step) -> bool:
        """Takes a step that only looks at what the stretch made in another shape; lets one that looks at something
        else in another shape be done before the stretch."""
        if self.open is None:
            return False
        made = [sample for name in self._names_of(step) for sample in self.samples[name]]
        read = [sample for name in names((step.args, step.kwargs)) for sample in self.samples.get(name, ())]
        storages, others = ({storage(sample) for sample in samples} for samples in (made, read))
        if not made or not storages <= others:
            return False
        if storages <= set(self.open.held):
            if all(self._layout(name) is not None for name in self._names_of(step)):
                self.open.made.append(step)
                return True
            return False
        if others & set(self.open.held):
            return False
        self.steps.append(step)
        return True

    def _chain(self, stretch: _Stretch, shown: list[Name], seen: set[Name], scratch: Scratch) -> Chain:
        """shown: what others use of it; seen: what others use that are not chains."""
        outputs = []
        for value in shown:
            found, sample = self._layout(value), self.samples[value][0]
            rows = Rows(stretch.held[storage(sample)], found.offset, found.stride, found.width)
            outputs.append(Output(rows, found.shape, found.strides, found.at, kept=value in seen))
        widths = [stretch.width[value] for value in stretch.inputs]
        return Chain(stretch.instructions, stretch.buffers, widths, outputs, scratch)

    def _right(self, chain: Chain, stretch: _Stretch, shown: list[Name]) -> bool:
        """Does it compute what was recorded? What was written over since cannot be looked at."""
        if any(storage(self.samples[value][0]) in self.written for value in stretch.inputs):
            return True
        for recording in (0, 1):
            given = [self.samples[value][recording] for value in stretch.inputs]
            for value, found in zip(shown, chain(*given)):
                wanted = self.samples[value][recording]
                if storage(wanted) in self.written:
                    continue
                if not (found.float() - wanted.float()).abs().max() <= NEAR * wanted.float().abs().max():
                    return False
        return True


def _reading(step: Step):
    """(operation, its values, more) of a step that a chain can do."""
    if step.function is norm and len(step.args) == 4:
        return cpu_chain.NORM, step.args[:1], step.args[1:]
    if isinstance(step.function, ByRows):
        return cpu_chain.LINEAR, step.args, (step.function.few,)
    if step.function is rotate:
        return cpu_chain.ROTATE, step.args, ()
    if step.function is F.silu and len(step.args) == 1 and not step.kwargs.get("inplace"):
        return cpu_chain.SILU, step.args, ()
    if not step.kwargs and len(step.args) == 2:
        for functions, op in ((ADD, cpu_chain.ADD), (MULTIPLY, cpu_chain.MULTIPLY)):
            if step.function in functions:
                return op, step.args, ()
    return None


def _without_idle_views(program: Program) -> Program:
    """Without the views that nobody looks at any more."""
    used, kept = {program.out.whole}, []
    for step in reversed(program.steps):
        sample = program.samples.get(step.name)
        read = list(names((step.args, step.kwargs)))
        view = not step.writes and sample is not None and any(
            storage(sample[0]) == storage(other[0])
            for other in (program.samples.get(name) for name in read)
            if other is not None
        )
        if view and step.name.text not in used:
            continue
        used |= {name.whole for name in read}
        kept.append(step)
    return program.of(kept[::-1])


def chained(program: Program, rows: int) -> Program:
    """The program with its stretches as chains; itself where there are none.

    Args:
        rows: most tokens of a step, at most ROWS of `cpu_linear`.
    """
    return _Finder(program, rows).run() if rows <= ROWS else program
