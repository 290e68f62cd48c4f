"""One function made of two recordings of a forward.

The recordings differ in their number of tokens T and of wanted logits K, and in nothing else: the same functions,
called with tensors of the same origin, and with the same numbers, except where each saw its own T or K. There the
program writes `T` or `K`:

    recorded with 3 tokens      view(v7, (1, 3, -1, 64))
    recorded with 5 tokens      view(v7, (1, 5, -1, 64))
    program                     v8 = view(v7, (1, T, -1, 64))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvframe.hf.replay.tape import Call, CannotReplay, tensors


@dataclass(frozen=True)
class Recording:
    """calls: what a tape saw. inputs: name -> tensor. sizes: name -> number, T and K. out: the result."""

    calls: list[Call]
    inputs: dict[str, torch.Tensor]
    sizes: dict[str, int]
    out: torch.Tensor


@dataclass(frozen=True)
class Name:
    """A value of the program: an input, a size, the result of a step or a part of it (`v3[0]`)."""

    text: str

    @property
    def whole(self) -> str:
        """The result that this is a part of."""
        return self.text.partition("[")[0]


@dataclass
class Step:
    """`name = function(*args, **kwargs)`; Names stand in the arguments where values do. writes: to one of them."""

    name: Name
    function: Callable
    args: tuple
    kwargs: dict
    writes: bool = False


@dataclass
class Program:
    """steps: in their order. inputs: names of the arguments. samples: of each value the tensors that the recordings
    saw; sizes: T and K of these. Both are there until `forget`."""

    inputs: tuple[str, ...]
    steps: list[Step]
    out: Name
    samples: dict[Name, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)
    sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})

    def of(self, steps: list[Step]) -> Program:
        """The same with other steps."""
        return replace(self, steps=steps)

    def renamed(self, others: dict[Name, Name]) -> Program:
        """The same with other names of values in arguments."""
        steps = [
            replace(step, args=_renamed(step.args, others), kwargs=_renamed(step.kwargs, others)) for step in self.steps
        ]
        return replace(self, steps=steps, out=others.get(self.out, self.out))

    def written(self) -> set[int]:
        """Storages of the samples that a step wrote to: what they held before is gone."""
        return {
            storage(sample)
            for step in self.steps
            if step.writes
            for name in names((step.args, step.kwargs))
            for sample in self.samples.get(name, ())
        }

    def forget(self) -> Program:
        """The same without what the recordings saw."""
        return replace(self, samples={}, sizes=({}, {}))

    def source(self, around: Callable[[Callable], Callable] = lambda function: function) -> tuple[str, dict[str, Any]]:
        """The text of a function `run`, and the globals that it needs. around: what is called instead of a function."""
        writer = _Writer()
        lines = [f"def run({', '.join(self.inputs)}):"]
        last = {name.whole: i for i, step in enumerate(self.steps) for name in names((step.args, step.kwargs))}
        gone: dict[int, list[str]] = {}
        made = {step.name.text for step in self.steps}
        for text, i in last.items():
            if text in made - {self.out.whole, "T", "K"}:
                gone.setdefault(i, []).append(text)
        for i, step in enumerate(self.steps):
            args = [writer.text(arg) for arg in step.args]
            args += [f"{key}={writer.text(value)}" for key, value in step.kwargs.items()]
            lines.append(f" {step.name.text} = {writer.known('f', around(step.function))}({', '.join(args)})")
            if i in gone:
                lines.append(f" del {', '.join(gone[i])}")  # its memory serves what comes next
        lines.append(f" return {self.out.text}")
        return "\n".join(lines), writer.globals

    def compiled(self, around: Callable[[Callable], Callable] = lambda function: function) -> Callable:
        """The function itself; see `source`."""
        text, space = self.source(around)
        exec(compile(text, "<replayed forward>", "exec"), space)
        return space["run"]


def storage(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor shows."""
    return tensor.untyped_storage().data_ptr()


class _Writer:
    """Python expressions of arguments; what has no literal becomes a global."""

    def __init__(self):
        self.globals: dict[str, Any] = {}
        self._held: dict[int, str] = {}

    def known(self, letter: str, value: Any) -> str:
        name = self._held.get(id(value))
        if name is None:
            name = self._held[id(value)] = f"{letter}{len(self._held)}"
            self.globals[name] = value
        return name

    def text(self, value: Any) -> str:
        if isinstance(value, Name):
            return value.text
        if type(value) in (int, bool, str, type(None)):
            return repr(value)
        if isinstance(value, tuple):
            return f"({', '.join(map(self.text, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.text, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.text(part)}' for key, part in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return self.known("c", value)


def names(value: Any) -> Iterator[Name]:
    """The Names inside arguments."""
    if isinstance(value, Name):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from names(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from names(part)
    elif isinstance(value, slice):
        yield from names((value.start, value.stop, value.step))


def _renamed(value: Any, others: dict[Name, Name]) -> Any:
    if isinstance(value, Name):
        return others.get(value, value)
    if isinstance(value, (tuple, list)):
        return type(value)(_renamed(part, others) for part in value)
    if isinstance(value, dict):
        return {key: _renamed(part, others) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*_renamed((value.start, value.stop, value.step), others))
    return value


class _Origins:
    """Where the tensors of a recording come from."""

    def __init__(self, recording: Recording):
        self.sizes = recording.sizes
        self._names = {id(tensor): Name(name) for name, tensor in recording.inputs.items()}

    def made(self, name: str, out: Any) -> None:
        for path, tensor in tensors(out):
            self._names[id(tensor)] = Name(name + "".join(f"[{i}]" for i in path))

    def of(self, tensor: torch.Tensor) -> Name | None:
        """None: it was there before."""
        return self._names.get(id(tensor))


def unified(a: Recording, b: Recording) -> Program:
    """The program that is both. Raises CannotReplay: they differ in more than their sizes."""
    if len(a.calls) != len(b.calls):
        raise CannotReplay(f"forwards of {a.sizes} and {b.sizes} call {len(a.calls)} and {len(b.calls)} functions")
    origins, steps = (_Origins(a), _Origins(b)), []
    for i, (one, other) in enumerate(zip(a.calls, b.calls)):
        if one.function != other.function:
            raise CannotReplay(f"{one.function} is called for {a.sizes}, {other.function} for {b.sizes}")
        args, kwargs = (
            _both(x, y, *origins, one.function) for x, y in ((one.args, other.args), (one.kwargs, other.kwargs))
        )
        steps.append(Step(Name(f"v{i}"), one.function, args, kwargs, one.writes or other.writes))
        origins[0].made(f"v{i}", one.out)
        origins[1].made(f"v{i}", other.out)
    sizes = [Step(Name("T"), _tokens, (Name("input_ids"),), {})]
    if "K" in a.sizes:
        sizes.append(Step(Name("K"), len, (Name("logits_to_keep"),), {}))
    out = _both(a.out, b.out, *origins, "the result")
    if not isinstance(out, Name):
        raise CannotReplay("the result is not of this forward")
    samples = {Name(name): (tensor, b.inputs[name]) for name, tensor in a.inputs.items()}
    for step, one, other in zip(steps, a.calls, b.calls):
        for (path, x), (_, y) in zip(tensors(one.out), tensors(other.out)):
            samples[Name(step.name.text + "".join(f"[{i}]" for i in path))] = (x, y)
    return Program(tuple(a.inputs), sizes + steps, out, samples, (a.sizes, b.sizes))


def _tokens(ids: torch.Tensor) -> int:
    return ids.shape[1]


def _both(a: Any, b: Any, left: _Origins, right: _Origins, where: Any) -> Any:
    """What stands for both values in the program."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        name = left.of(a)
        if name is not None and name == right.of(b):
            return name
        if name is None and a is b:
            return a
    elif type(a) is type(b) or (isinstance(a, tuple) and isinstance(b, tuple)):
        if isinstance(a, (tuple, list)) and len(a) == len(b):
            return (tuple if isinstance(a, tuple) else list)(_both(x, y, left, right, where) for x, y in zip(a, b))
        if isinstance(a, dict) and list(a) == list(b):
            return {key: _both(a[key], b[key], left, right, where) for key in a}
        if isinstance(a, slice):
            return slice(*(_both(getattr(a, x), getattr(b, x), left, right, where) for x in ("start", "stop", "step")))
        if a is b or a == b:
            return a
        if type(a) is int:
            for size in left.sizes:
                times, rest = divmod(a, left.sizes[size])
                if times > 0 and not rest and b == times * right.sizes[size]:
                    return Name(size if times == 1 else f"{times} * {size}")
    raise CannotReplay(f"{where} is called with {_short(a)} and with {_short(b)}")


def _short(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:60]
