"""Where a model puts the first token of a text, when it is not told: 0, or behind the padding id (RoBERTa).

kvframe says itself where each token of a flat step stands, so it must count as the model does. Two short forwards under
the probe's recording attention tell: one without `position_ids`, and one with the positions that are to be tried. They
are the same to the model when all its queries and keys are.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import torch
from torch import nn

from kvframe.errors import UnsupportedModelError
from kvframe.hf.probe import Recorder, record


def accepted(module: nn.Module) -> bool:
    """Can `position_ids` be handed to its forward?"""
    parameters = inspect.signature(module.forward).parameters
    return "position_ids" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def first(module: nn.Module, run: Callable[[int | None], None]) -> int:
    """The position that the model gives the first token of a text.

    Args:
        run: computes a few tokens at the positions p, p + 1, ...; None: where the model puts them.
    Raises: UnsupportedModelError when it takes no positions, or counts in a way that is not known.
    """

    def at(start: int | None) -> Recorder:
        return record(module, lambda: run(start))

    name, stated = type(module).__name__, "position_ids" in inspect.signature(module.forward).parameters
    if not accepted(module) or not stated and same(at(0), at(1)):
        raise UnsupportedModelError(f"{name}.forward takes no position_ids, so requests cannot share one flat forward")
    own, tried = at(None), candidates(module)
    for start in tried:
        if same(own, at(start)):
            return start
    raise UnsupportedModelError(
        f"{name} puts its tokens at positions of its own: its queries without position_ids are not those at "
        f"{' or '.join(f'{n}, {n + 1}, ...' for n in tried)}"
    )


def candidates(module: nn.Module) -> list[int]:
    """0, and the position behind the padding id of each embedding table."""
    return [0, *sorted(n + 1 for n in paddings(module) if n >= 0)]


def paddings(module: nn.Module) -> set[int]:
    """Padding ids of the embedding tables: tokens that such a model does not count."""
    return {p.padding_idx for p in module.modules() if isinstance(p, nn.Embedding) and p.padding_idx is not None}


def countable(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Token ids `[T]` with others in the place of padding ids."""
    skipped = paddings(module)
    return torch.tensor([next(n for n in itertools.count(i) if n not in skipped) for i in ids.tolist()]).to(ids)


def same(a: Recorder, b: Recorder, rows: slice = slice(None)) -> bool:
    """Did both forwards have the same calls, with the same queries and keys (in `b`: at these rows)?"""
    return len(a.calls) == len(b.calls) and all(
        _close(one.query, two.query[:, :, rows]) and _close(one.key, two.key[:, :, rows])
        for one, two in zip(a.calls, b.calls)
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()), equal_nan=True)
