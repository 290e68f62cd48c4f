"""Retention `model`: what the model itself says, layer by layer.

A layer without a window sees every earlier position; a layer with window w sees the last w positions, the query's
own included, and what is older is dead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvframe.interfaces import Retention


@dataclass(frozen=True)
class ModelRetention(Retention):
    """`visible: k <= q and q - k < window`. `window` is set per layer, from the probe."""

    window: int | None = None
    limit_fix = "cache/retention=sliding_window cache.retention.positions=cache"

    @property
    def forgets(self):
        return self.window is not None

    def for_layer(self, layer):
        return replace(self, window=layer.window)

    def visible(self, q_pos, k_pos):
        seen = k_pos <= q_pos
        return seen if self.window is None else seen & (q_pos - k_pos < self.window)

    def dead(self, start, stop, num_computed):
        positions = np.arange(start, stop)
        if self.window is None:
            return np.zeros(stop - start, dtype=bool)
        return positions <= num_computed - self.window
