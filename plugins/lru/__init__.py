"""LRU eviction: the run that was used longest ago goes first."""

from __future__ import annotations

import itertools

from kvframe.eviction import Ranked


class LRU(Ranked):
    """Ranks runs by a counter that every insert and every hit advances."""

    def __init__(self):
        super().__init__()
        self._clock = itertools.count()

    def on_insert(self, run):
        self.place(run, next(self._clock))

    on_hit = on_insert
