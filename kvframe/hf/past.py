"""Models that ask a cache how many tokens came before, besides being told positions (Llama 4's attention temperature).

In a flat step each row has another answer. `Past` gives it as a tensor, so that the number of a row plus its answer is
its position:

    rows          0  1  2 | 3 | 4        three requests: a chunk, and two that decode
    positions     5  6  7 | 40 | 2
    answer        5  5  5 | 37 | -2

It stores nothing: keys and values go to kvframe's attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from kvframe.errors import UnsupportedModelError
from kvframe.hf.positions import same
from kvframe.hf.probe import Recorder, record

ARGUMENTS = ("cache", "past_key_values")  # as newer and older versions call it


class Past:
    """A cache of transformers as far as such a model asks it.

    Args:
        before: tokens before the rows of a step: one number, or int64 [T], one for each row.
    Attributes:
        asked: somebody wanted to know.
    """

    layers: Sequence = ()
    is_initialized = is_compileable = False

    def __init__(self, before: int | torch.Tensor):
        self.before, self.asked = before, False

    @classmethod
    def of(cls, positions: torch.Tensor) -> Past:
        """What stands before rows at these positions [T]."""
        return cls(positions - torch.arange(len(positions), device=positions.device))

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        self.asked = True
        return self.before

    def update(self, key_states, value_states, *args, **kwargs):
        return key_states, value_states

    def get_mask_sizes(self, query_length, *args, **kwargs) -> tuple[int, int]:
        return int(query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_query_offset(self, *args, **kwargs) -> int:
        return 0


def wanted(module: nn.Module, run: Callable[..., None], last: int, device: str) -> str | None:
    """The argument in which every flat step wants a Past: queries or keys depend on what a cache says came before.

    Args:
        run: `run(positions int64 [T], **arguments)` computes the same token at each of the positions, on the device.
        last: a far position.
    Raises: UnsupportedModelError when they do, and are not those of each request alone in a flat step.
    """
    name = next((name for name in ARGUMENTS if name in inspect.signature(module.forward).parameters), None)
    if name is None:
        return None

    def seen(positions: list[int], past: Past | None) -> Recorder:
        return record(module, lambda: run(np.array(positions), **({} if past is None else {name: past})))

    near, far = [0, 1], [max(last - 1, 0), last]
    past = Past(far[0])
    try:
        told = seen(far, past)
    except UnsupportedModelError:  # it reads what a cache keeps, and does without where there is none
        return None
    if not past.asked or same(told, seen(far, None)):
        return None
    try:
        packed = seen([*near, *far], Past.of(torch.tensor([*near, *far], device=device)))
        if same(seen(near, Past(0)), packed, slice(0, 2)) and same(told, packed, slice(2, 4)):
            return name
        why = "its queries are not those of the requests alone"
    except UnsupportedModelError as error:
        why = error.message
    raise UnsupportedModelError(
        f"{type(module).__name__} asks its cache how many tokens came before, and takes no answer for each row: {why}"
    )
