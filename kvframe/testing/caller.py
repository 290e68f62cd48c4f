"""A seeded random walk over any cache: every call, as a scheduler could make it, with `check()` after each.

A failing walk shows its last calls.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvframe.errors import CapacityError
from kvframe.interfaces import KVCache
from kvframe.testing.contracts.promises import example, promise
from kvframe.testing.walked import Walked, Watcher
from kvframe.types import Keep


@dataclass
class Caller:
    """Calls any cache at random. `steps` counts the calls that were made and checked."""

    cache: KVCache
    seed: int = 0
    max_len: int = 96
    vocabulary: int = 2
    max_requests: int = 6
    watcher: Watcher = field(default_factory=Watcher)
    random: random.Random = None
    steps: int = 0
    running: list[Walked] = field(default_factory=list)
    names: int = 0
    calls: Counter = field(default_factory=Counter)
    hits: int = 0

    MOVES = ("admit",) * 4 + ("grow",) * 9 + ("release", "fork", "truncate", "peek", "preempt")
    RARE = ("reset", "invalidate")
    rarely = 0.001  # how often one of RARE is called
    crowds = False  # asks for more requests than may run, which no scheduler does

    def __post_init__(self):
        self.random = self.random or random.Random(self.seed)
        self.cache.now = lambda: float(self.steps)
        self.log: list[str] = []

    def walk(self, steps: int) -> None:
        """So many calls, then every request is released."""
        stop = self.steps + steps
        with example(seed=self.seed):
            while self.steps < stop:
                self.move(self.random.choice(self.RARE if self.random.random() < self.rarely else self.MOVES))
            self.finish()

    def move(self, name: str) -> None:
        """One call, checked. A call for which there is no request does not count."""
        with example(calls=self.log), promise("a cache serves every call that a scheduler may make"):
            if getattr(self, name)() is False:
                return
            self.check()
            self.steps += 1

    @promise("check() holds after every call")
    def check(self) -> None:
        self.cache.check()

    def finish(self) -> None:
        while self.running:
            self.move("release")
        with example(calls=self.log), promise("nothing is held after the last release"):
            stats = self.cache.stats()
            assert stats.total("reserved") == stats.total("used") == stats.total("tail") == 0, f"{stats}"

    def note(self, call: str, text: str = "") -> None:
        self.calls[call] += 1
        self.log.append(f"{call}({text})")
        if len(self.log) > 2000:
            del self.log[:1000]

    def pick(self) -> Walked | None:
        return self.random.choice(self.running) if self.running else None

    @property
    def longest(self) -> int:
        return min(self.max_len, self.cache.capacity())

    def books(self) -> object:
        """What a call that answers no must leave as it is."""
        return self.cache.stats()

    # -- calls -----------------------------------------------------------------------------------------------

    def admit(self, again: Walked | None = None):
        if again is None:
            n = self.random.randint(1, self.longest)
            self.names += 1
            tokens = np.array(self.random.choices(range(self.vocabulary), k=n), dtype=np.int32)
            # long common prefixes, cut anywhere, are what an index lives on
            if self.random.random() < 0.7:
                tokens[: self.random.randint(0, n)] = 0
            keep = Keep(self.random.randint(-1, 2), self.random.choice([0, 40])) if self.random.random() < 0.2 else None
            again = Walked(f"w{self.names}", tokens, salt=self.random.choice(["", "", "x"]), keep=keep)
        again.version = self.watcher.version
        if len(self.running) >= self.max_requests and not self.crowds:
            return False
        before = self.books()
        with promise("peek takes nothing and changes nothing"):
            cached, pending = self.cache.peek(again)
            assert self.books() == before, f"{before} became {self.books()}"
        with promise("admit answers None only when nothing changed"):
            hit = self.cache.admit(again)
            self.note("admit", f"{again.id}, {len(again.tokens)} tokens, salt {again.salt!r} -> {hit}")
            if hit is None:
                assert self.books() == before, f"{before} became {self.books()}"
                return
        with promise("admit leaves at least one token to compute"):
            assert 0 <= hit < len(again.tokens), f"it answered {hit} of {len(again.tokens)}"
        with promise("peek says how much admit will find, and what others are computing"):
            assert hit in (cached, 0), f"peek said {cached}, admit {hit}"
            assert pending >= 0 and cached + pending < len(again.tokens), f"{cached} cached, {pending} pending"
        again.computed = hit
        self.hits += hit
        self.running.append(again)

    def grow(self):
        if not self.running:
            return False
        batch = []
        for request in self.random.sample(self.running, min(len(self.running), self.random.choice([1, 1, 1, 2, 3]))):
            n = self._grown(request)
            if n:
                batch.append((request, n))
        fate = self.random.random()
        if fate < 0.05 or not batch:  # aborted between grow and plan
            return self.release(batch[0][0]) if batch else None
        self.watcher.before()
        plan = self.cache.plan(batch)
        self.note("plan", ", ".join(f"{request.id}: {request.computed} + {n}" for request, n in batch))
        positions = [p for request, n in batch for p in range(request.computed, request.computed + n)]
        with promise("plan gives each new token its absolute position"):
            assert plan.positions.tolist() == positions, f"{plan.positions.tolist()}, not {positions}"
        self.watcher.run(plan, batch)
        if fate < 0.08:  # aborted between plan and commit
            return self._fail(batch)
        for request, n in batch:
            self.cache.commit(request, n)
            self.note("commit", f"{request.id}, {n}")
            request.computed += n
        for request in {id(r): r for r in [*(r for r, _ in batch), self.pick()]}.values():
            self.watcher.verify(request)

    def _fail(self, batch) -> None:
        """A step that nobody commits: who took part is released."""
        for request, _ in batch:
            self.release(request)

    def _grown(self, request: Walked) -> int:
        """Tokens that the request has got room for; 0 when there was none, or it is at its end and was released."""
        left = len(request.tokens) - request.computed
        if left == 0:
            if len(request.tokens) >= self.longest:
                self.release(request)
                return 0
            request.tokens = np.append(request.tokens, np.int32(self.random.randrange(self.vocabulary)))
            left = 1
        n, before = self.random.randint(1, left), self.books()
        with promise("grow answers False only when nothing changed"):
            grown = self.cache.grow(request, n)
            self.note("grow", f"{request.id}, {n} -> {grown}")
            assert grown or self.books() == before, f"{before} became {self.books()}"
        return n if grown else 0

    def release(self, request: Walked | None = None):
        request = request or self.pick()
        if request is None:
            return False
        self.note("release", request.id)
        self.running.remove(request)
        self.cache.release(request)

    def preempt(self):
        """Released, and admitted again with all its tokens."""
        request = self.pick()
        if request is None:
            return False
        self.release(request)
        self.check()
        self.note("preempt", request.id)
        self.names += 1
        self.admit(Walked(f"w{self.names}", request.tokens, request.salt, request.keep))

    def fork(self):
        parent = self.pick()
        if parent is None or len(self.running) >= self.max_requests:
            return False
        self.names += 1
        child = Walked(
            f"w{self.names}", parent.tokens.copy(), parent.salt, computed=parent.computed, version=parent.version
        )
        before = self.books()
        with promise("fork raises CapacityError only when nothing changed"):
            try:
                self.cache.fork(parent, child)
            except CapacityError:
                self.note("fork", f"{parent.id}, {child.id} -> CapacityError")
                assert self.books() == before, f"{before} became {self.books()}"
                return
        self.note("fork", f"{parent.id}, {child.id}")
        self.running.append(child)

    def truncate(self):
        request = self.pick()
        if request is None or request.computed == 0:
            return False
        length = self.random.randint(0, request.computed)
        kept = self.cache.truncate(request, length)
        self.note("truncate", f"{request.id}, {length} -> {kept}")
        with promise("truncate answers the length that was kept, at most what was asked for"):
            assert 0 <= kept <= length, f"{kept} of {length}"
        request.computed = kept
        tail = self.random.choices(range(self.vocabulary), k=self.random.randint(1, 4))
        if length + len(tail) <= self.longest:
            request.tokens = np.append(request.tokens[:length], np.array(tail, dtype=np.int32))

    def peek(self):
        request = self.pick()
        if request is None:
            return False
        before = self.books()
        self.note("peek", request.id)
        with promise("peek takes nothing and changes nothing"):
            self.cache.peek(request)
            assert self.books() == before, f"{before} became {self.books()}"

    def reset(self):
        self.note("reset")
        self.cache.reset()
        self.watcher.clear()
        self.running.clear()

    def invalidate(self):
        self.note("invalidate")
        self.cache.invalidate()
        self.watcher.version += 1
