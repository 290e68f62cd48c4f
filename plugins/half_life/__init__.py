"""Half-life eviction: uses count, and fade; how fast they do is measured.

A run is worth its uses, halved for every half-life since the last one. That is LRU when the half-life is short and LFU
when it is long, as in LRFU (Lee et al., "LRFU: A Spectrum of Policies that Subsumes the Least Recently Used and Least
Frequently Used Policies", IEEE Transactions on Computers 50(12), 2001). Here nobody has to choose a place in between:
the half-life is `patience` times the mean interval between two uses of the same tokens, whatever the size of the cache.
Evicted runs are remembered for a while, or a small cache would only see the short intervals.

    worth = uses * 2 ** (-(now - last use) / half_life)
    rank = now + half_life * log2(worth) = last use + half_life * log2(uses)
"""

from __future__ import annotations

import math

from kvframe.errors import ConfigError
from kvframe.eviction import Memory, Ranked


class HalfLife(Ranked):
    """Ranks runs by uses that fade. Time is counted in uses of runs."""

    def __init__(self, patience: float = 2.0, memory: float = 32.0):
        super().__init__()
        for name, value, usual in (("patience", patience, 2), ("memory", memory, 32)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"cache.eviction.{name}={value!r} cannot be used",
                    options=["a number >= 0"],
                    fix=f"cache.eviction.{name}={usual}",
                )
        self.patience, self.memory = patience, memory
        self._history: dict = {}  # run -> (uses, time of the last one)
        self._gone = Memory()  # (uses, time of the last one, tokens)
        self._now, self._interval, self._reused = 0, 0.0, 0

    def on_insert(self, run):
        if run in self._history:
            self._place(run, self._history[run][0])
            return
        uses, last, tokens = self._gone.recall(run.key, (0, 0, 0))
        seen = min(1.0, tokens / (run.stop - run.start))  # what comes back may have new tokens behind it
        self._use(run, uses * seen, last)

    def on_hit(self, run):
        self._use(run, *self._history[run])

    def on_split(self, run, head):
        super().on_split(run, head)
        self._history[head] = self._history[run]

    def on_remove(self, run):
        super().on_remove(run)
        uses, last = self._history.pop(run)
        most = self.memory * (1 + len(self._history))
        self._gone.keep(run.key, (uses, last, run.stop - run.start), most)

    def _use(self, run, uses: float, last: int) -> None:
        """The run, used so often before, is used again."""
        self._now += 1
        if uses:
            tokens = run.stop - run.start
            self._reused += tokens
            self._interval += (self._now - last - self._interval) * tokens / self._reused
        self._place(run, uses + 1)

    def _place(self, run, uses: float) -> None:
        self._history[run] = uses, self._now
        self.place(run, self._now + self.patience * self._interval * math.log2(uses))
