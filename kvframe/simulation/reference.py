"""mode=reference: requests one after another, inputs only, one hash id is one token in a block of its own.

What other simulators of prefix caches compute too, so their figures can be held against ours: no request waits, none
runs beside another, and a partial last block counts as one that can be hit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig

from kvframe.interfaces import CacheContext, KVCache
from kvframe.simulation.building import Peaks, build, by_id, layers, limits
from kvframe.simulation.trace import Trace, hit_tokens
from kvframe.types import Keep

KEEP = Keep()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the cache sees of a request: its ids, and one token that nobody else has and that is never computed.

    A cache always leaves a token to compute; with this one, an input that is cached whole is a hit of all its ids.
    """

    id: str
    tokens: np.ndarray  # int32 [ids + 1]
    salt: str = ""
    keep: Keep = KEEP


def window_in_ids(window: int | None, tokens_per_id: int) -> int | None:
    """The window, in ids, of a layer whose window is in tokens: the id of the query and those that hold some of the
    `window - 1` tokens before it.

    With 4 tokens per id, window 6, and a query at the first token of the id q:

        [....][.xxx][xx  q  ]      ids that are seen: ceil(5 / 4) = 2 before q's own, so 3
    """
    return None if window is None else -(-(window - 1) // tokens_per_id) + 1


def cache_for(cfg: DictConfig, trace: Trace, capacity: int | None, windows: list[int | None]) -> KVCache:
    """The configured cache, one id a block; `capacity` None: more blocks than the trace can fill."""
    context = CacheContext(
        layers([window_in_ids(window, trace.tokens_per_id) for window in windows]),
        max_len=trace.most_ids + 1,
        max_requests=1,
        max_step_tokens=max(1, limits(cfg, trace)["max_step_tokens"] // trace.tokens_per_id),
    )
    unbounded = capacity is None
    return build(by_id(cfg), context, trace.ids + 1 if unbounded else capacity, every_group=unbounded)


def replay(cfg: DictConfig, trace: Trace, cache: KVCache, advance: Callable[[int], None]) -> dict:
    """Sends the trace through an empty cache. `advance(n)` is told of every n requests that are done."""
    peaks, time, refused, ids, tokens = Peaks(cache), 0.0, 0, 0, 0
    cache.now = lambda: time
    limit = cache.capacity()
    chunk = cache.context.max_step_tokens if any(rule.forgets for rule in cache.rules) else trace.most_ids
    for number, request in enumerate(trace.requests):
        time, n = request.arrival, len(request.ids)
        prompt = Prompt(str(number), np.append(request.ids, np.int32(-1 - number)))
        hit = cache.admit(prompt) if n <= limit else None
        if hit is not None and _compute(cache, prompt, hit, n, chunk, peaks):
            ids += hit
            tokens += hit_tokens(request, hit, trace.tokens_per_id)
        else:
            refused += 1
        if hit is not None:
            cache.release(prompt)
        advance(1)
    cache.check()
    stats = cache.stats()
    assert stats.total("reserved") == 0, "blocks are held after the last request"
    return {
        "block_size": trace.tokens_per_id,
        "hit_rate_blocks": ids / trace.ids,
        "hit_rate_tokens": tokens / trace.input_tokens,
        "hit_blocks": ids,
        "input_blocks": trace.ids,
        "hit_tokens": tokens,
        "evictions": stats.evictions,
        **peaks.row(stats),
        "preemptions": 0,
        "refused": refused,
    }


def _compute(cache: KVCache, prompt: Prompt, done: int, n: int, chunk: int, peaks: Peaks) -> bool:
    """Takes blocks for the ids from `done` to n and publishes them. False: there is no room, although nobody else
    runs."""
    while done < n:
        size = min(chunk, n - done)
        while not cache.grow(prompt, size):
            size //= 2
            if not size:
                return False
        peaks.look()
        cache.commit(prompt, size)
        done += size
    return True
