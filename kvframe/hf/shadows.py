"""Modules without matrices: how they are made, and how they run.

The matrices lie on torch's meta device: they have a shape and no memory. Everything else (norms, biases, rotary
frequencies, token ids, activations) is real, so that code which looks at values (masks, positions, experts that are
chosen) runs as always. An operation in which a real tensor meets a matrix answers made-up numbers of the right shape:

    x [T, I] real, W [O, I] meta    ->  y [T, O] real:  y[t] = cos(a) c + sin(a) d,  a = x[t] . r;  c, d, r drawn once
    W.T, W[expert], 2 * W           ->  meta: another matrix

Rows that are equal stay equal, and rows that differ stay different. So the probe sees the calls of the real model, and
how its queries turn with position (kvframe.hf.turning) is proven on real vectors.

Shape legend: T tokens, I input size, O output size, D size of an embedding, `...` any leading shape.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class Hollow(TorchDispatchMode):
    """While a module is made: floating-point matrices are made on the meta device, whoever asks for them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = _tensors(args, kwargs)
        if any(x.is_meta for x in tensors):
            return _on_meta(func, args, kwargs)
        if not tensors and any(a.name == "device" for a in func._schema.arguments):
            made = func(*args, **{**kwargs, "device": "meta"})
            if isinstance(made, torch.Tensor) and made.is_floating_point() and made.dim() > 1:
                return made
        return func(*args, **kwargs)


class Shadows(TorchDispatchMode):
    """While a hollow module runs: what meets a matrix gets made-up numbers (see the head of this file)."""

    def __init__(self):
        super().__init__()
        self.drawn: dict[tuple[int, int], torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = _tensors(args, kwargs)
        if not any(x.is_meta for x in tensors):
            if kwargs.get("device") is not None:  # "where the weight is" leads to no real place
                kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)
        made, real = _on_meta(func, args, kwargs), [x for x in tensors if not x.is_meta]
        if any(made is x for x in tensors):  # in place
            return made
        if func._schema.name == "aten::embedding":
            return self._rows(made, real[0])
        if not any(x.is_floating_point() for x in real):
            return made
        return tree_map(lambda x: self._numbers(x, real) if isinstance(x, torch.Tensor) else x, made)

    def _rows(self, made: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings `[..., D]` of `ids [...]`: other ids, other rows."""
        return torch.cos(ids[..., None].float() + 3 * self._draw(made.shape[-1], 0)).to(made.dtype)

    def _numbers(self, made: torch.Tensor, real: list[torch.Tensor]) -> torch.Tensor:
        """`[..., O]` in the shape and dtype of `made`, from the real operands of the same leading shape."""
        if not made.is_floating_point() or not made.dim():
            return torch.zeros(made.shape, dtype=made.dtype)
        angle = torch.zeros(made.shape[:-1])
        for x in real:
            if x.is_floating_point() and x.dim() == made.dim() and x.shape[:-1] == made.shape[:-1]:
                angle = angle + x.float() @ self._draw(x.shape[-1], 1) / max(x.shape[-1], 1) ** 0.5
        c, d = self._draw(made.shape[-1], 2), self._draw(made.shape[-1], 3)
        return (angle.cos()[..., None] * c + angle.sin()[..., None] * d).to(made.dtype)

    def _draw(self, size: int, seed: int) -> torch.Tensor:
        if (size, seed) not in self.drawn:
            self.drawn[size, seed] = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        return self.drawn[size, seed]


def _tensors(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Arguments of torch's operations are tensors, lists of tensors, or none."""
    found = []
    for x in (*args, *kwargs.values()):
        found += [x] if isinstance(x, torch.Tensor) else x if isinstance(x, list | tuple) else ()
    return [x for x in found if isinstance(x, torch.Tensor)]


def _on_meta(func, args, kwargs):
    """What the operation answers when all its tensors are on the meta device; in place: the tensor it was given."""

    def moved(x):
        if isinstance(x, torch.Tensor):
            return x.to("meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    made = func(*tree_map(moved, args), **tree_map(moved, kwargs))
    first = func._schema.arguments[0]
    return args[0] if args and first.alias_info is not None and first.alias_info.is_write else made
