"""Linear layers that multiply the same tensor, as one matrix product.

The q, k and v of an attention layer are three products with one x, and the gate and up of a gated MLP are two. One
product with the weights above each other is the same sums of numbers, with a third of the calls, and reads x once:

    y = x [q_w; k_w; v_w]^T = [q | k | v]

Who shares its x is seen in a dry forward (the same tensor object, one call after the other), not known by names. The
first layer of such a set multiplies for all of them and keeps what the others will ask for with the same x.

Shape legend: M rows, I input size, O output size of a layer, S sum of the O of a set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from kvframe.hf import opaque

Multiply = Callable[[torch.Tensor], torch.Tensor]  # x [..., I] -> [..., S]


def sets(module: nn.Module, run: Callable[[], None]) -> list[list[nn.Linear]]:
    """Every nn.Linear of a module, those that `run`, a forward, shows to multiply one tensor together.

    A layer that is called several times in a forward, or not at all, stays alone.
    """
    layers = [part for part in module.modules() if type(part) is nn.Linear]
    calls: list[tuple[nn.Linear, torch.Tensor]] = []
    hooks = [part.register_forward_pre_hook(lambda part, args: calls.append((part, args[0]))) for part in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    times: dict[nn.Linear, int] = {}
    for part, _ in calls:
        times[part] = times.get(part, 0) + 1
    found: list[list[nn.Linear]] = []
    last = None
    for part, x in calls:
        if times[part] > 1:
            last = None
            continue
        if last is x and _alike(part, found[-1][0]):
            found[-1].append(part)
        else:
            found.append([part])
        last = x
    return found + [[part] for part in layers if times.get(part, 0) != 1]


def _alike(a: nn.Linear, b: nn.Linear) -> bool:
    return (a.bias is None) == (b.bias is None) and a.weight.dtype == b.weight.dtype


def stacked(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Weights above each other: `[O, I]` each -> `[S, I]`."""
    return torch.cat([tensor.detach().to(dtype) for tensor in tensors])


class Product:
    """One product for a set of linear layers.

    Args:
        parts: the set, in the order of their calls.
        multiply: the product of them all, bias included.
    """

    def __init__(self, parts: list[nn.Linear], multiply: Multiply):
        self.sizes = [part.out_features for part in parts]
        self.multiply = opaque.Product(multiply, sum(self.sizes))
        self.dtype = parts[0].weight.dtype
        self.x, self.out = None, ()
        for i, part in enumerate(parts):
            part.forward = self._alone(part) if len(parts) == 1 else self._one_of(i, part)

    def _alone(self, part: nn.Linear):
        def forward(x: torch.Tensor) -> torch.Tensor:
            return self.multiply(x) if x.dtype is self.dtype else F.linear(x, part.weight, part.bias)

        return forward

    def _one_of(self, i: int, part: nn.Linear):
        last = i == len(self.sizes) - 1

        def forward(x: torch.Tensor) -> torch.Tensor:
            if x.dtype is not self.dtype:
                return F.linear(x, part.weight, part.bias)
            if i == 0 or self.x is not x:
                self.x, self.out = x, self.multiply(x).split(self.sizes, -1)
            out = self.out[i]
            if last:
                self.x, self.out = None, ()
            return out

        return forward
