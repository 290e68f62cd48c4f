"""A seeded random walker over the control plane of a cache: every call, tiny pools, `check()` after each.

Used by tests for every composition; a failing walk prints its seed and its last calls.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from kvframe.interfaces import KVCache


@dataclass
class Walked:
    """A request as a cache sees it."""

    id: str
    tokens: np.ndarray
    salt: str = ""
    keep: object = None
    computed: int = 0


@dataclass
class Walker:
    """Calls a cache at random, as a scheduler could. `steps` counts the calls that were made."""

    cache: KVCache
    seed: int
    max_len: int = 96
    vocabulary: int = 2
    steps: int = 0
    running: list[Walked] = field(default_factory=list)
    names: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.log: list[str] = []

    def walk(self, steps: int) -> None:
        moves = [self.admit] * 4 + [self.grow] * 10 + [self.release, self.fork, self.truncate, self.peek]
        try:
            for _ in range(steps):
                self.random.choice(moves)()
                self.cache.check()
                self.steps += 1
                if self.random.random() < 0.001:
                    self.random.choice([self.reset, self.invalidate])()
                    self.cache.check()
            while self.running:
                self.release()
            self.cache.check()
            assert self.cache.stats().total("reserved") == 0, "something is held after the last release"
        except AssertionError as error:
            raise AssertionError(f"{error}\nseed {self.seed}, last calls:\n" + "\n".join(self.log[-12:])) from error

    def note(self, call: str, text: str) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        self.log.append(f"  {call}({text})")

    def pick(self) -> Walked | None:
        return self.random.choice(self.running) if self.running else None

    def admit(self):
        n = self.random.randint(1, min(self.max_len, self.cache.capacity()))
        self.names += 1
        tokens = np.array([self.random.randrange(self.vocabulary) for _ in range(n)], dtype=np.int32)
        # long common prefixes, cut anywhere, are what an index lives on
        if self.random.random() < 0.7:
            tokens[: self.random.randint(0, n)] = 0
        request = Walked(f"w{self.names}", tokens, salt=self.random.choice(["", "", "x"]))
        before = self.cache.stats()
        cached = self.cache.peek(request)[0]
        hit = self.cache.admit(request)
        self.note("admit", f"{request.id}, {n} tokens -> {hit}")
        if hit is None:
            assert self.cache.stats() == before, "a failed admit changed the cache"
            return
        assert 0 <= hit < n, f"admit answered {hit} of {n} tokens; one must be left to compute"
        assert hit in (cached, 0), f"peek said {cached}, admit {hit}"
        request.computed = hit
        self.running.append(request)

    def grow(self):
        request = self.pick()
        if request is None:
            return
        left = len(request.tokens) - request.computed
        if left == 0:
            if len(request.tokens) >= min(self.max_len, self.cache.capacity()):
                return self.release(request)
            request.tokens = np.append(request.tokens, np.int32(self.random.randrange(self.vocabulary)))
            left = 1
        n = self.random.randint(1, left)
        before = self.cache.stats()
        grown = self.cache.grow(request, n)
        self.note("grow", f"{request.id}, {n} -> {grown}")
        if not grown:
            assert self.cache.stats() == before, "a failed grow changed the cache"
            return self.release() if self.random.random() < 0.5 else None
        self.cache.check()
        fate = self.random.random()
        if fate < 0.05:  # aborted between grow and plan
            return self.release(request)
        plan = self.cache.plan([(request, n)])
        assert plan.positions.tolist() == list(range(request.computed, request.computed + n))
        if fate < 0.08:  # aborted between plan and commit
            return self.release(request)
        self.cache.commit(request, n)
        self.note("commit", f"{request.id}, {n}")
        request.computed += n

    def release(self, request: Walked | None = None):
        request = request or self.pick()
        if request is not None:
            self.note("release", request.id)
            self.running.remove(request)
            self.cache.release(request)

    def fork(self):
        parent = self.pick()
        if parent is None or len(self.running) >= self.cache.context.max_requests:
            return
        self.names += 1
        child = Walked(f"w{self.names}", parent.tokens.copy(), parent.salt, computed=parent.computed)
        self.note("fork", f"{parent.id}, {child.id}")
        self.cache.fork(parent, child)
        self.running.append(child)

    def truncate(self):
        request = self.pick()
        if request is None or request.computed == 0:
            return
        length = self.random.randint(0, request.computed)
        kept = self.cache.truncate(request, length)
        self.note("truncate", f"{request.id}, {length} -> {kept}")
        assert 0 <= kept <= length
        request.computed = kept
        tail = [self.random.randrange(self.vocabulary) for _ in range(self.random.randint(1, 4))]
        if length + len(tail) <= min(self.max_len, self.cache.capacity()):
            request.tokens = np.append(request.tokens[:length], np.array(tail, dtype=np.int32))

    def peek(self):
        request = self.pick()
        if request is not None:
            before = self.cache.stats()
            self.cache.peek(request)
            assert self.cache.stats() == before, "peek changed the cache"

    def reset(self):
        self.note("reset", "")
        self.cache.reset()
        self.running.clear()

    def invalidate(self):
        self.note("invalidate", "")
        self.cache.invalidate()
