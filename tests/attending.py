"""Caches with tensors, driven by hand: each step is held against what the rule of sealed and open groups says, computed
densely from the request's tokens alone."""

from __future__ import annotations

import numpy as np

from kvframe.config import build_cache, compose
from kvframe.interfaces import CacheContext
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing import parts
from kvframe.testing.attending import Attending
from kvframe.testing.walked import Walked
from kvframe.types import LayerSpec


def some_layers(windows=(None, 10), sources=(0,)) -> tuple[LayerSpec, ...]:
    """Layers with these windows, and layers that read the keys and values of an earlier one."""
    return parts.some_layers(windows, sources)


def with_storage(overrides, layers=None, **options):
    """A cache with tensors, on the reference kernel."""
    options = {"max_len": 96, "max_requests": 6, "max_step_tokens": 96, "kernels": (ReferenceKernel(),), **options}
    return build_cache(compose(overrides), CacheContext(layers or some_layers(), **options))


def walked(n: int, name="a", seed=0) -> Walked:
    return Walked(name, np.random.default_rng(seed).integers(0, 250, n).astype(np.int32))


class Steps:
    """Drives requests by hand, each step held against the rule."""

    def __init__(self, cache):
        self.cache, self.shadow = cache, Attending(cache)

    def admit(self, request: Walked) -> int:
        request.computed = self.cache.admit(request)
        return request.computed

    def run(self, *batch: tuple[Walked, int]) -> None:
        for request, n in batch:
            assert self.cache.grow(request, n)
        self.shadow.run(self.cache.plan(batch), batch)
        for request, n in batch:
            self.cache.commit(request, n)
            request.computed += n
        self.cache.check()
        for request, _ in batch:
            self.shadow.verify(request)

    def fork(self, parent: Walked, name: str, *ids: int) -> Walked:
        """A child that goes on with tokens of its own."""
        start = parent.tokens[: parent.computed]
        child = Walked(name, np.append(start, np.array(ids, np.int32)), computed=parent.computed)
        self.cache.fork(parent, child)
        return child
