"""A seeded random walker over the control plane of a cache: every call, tiny pools, `check()` after each.

Used by tests for every composition; a failing walk prints its seed and its last calls. The random numbers may come from
Hypothesis, which can make them simpler.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from shadow import Shadow

from kvframe.interfaces import KVCache
from kvframe.types import Keep


@dataclass(eq=False)
class Walked:
    """A request as a cache sees it."""

    id: str
    tokens: np.ndarray
    salt: str = ""
    keep: object = None
    computed: int = 0
    version: int = 0


@dataclass
class Walker:
    """Calls a cache at random, as a scheduler could. `steps` counts the calls that were made and checked."""

    cache: KVCache
    seed: int = 0
    max_len: int = 96
    vocabulary: int = 2
    random: random.Random = None
    steps: int = 0
    running: list[Walked] = field(default_factory=list)
    names: int = 0
    calls: Counter = field(default_factory=Counter)

    MOVES = ("admit",) * 4 + ("grow",) * 9 + ("release", "fork", "truncate", "peek", "preempt", "evict")
    RARE = ("reset", "invalidate")

    def __post_init__(self):
        self.random = self.random or random.Random(self.seed)
        self.shadow = Shadow(self.cache)
        self.cache.now = lambda: float(self.steps)
        self.log: list[str] = []

    def walk(self, steps: int) -> None:
        """So many calls, then every request is released."""
        stop = self.steps + steps
        while self.steps < stop:
            self.move(self.random.choice(self.RARE if self.random.random() < 0.001 else self.MOVES))
        self.finish()

    def move(self, name: str) -> None:
        """One call, checked. A call for which there is no request does not count."""
        try:
            if getattr(self, name)() is not False:
                self.cache.check()
                self.steps += 1
        except AssertionError as error:
            raise AssertionError(f"{error}\nseed {self.seed}, last calls:\n" + "\n".join(self.log[-12:])) from error

    def finish(self) -> None:
        while self.running:
            self.move("release")
        assert self.cache.stats().total("reserved") == 0, "something is held after the last release"

    def note(self, call: str, text: str = "") -> None:
        self.calls[call] += 1
        self.log = [*self.log[-12:], f"  {call}({text})"]

    def pick(self) -> Walked | None:
        return self.random.choice(self.running) if self.running else None

    def books(self) -> tuple:
        """What a call that answers no must leave as it is."""
        cache = self.cache
        pools = [(p.free, p.live, p.cached, p.holds, p.refs.tobytes(), p.published.tobytes()) for p in cache.pools]
        return pools, cache.hit_tokens, cache.evictions

    # -- calls -----------------------------------------------------------------------------------------------

    def admit(self, again: Walked | None = None):
        longest = min(self.max_len, self.cache.capacity())
        if again is None:
            n = self.random.randint(1, longest)
            self.names += 1
            tokens = np.array(self.random.choices(range(self.vocabulary), k=n), dtype=np.int32)
            # long common prefixes, cut anywhere, are what an index lives on
            if self.random.random() < 0.7:
                tokens[: self.random.randint(0, n)] = 0
            keep = Keep(self.random.randint(-1, 2), self.random.choice([0, 40])) if self.random.random() < 0.2 else None
            again = Walked(f"w{self.names}", tokens, salt=self.random.choice(["", "", "x"]), keep=keep)
        again.version = self.shadow.version
        before, (cached, pending) = self.books(), self.cache.peek(again)
        hit = self.cache.admit(again)
        self.note("admit", f"{again.id}, {len(again.tokens)} tokens -> {hit}")
        if hit is None:
            assert self.books() == before, "a failed admit changed the cache"
            return
        assert 0 <= hit < len(again.tokens), f"admit answered {hit} of {len(again.tokens)}; one must be left to compute"
        assert hit in (cached, 0), f"peek said {cached}, admit {hit}"
        assert pending >= 0 and cached + pending < len(again.tokens)
        again.computed = hit
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
        self.shadow.lose_free_rows()
        plan = self.cache.plan(batch)
        self.shadow.lose_free()
        self.shadow.run(plan, batch)
        positions = [p for request, n in batch for p in range(request.computed, request.computed + n)]
        assert plan.positions.tolist() == positions
        if fate < 0.08:  # aborted between plan and commit
            return self._fail(batch)
        for request, n in batch:
            self.cache.commit(request, n)
            self.note("commit", f"{request.id}, {n}")
            request.computed += n
        for request in {id(r): r for r in [*(r for r, _ in batch), self.pick()]}.values():
            self.shadow.verify(request)

    def _fail(self, batch) -> None:
        """A step that nobody commits. Who took part may try again, unless the step may have sealed something."""
        for request, _ in batch if self.cache.unit > 1 else batch[:1]:
            self.release(request)

    def _grown(self, request: Walked) -> int:
        """Tokens that the request has got room for; 0 when there was none, or it is at its end and was released."""
        left = len(request.tokens) - request.computed
        if left == 0:
            if len(request.tokens) >= min(self.max_len, self.cache.capacity()):
                self.release(request)
                return 0
            request.tokens = np.append(request.tokens, np.int32(self.random.randrange(self.vocabulary)))
            left = 1
        n, before = self.random.randint(1, left), self.books()
        grown = self.cache.grow(request, n)
        self.note("grow", f"{request.id}, {n} -> {grown}")
        if not grown:
            assert self.books() == before, "a failed grow changed the cache"
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
        self.cache.check()
        self.note("preempt", request.id)
        self.names += 1
        self.admit(Walked(f"w{self.names}", request.tokens, request.salt, request.keep))

    def fork(self):
        parent = self.pick()
        if parent is None or len(self.running) >= self.cache.context.max_requests:
            return False
        self.names += 1
        child = Walked(
            f"w{self.names}", parent.tokens.copy(), parent.salt, computed=parent.computed, version=parent.version
        )
        self.note("fork", f"{parent.id}, {child.id}")
        self.cache.fork(parent, child)
        self.running.append(child)

    def truncate(self):
        request = self.pick()
        if request is None or request.computed == 0:
            return False
        length = self.random.randint(0, request.computed)
        kept = self.cache.truncate(request, length)
        self.note("truncate", f"{request.id}, {length} -> {kept}")
        assert 0 <= kept <= length
        request.computed = kept
        tail = self.random.choices(range(self.vocabulary), k=self.random.randint(1, 4))
        if length + len(tail) <= min(self.max_len, self.cache.capacity()):
            request.tokens = np.append(request.tokens[:length], np.array(tail, dtype=np.int32))

    def peek(self):
        request = self.pick()
        if request is None:
            return False
        before = self.books()
        self.note("peek", request.id)
        self.cache.peek(request)
        assert self.books() == before, "peek changed the cache"

    def evict(self):
        """Somebody needs some of the blocks that are only cached."""
        if not any(pool.cached for pool in self.cache.pools):
            return False
        need = [pool.free + self.random.randint(0, pool.cached) for pool in self.cache.pools]
        self.note("evict", f"{need}")
        self.cache._make_free(need)

    def reset(self):
        self.note("reset")
        self.cache.reset()
        self.shadow.clear()
        self.running.clear()

    def invalidate(self):
        self.note("invalidate")
        self.cache.invalidate()
        self.shadow.version += 1
