"""Which waiting sequence is tried next (`engine.policy`).

A policy orders; what fits, and who waits for a prefix that is being computed, is the scheduler's business. When the
chosen sequence does not fit, nobody else is admitted in that step, so a large one is not starved by small ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvframe.errors import ConfigError

PATIENCE = 32  # later arrivals that may go before a sequence under `prefix`


class Policy(ABC):
    """An order of the waiting sequences. Preempted ones stand at the front of the queue and go first."""

    @abstractmethod
    def choose(self, waiting: Sequence[Any], cached: Callable[[Any], int]) -> Any:
        """One of the waiting sequences (never empty; in the order of the queue, preempted ones first, then by
        arrival). `cached(sequence)` is the number of its leading tokens that are cached."""

    def started(self, sequence: Any, passed: Iterable[Any]) -> None:
        """The sequence runs; `passed` stood before it in the queue and could have been tried."""

    def refused(self, sequence: Any) -> None:
        """The sequence was chosen and does not fit now."""

    def forget(self, sequence: Any) -> None:
        """The sequence waits no longer and never ran."""


class FirstCome(Policy):
    """First come, first served."""

    def choose(self, waiting, cached):
        return waiting[0]


class LongestPrefix(Policy):
    """The one with the most cached tokens; ties by arrival.

    Nobody is overtaken more than `patience` times: who was, goes first whatever its match (of several, the one that
    arrived first). Who was chosen and did not fit stays next, or a large one would wait for ever behind small ones that
    match more.
    """

    def __init__(self, patience: int = PATIENCE):
        self.patience = patience
        self._overtaken: dict[Any, int] = {}
        self._next: Any = None

    def choose(self, waiting, cached):
        urgent = (s for s in waiting if s.preemptions or s is self._next or self._waited(s))
        return next(urgent, None) or max(waiting, key=cached)  # max answers the first of equals

    def _waited(self, sequence: Any) -> bool:
        return self._overtaken.get(sequence, 0) >= self.patience

    def started(self, sequence, passed):
        for other in passed:
            self._overtaken[other] = self._overtaken.get(other, 0) + 1
        self.forget(sequence)

    def refused(self, sequence):
        self._next = sequence

    def forget(self, sequence):
        self._overtaken.pop(sequence, None)
        if self._next is sequence:
            self._next = None


POLICIES = {"fcfs": FirstCome, "prefix": LongestPrefix}


def make_policy(name: str) -> Policy:
    """The policy of that name. ConfigError naming the valid ones."""
    if name not in list(POLICIES):
        raise ConfigError(f"engine.policy={name!r} does not exist", options=POLICIES, fix="engine.policy=fcfs")
    return POLICIES[name]()
