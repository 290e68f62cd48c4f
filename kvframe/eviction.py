"""Ranked and Memory: what eviction policies are made of that can say in one number how soon a run goes.

Ranked is a heap of (rank, run); entries that were overtaken by a later rank stay in it until they come up. Memory is
what a policy still knows of runs that are gone.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from kvframe.interfaces import Eviction, Run


class Ranked(Eviction):
    """Keeps runs in order of a rank that their policy gives them; the lowest goes first.

    A policy calls `place(run, rank)` whenever a rank changes; ranks are any values that compare (numbers, tuples).
    """

    def __init__(self):
        self.ranks: dict[Run, Any] = {}
        self._heap: list[tuple[Any, int, Run]] = []
        self._serial = itertools.count()
        self._latest: dict[Run, int] = {}  # run -> serial of its entry that counts
        self._passed: list[tuple[Any, int, Run]] = []  # entries that `victims` has passed over
        self._given: list[tuple[Any, int, Run]] = []  # entries that `victims` has yielded

    def place(self, run: Run, rank: Any) -> None:
        """The run's rank from now on."""
        self.ranks[run], self._latest[run] = rank, next(self._serial)
        heapq.heappush(self._heap, (rank, self._latest[run], run))
        if len(self._heap) > 64 + 4 * len(self.ranks):
            self._rebuild()

    def on_split(self, run: Run, head: Run) -> None:
        self.place(head, self.ranks[run])

    def on_remove(self, run: Run) -> None:
        del self.ranks[run], self._latest[run]

    def victims(self, evictable: Callable[[Run], bool]) -> Iterator[Run]:
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                _, serial, run = entry
                if self._latest.get(run) != serial:
                    continue
                if evictable(run):
                    self._given.append(entry)
                    yield run
                    self._put_back(self._passed)  # one of them may be evictable now
                else:
                    self._passed.append(entry)
        finally:
            self._put_back(self._passed)
            self._put_back(self._given)

    def _put_back(self, entries: list) -> None:
        while entries:
            heapq.heappush(self._heap, entries.pop())

    def _rebuild(self) -> None:
        """Forgets the entries that were overtaken."""
        self._heap = [(rank, self._latest[run], run) for run, rank in self.ranks.items()]
        heapq.heapify(self._heap)
        self._passed, self._given = [], []


class Memory:
    """Histories of runs that are gone, by `run.key`; what was kept longest ago is forgotten first."""

    def __init__(self):
        self._histories: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def keep(self, key: Hashable, history: Any, most: float) -> None:
        """Remembers the history, and from now on at most so many."""
        self._histories[key] = history
        self._histories.move_to_end(key)
        while len(self._histories) > most:
            self._histories.popitem(last=False)

    def recall(self, key: Hashable, default: Any) -> Any:
        """The history of a run that comes back, which is then no longer remembered here."""
        return self._histories.pop(key, default)
