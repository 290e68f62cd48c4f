"""What a BlockKVCache holds: its byte counts, and the proof that its books are right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvframe.types import CacheStats, GroupStats

if TYPE_CHECKING:
    from kvframe.cache import BlockKVCache
    from kvframe.interfaces import Retention
    from kvframe.tables import Held


def stats(cache: BlockKVCache) -> CacheStats:
    """Counters per layer group, from the pools and the tables."""
    groups, running, lengths = [], len(list(cache.tables.all())), cache.tables.lengths
    for g, (rule, pool) in enumerate(zip(cache.rules, cache.pools)):
        size = cache.block_bytes[g]
        groups.append(
            GroupStats(
                name=rule.name,
                layers=sum(group == g for group in cache.group_of.values()),
                block_size=cache.block_size,
                num_blocks=pool.num_blocks,
                block_bytes=size,
                reserved=pool.live * size,
                used=int(sum(used_slots(cache, g, unit) * part for unit, part in cache.parts_of_token[g].items())),
                evictable=pool.cached * size,
                tail=cache.tail_bytes[g] * running,
                tail_used=sum(int((lengths % unit).sum()) * part for unit, part in cache.parts_of_tail[g].items()),
                peak=pool.peak * size,
                tail_pool=cache.tail_bytes[g] * cache.context.max_requests,
                evictions=cache.evicted[g],
            )
        )
    return CacheStats(tuple(groups), cache.hit_tokens, cache.evictions, cache.copies.count, *cache.peak)


def held(cache: BlockKVCache) -> tuple[int, int]:
    """Bytes that requests hold now, blocks and tails of all layer groups together, and what of it are tails."""
    tail = sum(cache.tail_bytes) * len(list(cache.tables.all()))
    return sum(pool.live * size for pool, size in zip(cache.pools, cache.block_bytes)) + tail, tail


def used_slots(cache: BlockKVCache, g: int, unit: int = 1) -> int:
    """Slots of layer group g that hold a live token; a slot that several requests share counts once. Under a codec that
    seals groups of `unit` tokens the slots of an open group hold nothing yet."""
    tables, rule, pool, size = cache.tables, cache.rules[g], cache.pools[g], cache.block_size
    if rule.kernel_mask and not pool.shared:
        lengths, stored = tables.lengths, tables.lengths // unit * unit
        if rule.window is None:
            return int(stored.sum())
        gone = np.minimum(stored, lengths - rule.window + 1) - rule.sinks  # positions sinks .. length - window
        return int((stored - np.maximum(gone, 0)).sum())
    filled = np.zeros(pool.num_blocks + 1, dtype=np.int64)
    for held in tables.all():
        table, length = tables.view(held, g), int(tables.lengths[held.row])
        there = np.flatnonzero(table)
        live = _live(rule, there * size, np.minimum(there * size + size, length // unit * unit), length)
        filled[table[there]] = np.maximum(filled[table[there]], live)
    return int(filled.sum())


def _live(rule: Retention, starts: np.ndarray, stops: np.ndarray, length: int) -> np.ndarray:
    """How many positions of each span [start, stop) a query at `length` or later may see; spans may be empty."""
    if not rule.kernel_mask:
        return np.array([np.count_nonzero(~rule.dead(a, b, length)) if a < b else 0 for a, b in zip(starts, stops)])
    low = 0 if rule.window is None else max(length - rule.window + 1, 0)
    window = np.maximum(stops - np.maximum(starts, low), 0)
    return window + np.maximum(np.minimum(stops, min(rule.sinks, low)) - starts, 0)


def check(cache: BlockKVCache) -> None:
    """Raises AssertionError when references, tables, pools and the index do not explain each other."""
    rows = [held.row for held in cache.tables.all()] + cache.tables.free_rows()
    assert sorted(rows) == list(range(cache.tables.num_rows)), "a row has two holders, or none and is not free"
    _check_tails(cache)
    _check_promises(cache)
    for g, pool in enumerate(cache.pools):
        held = np.zeros(pool.num_blocks + 1, dtype=np.int64)
        helds = list(cache.tables.all())
        if helds:
            held += _check_tables(cache, g, helds)
        for source in cache.copies.locked(g):
            held[source] += 1
        pool.check(held)
        published = np.sort(cache.index.published(g))
        assert np.array_equal(published, np.flatnonzero(pool.published)), "index and pool disagree on what is published"


def _check_tails(cache: BlockKVCache) -> None:
    """Copies of tails wait for running requests only, and there are none without a codec that seals."""
    waiting, running = cache.copies.rows, {held.row for held in cache.tables.all()}
    assert set(waiting) <= running, "a copy of a tail waits for a row that no request holds"
    assert set(waiting.values()) <= set(range(cache.tables.num_rows)), "a tail would be copied from a row that is none"
    assert cache.sealed or not waiting, "a copy of a tail waits, and nothing is sealed"


def _check_promises(cache: BlockKVCache) -> None:
    """Promises are those of running requests. All together they may be more than free and cached blocks: later
    admissions respect a promise, and requests that outgrow theirs do not (see docs/architecture.md)."""
    for g, pool in enumerate(cache.pools):
        promises = [held.promise[g] for held in cache.tables.all()]
        assert all(0 <= n <= pool.num_blocks for n in promises), "a promise that cannot be kept, or was kept twice"
        assert sum(promises) == cache.tables.promised(g), "somebody is promised blocks who is not running"


def _check_tables(cache: BlockKVCache, g: int, helds: list[Held]) -> np.ndarray:
    """How many requests name each block of layer group g: int64 [num_blocks + 1], 0 for the null block."""
    size, rule = cache.block_size, cache.rules[g]
    rows = np.array([held.row for held in helds])
    counts, lengths = np.array([held.blocks[g] for held in helds]), cache.tables.lengths[rows]
    tables = cache.tables.rows(g, rows, int(counts.max()) + 1)  # [R, B], 0 behind the end of a table

    def none(wrong: np.ndarray, what: str) -> None:
        assert not wrong.any(), f"{helds[int(wrong.argmax())].request.id} {what}"

    none(counts * size < lengths, "has fewer blocks than tokens")
    order = np.sort(tables, axis=1)
    none(((order[:, 1:] == order[:, :-1]) & (order[:, 1:] != 0)).any(axis=1), "holds a block twice")
    next_block = tables[np.arange(len(rows)), np.minimum(lengths // size, tables.shape[1] - 1)]
    none((lengths % size > 0) & (next_block == 0), "would write its next token to the null block")
    for r in np.flatnonzero(np.count_nonzero(tables, axis=1) < counts):
        length = int(lengths[r])
        hole = np.repeat(tables[r, : counts[r]] == 0, size)[:length]
        assert not (hole & ~rule.dead(0, length, length)).any(), (
            f"{helds[r].request.id} lost a block that a query needs"
        )
    named = np.bincount(tables.reshape(-1), minlength=cache.pools[g].num_blocks + 1)
    named[0] = 0
    return named
