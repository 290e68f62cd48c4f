"""KVCacheContract: what kvframe.interfaces.KVCache promises, for a composition of parts or a cache of one's own."""

from __future__ import annotations

import functools

import numpy as np
import torch

from kvframe.interfaces import CacheContext, Kernel, KVCache
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.attending import Alone
from kvframe.testing.contracts.machine import walk_and_shrink
from kvframe.testing.contracts.promises import Contract, example, promise
from kvframe.testing.parts import some_layers
from kvframe.testing.walked import Walked, Watcher
from kvframe.testing.walker import Caller
from kvframe.types import Request, SamplingParams

TEXTS = (3, 1, 16, 17, 33, 40)  # tokens of the prompts that an engine gets; all begin alike
NEW = 4


@functools.cache
def model_of(arch: str):
    """A tiny model, wrapped; shared by all suites of a process, as engines may share one."""
    from kvframe.hf import wrap
    from kvframe.testing.models import tiny_model

    return wrap(tiny_model(arch))


class KVCacheContract(Contract):
    """Subclass it and define `make(self, context: CacheContext) -> KVCache`.

    Make the cache small: room for one request of `context.max_len` tokens and about a half, so that there are failures
    to see. Only the abstract interface is used; `pools` and `storage` of a BlockKVCache are poisoned and counted.

    Attributes:
        bound: None for a cache that is exact. Else the declared distance to the model: the mean of KL(REF || cache), in
            nats, over the positions of some texts and the tiny models `archs` (the larger one counts). It must hold, and
            be at most 4 times what is measured.
        archs: tiny models (kvframe.testing.ARCHS).
        layers: layers of the random walks, where there is no model.
        near: how far attention may be off, alone and in a batch.
        steps: calls of each long walk.
    """

    bound: float | None = None
    archs: tuple[str, ...] = ("gemma3",)
    layers = some_layers((None, 10), (0,))
    near = 1e-5
    steps = 60

    def make(self, context: CacheContext) -> KVCache:
        """A new cache."""
        return super().make(context)

    def kernels(self) -> tuple[Kernel, ...]:
        return (ReferenceKernel(),)

    def context(self, **options) -> CacheContext:
        usual = {"max_len": 96, "max_requests": 6, "max_step_tokens": 96, "kernels": self.kernels()}
        return CacheContext(**{"layers": self.layers, **usual, **options})

    # -- random walks ----------------------------------------------------------------------------------------

    def _walker(self, seed: int, context: CacheContext, cache, lone=None) -> Caller:
        watcher = Watcher() if lone is None else Alone(cache, context, lone, self.near)
        return Caller(cache, seed=seed, max_requests=context.max_requests, watcher=watcher)

    @promise("a cache serves every call that a scheduler may make, in any order, and computes attention")
    def test_short_walks(self):
        """Shrunk to the shortest calls that break a promise."""
        context = self.context()
        cache, lone = self.make(context), self.make(context)

        def walker(seed):
            cache.reset()
            return self._walker(seed, context, cache, lone)

        assert walk_and_shrink(walker, examples=10, calls=20) > 20, "hardly a call was possible"

    @promise("a cache serves every call that a scheduler may make, in any order, and computes attention")
    def test_long_walks(self):
        context = self.context()
        walker = self._walker(1, context, self.make(context), self.make(context))
        walker.rarely = 0.02
        walker.walk(self.steps)
        assert walker.watcher.outputs > 50, "the walk compared nothing"

    @promise("a context without kernels makes the control plane only, and it works")
    def test_control_plane(self):
        context = self.context(kernels=None)
        walker = self._walker(2, context, self.make(context))
        walker.rarely = 0.02
        walker.walk(4 * self.steps)

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

    @promise("stats counts what requests hold: used is within reserved, what is shared counts once, release gives all back")
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
        cache = self.make(self.context())
        storage = getattr(cache, "storage", None)
        if storage is None or not hasattr(storage, "nbytes"):
            return
        counted = sum((group.num_blocks + 1) * group.block_bytes for group in cache.stats().groups)  # and the null block
        assert storage.nbytes() == counted, f"the tensors have {storage.nbytes()} bytes, stats counts {counted}"

    # -- in an engine ------------------------------------------------------------------------------------------

    def _for_model(self, model, **options) -> CacheContext:
        return self.context(
            layers=model.layers, dtype=model.dtype, learned_sinks=model.learned_sinks, trained_len=model.max_len, **options
        )

    @promise("an exact cache gives the tokens of the model itself, cold and warm; any other declares its distance (`bound`)")
    def test_tokens_of_an_engine(self):
        from kvframe.engine import Engine
        from kvframe.testing.harness import run_checked
        from kvframe.testing.oracle import check_greedy

        for arch in self.archs:
            model = model_of(arch)
            context = self._for_model(model, max_requests=4, max_step_tokens=32)
            cache, total = self.make(context), 0
            if cache.exact:
                assert self.bound is None, f"exact is True, and bound={self.bound}"
            else:
                assert self.bound is not None, "exact is False, and the test class has no `bound`"
            engine = Engine(model, cache, max_len=context.max_len, max_requests=4, max_step_tokens=32, clock="virtual")
            sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
            for when in ("cold", "warm"):
                for output in run_checked(engine, [Request(prompt_tokens=t, sampling=sampling) for t in _texts()]):
                    with example(model=arch, prompt=f"{len(output.prompt_tokens)} tokens", when=when):
                        assert len(output.output_tokens) == NEW, f"{output.finish_reason}: {output.error}"
                        if cache.exact:
                            total += check_greedy(model.module, output.prompt_tokens, output.output_tokens)
            assert not cache.exact or total > NEW * len(TEXTS), "ties of the tiny model leave too little to compare"

    def _distance(self) -> float:
        """The largest mean of KL(REF || cache) over the archs, in nats."""
        from kvframe.testing.oracle import teacher_logits

        worst = 0.0
        for arch in self.archs:
            model = model_of(arch)
            context = self._for_model(model)
            cache, text = self.make(context), _texts()[-1] + _texts()[-2]
            model.bind(cache)
            request, logits = Walked("a", np.array(text, np.int32)), []
            assert cache.admit(request) == 0, "an empty cache found something"
            while request.computed < len(text):
                n = min(len(text) - request.computed, 25)
                while not cache.grow(request, n):
                    n //= 2
                    assert n, "an empty cache has no room"
                plan, at = cache.plan([(request, n)]), request.computed
                logits.append(model.forward(request.tokens[at : at + n], plan, np.arange(n)))
                cache.commit(request, n)
                request.computed += n
            ref, own = teacher_logits(model.module, text).log_softmax(-1), torch.cat(logits).log_softmax(-1)
            worst = max(worst, float((ref.exp() * (ref - own)).sum(-1).mean()))
        return worst

    @promise("a cache that is not exact is within its declared distance to the model, and declares at most 4 times of it")
    def test_distance_to_the_model(self):
        if self.bound is None:
            return
        measured = self._distance()
        with example(models=self.archs, bound=self.bound):
            assert measured <= self.bound, f"the mean KL is {measured:.4g} nats"
            assert self.bound <= 4 * measured, f"too wide: the mean KL is {measured:.4g} nats"


def _texts() -> list[list[int]]:
    """Prompts with a common beginning and ends of their own."""
    draws = np.random.default_rng(5)
    shared = draws.integers(3, 250, max(TEXTS)).tolist()
    return [shared[: n - n // 4] + draws.integers(3, 250, n // 4).tolist() for n in TEXTS]
