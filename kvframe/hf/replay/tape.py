"""Which functions of torch a forward calls, in which order, with what.

A torch function mode sees every call from Python, once, with the tensors themselves; a dispatch mode below it sees
what the calls do: whether a value decided something, or chance did. Functions of kvframe that go through `opaque.one`
are one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

SEEN = ("numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "set_")
UNSAFE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)


class CannotReplay(Exception):
    """Why a forward cannot be replayed."""


@dataclass(frozen=True)
class Call:
    """`out = function(*args, **kwargs)`, with the tensors that were there; `writes`: to one of them."""

    function: Callable
    args: tuple
    kwargs: dict
    out: Any
    writes: bool


class Tape(TorchFunctionMode):
    """Records the calls that make or write tensors while it is active.

    Attributes:
        calls: in their order. They keep their tensors, so that no two share an id.
    """

    def __init__(self, watch: Watch):
        """watch: what stands below it."""
        super().__init__()
        self.calls: list[Call] = []
        self._watch = watch

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in SEEN:
            raise CannotReplay(f"the forward looks at values of a tensor ({name})")
        self._watch.wrote = False
        with self._watch.aside(ours(function)):
            out = function(*args, **kwargs)
        if next(tensors(out), None) or out is None and next(tensors((args, *kwargs.values())), None):  # it may write
            self.calls.append(Call(function, args, kwargs, out, self._watch.wrote))
        return out


def ours(function: Callable) -> bool:
    """One of kvframe's own, which a tape takes as it is."""
    return str(getattr(function, "__module__", "")).startswith("kvframe.")


class Watch(TorchDispatchMode):
    """Refuses operations whose result is decided by values or by chance, and writes to what outlives the forward."""

    def __init__(self, kept: set[int]):
        """kept: addresses of the memory of parameters and buffers, which nothing may write."""
        super().__init__()
        self._kept, self._aside = kept, False
        self.wrote = False  # something did, since this was set

    @contextmanager
    def aside(self, really: bool) -> Iterator[None]:
        """Inside the block it looks away, if so."""
        before, self._aside = self._aside, self._aside or really
        try:
            yield
        finally:
            self._aside = before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._aside:
            return function(*args, **kwargs)
        if any(tag in function.tags for tag in UNSAFE) and not _harmless(function, args):
            raise CannotReplay(f"the forward depends on values ({function})")
        out = function(*args, **kwargs)
        if function._schema.is_mutable:
            self.wrote = True
            for argument, value in zip(function._schema.arguments, args):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._kept:
                    raise CannotReplay(f"the forward changes a buffer ({function})")
        return out


def _harmless(function, args: tuple) -> bool:
    """Is it a tensor indexed by numbers (a mask's values would decide the shape)?"""
    if function is not torch.ops.aten.index.Tensor:
        return False
    return not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def tensors(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, torch.Tensor]]:
    """Tensors inside tuples and lists, with the way to each."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from tensors(part, (*path, i))


@contextmanager
def recording(module: torch.nn.Module, watched: bool = True) -> Iterator[Tape]:
    """The forwards inside the block are on the tape. watched: what they do is looked at, too; a second recording does
    the same. Without gradients, but not in inference mode: there an operation that is made of others is seen as one,
    whatever they are."""
    watch = Watch({tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())})
    tape = Tape(watch)
    with torch.inference_mode(False), torch.no_grad(), watch if watched else nullcontext(), tape:
        yield tape
