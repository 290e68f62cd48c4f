"""Modules of a model in the form that this machine runs fastest, and back again: linear layers and norms on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from kvframe.hf import linear, norms


def pack(module: nn.Module, run: Callable[[], None]) -> int:
    """Gives the module's parts their faster forwards; answers the bytes of copies of weights that this takes.

    Args:
        run: a forward of the module.
    """
    size = linear.pack(module, run)
    norms.pack(module)
    return size


def unpack(module: nn.Module) -> None:
    """As transformers made it."""
    linear.unpack(module)
    norms.unpack(module)


@contextmanager
def unpacked(module: nn.Module) -> Iterator[None]:
    """Inside the block the module is as transformers made it; afterwards as it was before."""
    before = [(part, vars(part)["forward"]) for part in module.modules() if "forward" in vars(part)]
    unpack(module)
    try:
        yield
    finally:
        for part, forward in before:
            part.forward = forward
