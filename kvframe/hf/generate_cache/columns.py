"""Which columns of a batch are tokens: what an attention mask says, held against what it said before.

    held      . . x x x        the mask of a forward covers both:   . . x x x x x
              x x x x x                                             x x x x x x x
    new                 x x

Shape legend: B rows, C columns that are held, T columns of the forward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvframe.errors import RequestError
from kvframe.types import LayerSpec


def forgets(spec: LayerSpec) -> bool:
    """Does the model itself let the layer see less than all?"""
    return spec.window is not None or spec.chunk is not None


def new_columns(held: np.ndarray, shape: tuple[int, int], mask: Any, windows: bool) -> np.ndarray:
    """bool [B, T]: the columns of a forward that are tokens.

    Args:
        held: bool [B, C], the columns before; of no rows when nothing is held. shape: (B, T).
        mask: [B, C + T], 0 for padding; None: all are tokens. windows: the model has layers that forget.
    Raises: RequestError: a mask of another shape, one that says otherwise than before, or (with windows) padding
        between tokens.
    """
    (B, T), C = shape, held.shape[1]
    if mask is None:
        mask = np.ones((B, C + T), dtype=bool)
    elif isinstance(mask, torch.Tensor) and mask.dim() == 2:
        mask = mask.detach().cpu().numpy() != 0
    else:
        raise RequestError(
            "attention_mask is not of 2 dimensions", fix="a mask [rows, tokens] of ones, and zeros for padding"
        )
    if mask.shape != (B, C + T):
        raise RequestError(
            f"attention_mask is {list(mask.shape)}; {C} columns are held and {T} are new, for {B} rows",
            fix=f"a mask [{B}, {C + T}] over what is held and what is new, or cache.reset() before a new text",
        )
    if len(held) == B and not np.array_equal(mask[:, :C], held):
        raise RequestError(
            "attention_mask says otherwise than before which of the held columns are padding",
            fix="the same mask as before, and ones for new tokens; or cache.reset() before a new text",
        )
    if windows and between(mask):
        raise RequestError(
            "a row has padding between its tokens, which transformers counts in windows and kvframe does not",
            fix='padding before the text (tokenizer.padding_side = "left")',
        )
    return mask[:, C:]


def between(mask: np.ndarray) -> bool:
    """Has a row of `mask` bool [B, C] something False between two that are True?"""
    before, behind = np.logical_or.accumulate(mask, axis=1), np.logical_or.accumulate(mask[:, ::-1], axis=1)[:, ::-1]
    return bool((~mask & before & behind).any())
