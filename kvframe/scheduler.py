"""Scheduler: which requests compute how many tokens in the next step.

Order of a step, under a budget of `max_step_tokens`:

    1. decode: every running sequence with one token to compute gets it;
    2. prefill: running sequences with more to compute get a chunk;
    3. admission: waiting sequences in the order of the policy (see policies.py), while they fit.

When a sequence cannot grow, the youngest running one that has no part in this step loses its cache and waits at
the front of the queue (preemption by recompute).

A waiting sequence whose next tokens a running one is computing right now (`pending` of `KVCache.peek`) is not
admitted: it waits, others may go ahead, and it finds those tokens cached later, so that a shared prefix is computed
once. That is no worse for it: whom it waits for was there first and is served before it in every step. So those who
go ahead meanwhile do not count as overtaking it. The wait ends by itself, with the computing or with the one who
computes (abort, preemption, failure), and nobody waits when nothing runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from kvframe.errors import CapacityError
from kvframe.interfaces import KVCache
from kvframe.policies import FirstCome, Policy
from kvframe.sequence import Sequence

PATIENCE = 8
LOOK = 64  # waiting sequences, from the front of the queue, that a step considers at once


class Scheduler:
    """Holds the waiting and running sequences; the only caller of admit, grow, truncate and release while they live."""

    def __init__(
        self, cache: KVCache, max_requests: int, max_step_tokens: int, prefill_chunk: int, policy: Policy | None = None
    ):
        self.cache, self.max_requests, self.policy = cache, max_requests, policy or FirstCome()
        self.max_step_tokens, self.prefill_chunk = max_step_tokens, prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stuck: list[Sequence] = []  # sequences that an empty cache could not serve; the engine refuses them
        self.preemptions = 0
        self._blocked = 0  # steps that may go by until who found no room is asked again, if nobody leaves

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind those that arrive no later."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].arrival > sequence.arrival:
            at -= 1
        self.waiting.insert(at, sequence)
        self._blocked = 0

    def next_arrival(self) -> float | None:
        return self.waiting[0].arrival if self.waiting else None

    def may_admit(self, now: float) -> bool:
        """Should the next step ask whether somebody who waits can run? Not just after the cache had no room."""
        self._blocked = max(self._blocked - 1, 0)
        arrival = self.next_arrival()
        return arrival is not None and arrival <= now and not self._blocked

    def schedule(self, now: float) -> list[tuple[Sequence, int]]:
        """`(sequence, n)` pairs: room for n more tokens of each has been made."""
        self.batch: dict[Sequence, int] = {}
        self.budget = self.max_step_tokens
        decoding = [s for s in self.running if s.n - s.computed == 1]
        prefilling = [s for s in self.running if s.n - s.computed > 1]
        for sequence in decoding:
            if sequence in self.running and self.budget:
                self._grow(sequence, 1, preempt=True)
        for sequence in prefilling:
            if sequence in self.running and self.budget:
                self._grow(sequence, sequence.n - sequence.computed, preempt=not self.batch)
        self._admit(now)
        return list(self.batch.items())

    def _grow(self, sequence: Sequence, n: int, preempt: bool) -> bool:
        """Gives the sequence up to n tokens of this step: fewer when the budget or the room is short."""
        n = min(n, self.budget, self.prefill_chunk)
        while True:
            size = n
            while size and not self.cache.grow(sequence, size):
                size //= 2
            if size:
                self.batch[sequence] = size
                self.budget -= size
                return True
            victim = self._victim(sequence) if preempt else None
            if victim is None:
                if preempt and len(self.running) == 1:
                    self.running.remove(sequence)
                    self.cache.release(sequence)
                    self.stuck.append(sequence)
                return False
            self._preempt(victim)
            if victim is sequence:
                return False

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The youngest running sequence without a part in this step; the only one left is never its own victim."""
        candidates = [s for s in self.running if s not in self.batch]
        youngest = candidates[-1]
        return None if youngest is sequence and len(self.running) == 1 else youngest

    def recompute(self, sequences: Iterable[Sequence]) -> None:
        """What is stored for these is not to be trusted (a step failed half way, or weights changed): those that still
        live start again from their tokens, in the order in which they are given."""
        for sequence in reversed(list(sequences)):
            if sequence in self.running:
                self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _admit(self, now: float) -> None:
        seen: dict[Sequence, tuple[int, int]] = {}  # cached, pending: what the cache said in this step

        def look(sequence: Sequence) -> tuple[int, int]:
            cached, pending = self.cache.peek(sequence)
            seen[sequence] = cached, pending if self.running else 0
            return seen[sequence]

        def cached(sequence: Sequence) -> int:
            return (seen.get(sequence) or look(sequence))[0]

        while self.waiting and self.budget and len(self.running) < self.max_requests:
            near = [s for s in islice(self.waiting, LOOK) if s.arrival <= now and not (s in seen and seen[s][1])]
            if not near:
                return
            sequence = self.policy.choose(near, cached)
            if (sequence in seen and seen[sequence][1]) or look(sequence)[1]:  # whom this step admitted may compute it
                continue
            if self._start(sequence):
                self.policy.started(sequence, near[: near.index(sequence)])
            elif self.running:
                self.policy.refused(sequence)
                self._blocked = PATIENCE
                return
            else:  # an empty cache will not become emptier
                self._leave(sequence)
                self.stuck.append(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Lets a waiting sequence run in this step. False: it does not fit now, and nothing changed."""
        hit = self.cache.admit(sequence)
        if hit is None:
            return False
        sequence.computed = hit
        if not sequence.outputs and not sequence.preemptions:  # later it may find what it computed itself
            sequence.cached = hit
        self.running.append(sequence)
        if self._grow(sequence, sequence.n - hit, preempt=False):
            self.waiting.remove(sequence)
            return True
        self.running.pop()
        self.cache.release(sequence)
        sequence.computed = 0
        return False

    def _leave(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.policy.forget(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done or aborted, wherever it is."""
        if sequence in self.running:
            self._blocked = 0
            self.running.remove(sequence)
            self.cache.release(sequence)
        elif sequence in self.waiting:
            self._leave(sequence)

    def truncate(self, sequence: Sequence, length: int) -> int:
        """Takes back the tokens of a living sequence from `length` (>= 1) on, wherever it is. Answers for how many of
        the others the cache holds keys and values; the rest, at least the last one, is computed in the next steps."""
        sequence.truncate(length)
        self._blocked = 0
        if sequence.computed >= length:
            sequence.computed = self.cache.truncate(sequence, length - 1)
        return sequence.computed

    def fork(self, parent: Sequence, children: Iterable[Sequence]) -> list[Sequence]:
        """Children start from what the parent has computed; those for which there is no place wait and
        compute the prompt themselves. Answers the ones that run."""
        started = []
        for child in children:
            if len(self.running) < self.max_requests and self._forked(parent, child):
                child.computed, child.cached = parent.computed, parent.cached
                self.running.append(child)
                started.append(child)
            else:
                self.add(child)
        return started

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """The child's tokens begin with all of the parent's. It starts from what a running parent has computed, unless
        the cache has or will have more; else it waits like any other."""
        if parent in self.running and parent.computed >= sum(self.cache.peek(child)):
            if self.fork(parent, [child]):
                child.cached = child.computed
        else:
            self.add(child)

    def _forked(self, parent: Sequence, child: Sequence) -> bool:
        try:
            self.cache.fork(parent, child)
        except CapacityError:
            return False
        return True
