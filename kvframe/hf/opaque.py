"""Attention and packed products as operations that torch.compile does not look into.

`engine.compile=true` traces the model's forward. What a cache does in a step (plans, tables, compiled kernels) is no
business of a graph, so there each layer's attention is one call of the operator `kvframe::attend`, which finds the
running step by a number. It writes keys and values into pools that the graph does not know; what keeps the order is
that each layer's q, k and v come from the output of the layer before, and that the output is always used. Products of
linear layers (see kvframe.hf.linear) are calls of `kvframe::multiply`, for the same reason.

Shape legend: T tokens of a flat step, Hq/Hkv query/KV heads, Dk/Dv key/value size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary


def one(function: Callable, x: torch.Tensor, *args):
    """`function(x, *args)`, which a recording (see kvframe.hf.replay) takes as one call."""
    if has_torch_function_unary(x):
        return handle_torch_function(function, (x,), x, *args)
    return function(x, *args)


_count = itertools.count(1)  # a number is never given twice: a graph keeps it
_RUNNING: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # number -> Running


def number(running) -> int:
    """The number by which the operator finds it."""
    if running.number is None:
        running.number = next(_count)
        _RUNNING[running.number] = running
    return running.number


@torch.library.custom_op("kvframe::attend", mutates_args=())
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, running: int, v_dim: int
) -> torch.Tensor:
    """`q [1, Hq, T, Dk]`, `k [1, Hkv, T, Dk]`, `v [1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`.

    Args:
        layer: index among the model's attention layers. running: number of what they share. v_dim: Dv.
    """
    now = _RUNNING[running]
    out = now.cache.attend(layer, q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), now.plan)
    return out.unsqueeze(0).contiguous()


@attend.register_fake
def _(q, k, v, layer, running, v_dim):
    return q.new_empty(1, q.shape[2], q.shape[1], v_dim)


_PRODUCTS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # number -> multiply


class Product:
    """A product `x [..., I]` -> `[..., S]` that a graph takes as one operation, and everybody else as it is."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor], outputs: int):
        self.multiply, self.outputs, self.number = multiply, outputs, next(_count)
        _PRODUCTS[self.number] = self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return multiply(x, self.number, self.outputs)
        return one(self.multiply, x)


@torch.library.custom_op("kvframe::multiply", mutates_args=())
def multiply(x: torch.Tensor, number: int, outputs: int) -> torch.Tensor:
    """`x [..., I]` -> `[..., outputs]` by the product of this number."""
    return _PRODUCTS[number].multiply(x)


@multiply.register_fake
def _(x, number, outputs):
    return x.new_empty(*x.shape[:-1], outputs)
