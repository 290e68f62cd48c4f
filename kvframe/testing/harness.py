"""Run an engine under suspicion: poisoned storage, and `check()` after every step."""

from __future__ import annotations

from collections.abc import Iterable

from kvframe.engine import Engine
from kvframe.outputs import RequestOutput
from kvframe.types import Request


def poison_free(cache) -> None:
    """Fills every block that nobody holds, and the null block, with NaN (or -128); and what no request has in its row
    of the tails, but for rows that a waiting copy will read. Of a cache that is no BlockKVCache nothing is known."""
    import numpy as np

    if getattr(cache, "pools", None) is None or getattr(cache, "storage", None) is None:
        return
    for group, pool in enumerate(cache.pools):
        cache.storage.poison(group, np.append(pool.free_blocks(), 0))
    if any(cache.storage.tails()):
        lengths = dict.fromkeys(cache.tables.free_rows(), 0)
        lengths |= {held.row: int(cache.tables.lengths[held.row]) for held in cache.tables.all()}
        for row in cache.copies.rows.values():
            lengths.pop(row, None)
        cache.storage.poison_tails(lengths)


def run_checked(engine: Engine, requests: Iterable[Request]) -> list[RequestOutput]:
    """`engine.generate`, with the cache's invariants checked and free blocks poisoned after every step.

    Raises AssertionError when an invariant breaks, or something is held after the last request.
    """
    cache = engine.cache
    poison_free(cache)
    order = [engine.add(request) for request in requests]
    done = []
    while engine.has_work:
        done += [event.output for event in engine.step() if event.output is not None]
        cache.check()
        poison_free(cache)
    stats = cache.stats()
    assert stats.total("reserved") == stats.total("used") == 0, f"something is held after the last request: {stats}"
    return sorted(done, key=lambda output: (order.index(output.id), output.sample))
