"""kvframe attends: the real tokens of a batch lie side by side, as in a step of the engine.

    columns   a b c        flat   a b c d e f        padding holds nothing and asks nothing; its outputs are zeros
              . d e
              . . f

Shape legend: B rows, T columns of the forward, N real tokens among them, H heads, D size of a vector.
"""

from __future__ import annotations

import numpy as np
import torch

from kvframe.errors import RequestError
from kvframe.interfaces import KVCache
from kvframe.types import StepPlan


class Packed:
    """One forward of a batch.

    Args:
        real: bool [B, T]; False is padding. plan: of its tokens; None: there are none. layers: number of attention
            layers.
    Attributes:
        plan: see above; a new one is a new forward. left: layers that have not attended yet.
    """

    def __init__(self, cache: KVCache, real: np.ndarray, plan: StepPlan | None, layers: int, device: str):
        self.cache, self.shape, self.plan = cache, real.shape, plan
        self.left = set(range(layers))
        self.index = None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(device)  # [N]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`query [B, Hq, T, Dk]`, `key [B, Hkv, T, Dk]`, `value [B, Hkv, T, Dv]` -> `[B, T, Hq, Dv]`."""
        B, T = self.shape
        if (query.shape[0], query.shape[2], key.shape[2]) != (B, T, T):
            raise RequestError(
                f"attention layer {layer} gets {query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} "
                f"keys; the model was given {B} rows of {T} tokens",
                fix="tokens that a wrapper adds (prefix tuning) cannot be cached here",
            )
        self.left.discard(layer)
        if self.plan is None:
            return value.new_zeros(B, T, query.shape[1], value.shape[3])
        out = self.cache.attend(layer, self._flat(query), self._flat(key), self._flat(value), self.plan)  # [N, Hq, Dv]
        if self.index is None:
            return out.view(B, T, *out.shape[1:])
        spread = out.new_zeros(B * T, *out.shape[1:])
        spread[self.index] = out
        return spread.view(B, T, *out.shape[1:])

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, H, T, D]` -> `[N, H, D]`."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.index is None else flat[self.index]
