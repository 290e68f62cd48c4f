"""What recordings and compiled graphs take as one operation.

A recording (see kvframe.hf.replay) and torch.compile (`engine.compile=true`) look at what a forward calls. What a cache
does in a step (plans, tables, compiled kernels) is no business of theirs, nor is how a product of linear layers is
multiplied: each is one call. A graph finds what it calls by a number (see kvframe.hf.operators).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

_count = itertools.count(1)  # a number is never given twice: a graph keeps it
RUNNING: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # number -> Running
PRODUCTS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # number -> Product


def one(function: Callable, x: torch.Tensor, *args):
    """`function(x, *args)`, which a recording takes as one call."""
    if has_torch_function_unary(x):
        return handle_torch_function(function, (x,), x, *args)
    return function(x, *args)


def number(running) -> int:
    """The number by which a graph finds what the attention layers share."""
    if running.number is None:
        running.number = next(_count)
        RUNNING[running.number] = running
    return running.number


class Product:
    """A product `x [..., I]` -> `[..., S]` that recordings and graphs take as one operation."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor], outputs: int):
        self.multiply, self.outputs, self.number = multiply, outputs, next(_count)
        PRODUCTS[self.number] = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            from kvframe.hf import operators

            return operators.multiply(x, self.number, self.outputs)
        return one(self.multiply, x)
