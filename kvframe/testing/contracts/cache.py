"""KVCacheContract: what kvframe.interfaces.KVCache promises, for a composition of parts or a cache of one's own."""

from __future__ import annotations

import numpy as np
import pytest

from kvframe.errors import KVFrameError
from kvframe.interfaces import CacheContext, Kernel, KVCache
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.attending import Alone
from kvframe.testing.caller import Caller
from kvframe.testing.contracts.promises import example, promise
from kvframe.testing.contracts.tokens import CacheTokens
from kvframe.testing.contracts.walks import walks
from kvframe.testing.definition import qkv
from kvframe.testing.parts import some_layers
from kvframe.testing.shadow import values
from kvframe.testing.walked import Walked


class KVCacheContract(CacheTokens):
    """Subclass it and define `make(self, context: CacheContext) -> KVCache`.

    Make the cache small: room for one request of `context.max_len` tokens and about a half, so that there are failures
    to see. Only the abstract interface is used; `pools` and `storage` of a BlockKVCache are poisoned and counted.

    Attributes:
        bound: None for a cache that is exact. Else the declared distance to the model: the mean of KL(REF || cache), in
            nats, over the positions of a text, for the tiny model of `archs` that is furthest off. It must hold, and be
            at most 4 times what is measured.
        archs: tiny models (kvframe.testing.ARCHS).
        layers: layers of the random walks, where there is no model.
        near: how far attention may be off, alone and in a batch.
        steps: calls of the longest walk.
    """

    __test__ = False  # `make` below is there for its signature
    bound: float | None = None
    archs: tuple[str, ...] = ("gemma3",)
    layers = some_layers((None, 10), (0,))
    near = 1e-5
    steps = 30

    def make(self, context: CacheContext) -> KVCache:
        """A new cache."""
        return super().make(context)

    def kernels(self) -> tuple[Kernel, ...]:
        return (ReferenceKernel(),)

    def context(self, **options) -> CacheContext:
        usual = {"max_len": 96, "max_requests": 6, "max_step_tokens": 96, "kernels": self.kernels()}
        return CacheContext(**{"layers": self.layers, **usual, **options})

    # -- random walks ----------------------------------------------------------------------------------------

    @promise("a cache serves every call that a scheduler may make, in any order, and computes attention")
    def test_walks(self):
        context = self.context()

        def walker(longest):
            cache = self.make(context)
            watcher = Alone(cache, context, self.make(context), self.near)
            return Caller(cache, max_len=longest, max_requests=context.max_requests, watcher=watcher)

        found = walks(walker, 3, 15, self.steps)
        assert found.watcher.outputs > 20, "the walk compared nothing"

    @promise("a context without kernels makes the control plane only, and it works")
    def test_control_plane(self):
        context = self.context(kernels=None)
        walks(lambda n: Caller(self.make(context), max_len=n, max_requests=context.max_requests), 3, 30, 3 * self.steps)

    @promise("a context that it cannot serve is refused with reasons that name the override which fixes them")
    def test_refusal(self):
        odd = {
            "heads of 15 and 9": self.context(layers=some_layers((None,), dims=(15, 9))),
            "max_len 1": self.context(max_len=1, max_step_tokens=1),
            "float16": self.context(layers=some_layers((None,), dtype="float16"), dtype="float16"),
        }
        for name, context in odd.items():
            with example(context=name):
                try:
                    self.make(context)
                except KVFrameError as error:
                    reasons = getattr(error, "reasons", None) or [str(error)]
                    unfixed = [reason for reason in reasons if "=" not in reason]
                    assert not unfixed, f"no override in {unfixed[0]!r}"

    # -- single promises ---------------------------------------------------------------------------------------

    def _store(self, cache: KVCache, request: Walked, stop: int) -> None:
        """Computes the tokens of an admitted request up to `stop`, as a scheduler does that finds little room."""
        while request.computed < stop:
            n = stop - request.computed
            while not cache.grow(request, n):
                n //= 2
                with promise("grow has room for a request that is alone and no longer than the capacity"):
                    assert n, f"no room for token {request.computed} of {stop}; the capacity is {cache.capacity()}"
            cache.plan([(request, n)])
            cache.commit(request, n)
            cache.check()
            request.computed += n

    @promise("capacity is what the longest single request can reach")
    def test_capacity(self):
        context = self.context(kernels=None)
        cache = self.make(context)
        longest = cache.capacity()
        assert 1 <= longest <= context.max_len, f"it is {longest}, max_len is {context.max_len}"
        for round in range(2):
            request = Walked(f"r{round}", np.arange(longest, dtype=np.int32) + round)
            with example(capacity=longest):
                found = cache.admit(request)
                assert found == 0, f"an empty cache answered {found} to admit"
                self._store(cache, request, longest)
            cache.release(request)

    @promise("grow and plan may be asked again before commit: the same room, and the same addresses")
    def test_a_plan_may_be_thrown_away(self):
        cache, request = self.make(self.context(kernels=None)), Walked("r", np.arange(30, dtype=np.int32))
        request.computed = cache.admit(request)
        for n in (5, 1, 1, 8, 1):
            if request.computed + n > min(len(request.tokens), cache.capacity()):
                break
            assert cache.grow(request, n)
            held, first = cache.stats(), cache.plan([(request, n)])
            with example(tokens=request.computed, n=n):
                assert cache.grow(request, n) and cache.stats() == held, "it took more room the second time"
                again = cache.plan([(request, n)])
                pairs = [(first.positions, again.positions)]
                for a, b in zip(first.groups, again.groups):
                    pairs += [(a.slots, b.slots), (a.tables, b.tables), (a.context_lens, b.context_lens)]
                assert all(np.array_equal(a, b) for a, b in pairs), "another plan the second time"
            cache.commit(request, n)
            request.computed += n
            cache.check()

    @promise("a full cache refuses, and goes on when somebody leaves")
    def test_full(self):
        context = self.context(kernels=None)
        cache, running, refused = self.make(context), [], 0
        for i in range(context.max_requests):
            request, before = Walked(f"r{i}", np.arange(30, dtype=np.int32) + 100 * i), cache.stats()
            with promise("admit answers None only when nothing changed"), example(running=len(running)):
                found = cache.admit(request)
                assert found is not None or cache.stats() == before, f"{before} became {cache.stats()}"
            refused += found is None
            running += [request] if found is not None else []
        for n in (40, 20, 7, 1, 1):
            for request in running:
                if request.computed + n > min(context.max_len, cache.capacity()):
                    continue
                more = max(request.computed + n - len(request.tokens), 0)
                request.tokens = np.append(request.tokens, np.full(more, 7, np.int32))
                before = cache.stats()
                shown = example(requests=len(running), request=f"{request.computed} tokens", n=n)
                with promise("grow answers False only when nothing changed"), shown:
                    grown = cache.grow(request, n)
                    assert grown or cache.stats() == before, f"{before} became {cache.stats()}"
                refused += not grown
                if grown:
                    cache.plan([(request, n)])
                    cache.commit(request, n)
                    request.computed += n
                cache.check()
        assert refused, "it refused nothing; make() a smaller cache, or nobody knows what it does when it is full"
        while len(running) > 1:
            cache.release(running.pop())
            cache.check()
        self._store(cache, running[0], len(running[0].tokens))

    @promise("what one request stored is found by no request with another salt")
    def test_salts(self):
        cache = self.make(self.context(kernels=None))
        first = Walked("first", np.arange(40, dtype=np.int32), "one")
        cache.admit(first)
        self._store(cache, first, 40)
        for when in ("while the first one runs", "after its release"):
            for salt in ("", "two"):
                other = Walked(f"{salt} {when}", first.tokens, salt)
                with example(salts=f"'one' and {salt!r}", when=when):
                    assert cache.peek(other) == (0, 0), f"peek answers {cache.peek(other)}"
                    found = cache.admit(other)
                    assert not found, f"admit found {found} tokens"
                    if found is not None:
                        cache.release(other)
            if when == "while the first one runs":
                cache.release(first)

    @promise("after invalidate nothing that was stored before is found again")
    def test_invalidate(self):
        for when in ("the request is done", "the request still runs"):
            cache = self.make(self.context(kernels=None))
            request = Walked("a", np.arange(40, dtype=np.int32))
            cache.admit(request)
            self._store(cache, request, 40)
            if when == "the request is done":
                cache.release(request)
            cache.invalidate()
            cache.check()
            if when == "the request still runs":
                cache.release(request)
            with example(when=when):
                found = cache.admit(Walked("b", request.tokens))
                assert found == 0, f"admit found {found} tokens"

    @promise("reset forgets every request and everything that was stored")
    def test_reset(self):
        cache = self.make(self.context(kernels=None))
        request = Walked("a", np.arange(30, dtype=np.int32))
        for _ in range(2):
            request.computed = cache.admit(request)
            assert request.computed == 0, f"admit found {request.computed} tokens"
            self._store(cache, request, 30)
            cache.reset()
            cache.check()
            stats = cache.stats()
            left = {name: stats.total(name) for name in ("reserved", "used", "evictable", "tail")}
            assert not any(left.values()), f"bytes after it: {left}"

    @promise(
        "stats counts what requests hold: used is within reserved, what is shared counts once, release gives all back"
    )
    def test_stats(self):
        cache = self.make(self.context(kernels=None))
        request = Walked("a", np.arange(30, dtype=np.int32))
        cache.admit(request)
        self._store(cache, request, 24)
        alone = cache.stats()
        for group in alone.groups:
            with example(group=group.name):
                assert 0 < group.used + group.tail and group.used <= group.reserved, f"{group}"
                assert group.reserved <= group.peak, f"{group}"
        child = Walked("b", request.tokens.copy(), computed=24)
        cache.fork(request, child)
        both, one = cache.stats().total("used"), alone.total("used")
        assert one <= both <= 2 * one, f"{one} bytes, {both} with a fork"
        cache.release(request)
        cache.check()
        cache.release(child)
        left = {name: cache.stats().total(name) for name in ("reserved", "used", "tail")}
        assert not any(left.values()), f"bytes after the release: {left}"

    @promise("the bytes that stats counts are those of the tensors")
    def test_bytes_are_those_of_the_tensors(self):
        context = self.context()
        cache = self.make(context)
        pool = _nbytes(cache)
        if pool:  # made at the beginning; a null block may be among them
            groups = cache.stats().groups
            tails = sum(group.tail_pool for group in groups)
            counted = [sum((g.num_blocks + n) * g.block_bytes for g in groups) + tails for n in (0, 1)]
            assert pool in counted, f"the tensors have {pool} bytes, stats counts {counted[0]}"
            return
        request = Walked("a", np.arange(20, dtype=np.int32))
        with promise("grow has room for a request that is alone and no longer than the capacity"):
            assert cache.admit(request) == 0 and cache.grow(request, 20)
        plan = cache.plan([(request, 20)])
        for layer in context.layers:
            cache.attend(layer.index, *qkv(layer, values(request)), plan)
        cache.commit(request, 20)
        if not _nbytes(cache):
            pytest.skip("tensors() shows none")
        used = cache.stats().total("used")
        assert _nbytes(cache) == used, f"the tensors have {_nbytes(cache)} bytes, stats says that {used} are used"


def _nbytes(cache: KVCache) -> int:
    """Bytes of the tensors of a cache, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in cache.tensors()}.values())
