"""Sieve: a hand goes from the oldest run to the newest; what was used since it last came by stays, the rest goes.

    oldest  A   B*  C   D*  E  newest      * was used
            ^ hand at A: A goes; B loses its mark and stays where it is; C goes; D loses its mark; E is next

A hit only sets a mark, so one long scan of new prompts sweeps through without taking away what is used. Source: Zhang
et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI 2024. A prefix index
asks about runs, neighbouring blocks of one prefix with one history; of runs inserted together the last one goes first.
"""

import bisect
import itertools

from kvframe.interfaces import Eviction

BEFORE = (-1, 0, 0)  # a place before all others


class Sieve(Eviction):
    """Places are `(time of the insert, -start of the run, serial)`, kept in order; the hand is a place as well."""

    def __init__(self):
        self._serial = itertools.count()
        self._places: list[tuple] = []  # ascending
        self._runs: dict[tuple, object] = {}  # place -> run
        self._place: dict[object, tuple] = {}  # run -> place
        self._used: set = set()
        self._hand = BEFORE

    def on_insert(self, run):
        if run not in self._place:
            now = next(self._serial)
            self._put(run, (now, -run.start, now))

    def on_hit(self, run):
        if run in self._place:
            self._used.add(run)

    def on_split(self, run, head):
        """Both have the history of the run: its time, and its mark."""
        time = self._place[run][0]
        used = run in self._used
        self.on_remove(run)
        for part in (run, head):
            self._put(part, (time, -part.start, next(self._serial)))
            if used:
                self._used.add(part)

    def on_remove(self, run):
        place = self._place.pop(run, None)
        if place is not None:
            del self._runs[place], self._places[bisect.bisect_left(self._places, place)]
            self._used.discard(run)

    def victims(self, evictable):
        """Offers each run once. Two turns of the hand without a victim: there is none (the first passes the marks).

        The hand has moved, and marks are gone, only when a run really went: who only asks changes nothing.
        """
        hand, passed, offered, idle = self._hand, set(), set(), 0
        while self._places and idle <= 2 * len(self._places):
            i = bisect.bisect_right(self._places, hand)
            hand = self._places[i if i < len(self._places) else 0]
            run = self._runs[hand]
            idle += 1
            if run in offered or not evictable(run):
                continue
            if run in self._used and run not in passed:
                passed.add(run)
                continue
            idle = 0
            offered.add(run)
            yield run
            if run not in self._place:
                self._hand = hand
                self._used -= passed

    def _put(self, run, place: tuple) -> None:
        self._place[run], self._runs[place] = place, run
        bisect.insort(self._places, place)
