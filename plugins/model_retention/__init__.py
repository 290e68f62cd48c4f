"""Retention `model`: what the model itself says, layer by layer.

A layer without a window sees every earlier position; a layer with window w sees the last w positions, the query's
own included, and what is older is dead. A layer with chunks sees its own chunk only (Llama 4); with chunks of 4:

    query 9 sees    8 9          keys 0..7 are dead
    query 7 sees    4 5 6 7      keys 0..3 are dead
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvframe.interfaces import Retention


@dataclass(frozen=True)
class ModelRetention(Retention):
    """`visible: k <= q and q - k < window and q // chunk == k // chunk`, without what is None.

    `window` and `chunk` are set per layer, from the probe.
    """

    window: int | None = None
    chunk: int | None = None
    limit_fix = "cache/retention=sliding_window cache.retention.positions=cache"

    @property
    def forgets(self):
        return self.window is not None or self.chunk is not None

    @property
    def kernel_mask(self):
        return self.chunk is None

    @property
    def name(self):
        return super().name if self.chunk is None else f"chunk{self.chunk}"

    def for_layer(self, layer):
        return replace(self, window=layer.window, chunk=layer.chunk)

    def visible(self, q_pos, k_pos):
        seen = k_pos <= q_pos
        if self.window is not None:
            seen = seen & (q_pos - k_pos < self.window)
        if self.chunk is not None:
            seen = seen & (q_pos // self.chunk == k_pos // self.chunk)
        return seen

    def dead(self, start, stop, num_computed):
        positions = np.arange(start, stop)
        gone = np.zeros(stop - start, dtype=bool)
        if self.window is not None:
            gone |= positions <= num_computed - self.window
        if self.chunk is not None:  # the next query is at num_computed
            gone |= positions < num_computed // self.chunk * self.chunk
        return gone
