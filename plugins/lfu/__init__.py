"""LFU eviction: the run that was used least often goes first, of equals the one that was used longest ago.

Source: "perfect" LFU in Breslau et al., "Web Caching and Zipf-like Distributions", INFOCOM 1999: uses are counted over
all time, so a run that comes back after its eviction goes on where it stopped. An insert is a use.

    rank = (uses, time of the last use)
"""

from __future__ import annotations

import itertools

from kvframe.errors import ConfigError
from kvframe.eviction import Memory, Ranked


class LFU(Ranked):
    """Ranks runs by their uses, and remembers those of `memory` evicted runs for each one that is cached."""

    def __init__(self, memory: float = 64.0):
        super().__init__()
        if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory >= 0:
            raise ConfigError(
                f"cache.eviction.memory={memory!r} cannot be used",
                options=["a number >= 0 (0 forgets what is evicted)", ".inf (forgets nothing)"],
                fix="cache.eviction.memory=64",
            )
        self.memory, self._gone, self._clock = memory, Memory(), itertools.count()

    def on_insert(self, run):
        uses = self.ranks[run][0] if run in self.ranks else self._gone.recall(run.key, 0) + 1
        self.place(run, (uses, next(self._clock)))

    def on_hit(self, run):
        self.place(run, (self.ranks[run][0] + 1, next(self._clock)))

    def on_remove(self, run):
        uses, _ = self.ranks[run]
        super().on_remove(run)
        self._gone.keep(run.key, uses, self.memory * (1 + len(self.ranks)))
