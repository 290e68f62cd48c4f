"""Block tables per layer or per head instead of per layer group: the same bytes, more bookkeeping.

All layers of a model with one rule hold the same positions, so one table serves them all (a layer group). Here the same
cache is run with one group, with one per layer, and with as many as there are KV heads in all layers; only the control
plane is timed (admit, grow, plan, commit of a decode step).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from claim import Claim, interleaved, median, seconds, verdict

from kvframe import compose
from kvframe.config import build_cache
from kvframe.evaluation.teacher import Text
from kvframe.interfaces import CacheContext
from kvframe.types import LayerSpec

REQUESTS, LENGTH, LAYERS, HEADS = 32, 512, 30, 3


def layers(groups: int, heads: int) -> tuple[LayerSpec, ...]:
    """Layers of `heads` KV heads under windows longer than any request: `groups` different ones, each of which makes a
    layer group, or one that thirty layers have in common."""
    spec = LayerSpec(0, q_heads=3 * heads, kv_heads=heads, k_dim=64, v_dim=64, scale=0.125, dtype="bfloat16")
    if groups == 1:
        return tuple(replace(spec, index=i, window=100_000) for i in range(LAYERS))
    return tuple(replace(spec, index=i, window=100_000 + i) for i in range(groups))


def build(groups: int, heads: int):
    context = CacheContext(layers(groups, heads), "bfloat16", max_len=1024, max_requests=REQUESTS)
    cache = build_cache(compose(["cache=paged", f"cache.num_blocks={REQUESTS * 64}"]), context)
    texts = [Text(np.arange(LENGTH + 400, dtype=np.int32), salt="") for _ in range(REQUESTS)]
    for text in texts:
        assert cache.admit(text) == 0 and cache.grow(text, LENGTH)
        cache.plan([(text, LENGTH)])
        cache.commit(text, LENGTH)
    return cache, texts


def step(cache, texts) -> None:
    for text in texts:
        assert cache.grow(text, 1)
    cache.plan([(text, 1) for text in texts])
    for text in texts:
        cache.commit(text, 1)


def main() -> None:
    claim = Claim("Block tables per layer or per head save nothing while all keep the same tokens", rounds=30)
    kinds = {"one group": (1, HEADS), "per layer": (LAYERS, HEADS), "per head": (LAYERS * HEADS, 1)}
    caches = {name: build(*kind) for name, kind in kinds.items()}
    times = interleaved({n: lambda c=c: seconds(lambda: step(*c)) for n, c in caches.items()}, claim.options.rounds)
    held = {name: cache.stats().total("reserved") for name, (cache, _) in caches.items()}
    cost = {name: 1e3 * median(found) for name, found in times.items()}
    for name in ("per layer", "per head"):
        same = verdict(held[name] == held["one group"])
        claim.row(f"{name}: bytes held", "the same", f"{held[name] / held['one group']:.3f}x", same)
        slower = cost[name] / cost["one group"]
        measured = f"{cost[name]:.2f} ms, {slower:.1f}x of one group"
        claim.row(f"{name}: planning of a step of {REQUESTS}", "more", measured, verdict(slower > 1))
    axes = claim.axes("", f"ms to plan a decode step of {REQUESTS} requests")
    axes.bar(list(cost), list(cost.values()), color="C1", label="median, control plane only")
    axes.legend()
    claim.finish("A table per head pays where heads drop different tokens (a selector by score); here none does.")


if __name__ == "__main__":
    main()
