"""The next decode step, prepared while this one runs on the device.

Which tokens a step puts in is known when the step before it has ended; where they go is known earlier: every running
request gets one more, unless it ends. So when a step has been started, and before its tokens are waited for, room is
made for those that go on and their plan is made. If just these are scheduled next, the plan is there; if anybody ended,
came, or was taken back, it is thrown away and made as always. That costs nothing but the time that was spare: to grow
twice is to grow once (`KVCache.grow`), and a plan changes nothing (`KVCache.plan`).
"""

from __future__ import annotations

from collections.abc import Sequence as Some
from typing import Any

from kvframe.interfaces import KVCache
from kvframe.sequence import Sequence
from kvframe.types import StepPlan


class Ahead:
    """At most one plan, for the very next step.

    Args:
        cache: of the engine. prepare: told a plan that was made; what else can be done before tokens are known.
    Attributes:
        used, wasted: plans that were taken, and that were thrown away.
    """

    def __init__(self, cache: KVCache, prepare=lambda plan: None):
        self.cache, self._prepare = cache, prepare
        self.used = self.wasted = 0
        self._next: tuple[list[tuple[Sequence, int]], StepPlan] | None = None

    def look(self, running: Some[Sequence], most: int) -> None:
        """Plans a step in which each running sequence that does not end with the token it waits for gets one more.

        running: in the order of the scheduler; most: tokens of a step.
        """
        self.drop()
        going = [s for s in running if s.n + 1 < s.limit]
        if not going or len(going) > most or any(s.computed != s.n for s in running):
            return  # or somebody still has a prompt to compute
        if all(self.cache.grow(s, 1) for s in going):
            plan = self.cache.plan([(s, 1) for s in going])
            self._next = [(s, s.n) for s in going], plan
            self._prepare(plan)

    def take(self, batch: Some[tuple[Sequence, int]]) -> StepPlan | None:
        """The plan of this step, if it is the one that was foreseen."""
        found, self._next = self._next, None
        if found is None:
            return None
        foreseen, plan = found
        now: list[Any] = [(s, s.computed) if n == 1 else None for s, n in batch]
        fits = len(now) == len(foreseen) and all(
            a is not None and a[0] is b[0] and a[1] == b[1] for a, b in zip(now, foreseen)
        )
        self.used += fits
        self.wasted += not fits
        return plan if fits else None

    def drop(self) -> None:
        """What was foreseen will not happen."""
        self.wasted += self._next is not None
        self._next = None
