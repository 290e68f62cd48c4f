"""Scheduler: which requests compute how many tokens in the next step.

Order of a step, under a budget of `max_step_tokens`:

    1. decode: every running sequence with one token to compute gets it;
    2. prefill: running sequences with more to compute get a chunk;
    3. admission: waiting sequences, first come first served, while they fit.

When a sequence cannot grow, the youngest running one that has no part in this step loses its cache and waits at
the front of the queue (preemption by recompute).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvframe.errors import CapacityError
from kvframe.interfaces import KVCache
from kvframe.sequence import Sequence


class Scheduler:
    """Holds the waiting and running sequences; the only caller of admit, grow and release while they live."""

    def __init__(self, cache: KVCache, max_requests: int, max_step_tokens: int, prefill_chunk: int):
        self.cache, self.max_requests = cache, max_requests
        self.max_step_tokens, self.prefill_chunk = max_step_tokens, prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stuck: list[Sequence] = []  # sequences that an empty cache could not serve; the engine refuses them
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind those that arrive no later."""
        at = len(self.waiting)
        while at and self.waiting[at - 1].arrival > sequence.arrival:
            at -= 1
        self.waiting.insert(at, sequence)

    def next_arrival(self) -> float | None:
        return self.waiting[0].arrival if self.waiting else None

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
        """A step failed half way: what took part in it and still lives starts again from its tokens."""
        for sequence in sequences:
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
        while self.waiting and self.budget and len(self.running) < self.max_requests:
            sequence = self.waiting[0]
            if sequence.arrival > now:
                return
            hit = self.cache.admit(sequence)
            if hit is None:
                if not self.running:  # an empty cache will not become emptier
                    self.stuck.append(self.waiting.popleft())
                    continue
                return
            self.waiting.popleft()
            sequence.computed = hit
            if sequence.outputs == 0:
                sequence.cached = hit
            self.running.append(sequence)
            if not self._grow(sequence, sequence.n - hit, preempt=False):
                if len(self.running) == 1:
                    self.running.pop()
                    self.cache.release(sequence)
                    self.stuck.append(sequence)
                    continue
                self.running.pop()
                self.cache.release(sequence)
                self.waiting.appendleft(sequence)
                return

    def finish(self, sequence: Sequence) -> None:
        """The sequence is done or aborted, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.cache.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

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

    def _forked(self, parent: Sequence, child: Sequence) -> bool:
        try:
            self.cache.fork(parent, child)
        except CapacityError:
            return False
        return True
