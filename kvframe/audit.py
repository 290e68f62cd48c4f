"""What a BlockKVCache holds: its byte counts, and the proof that its books are right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvframe.types import CacheStats, GroupStats

if TYPE_CHECKING:
    from kvframe.cache import BlockKVCache


def stats(cache: BlockKVCache) -> CacheStats:
    """Counters per layer group, from the pools and the tables."""
    groups = []
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
                used=int(used_slots(cache, g) * cache.token_bytes[g]),
                evictable=pool.cached * size,
                tail=0,
                peak=pool.peak * size,
            )
        )
    return CacheStats(tuple(groups), cache.hit_tokens, cache.evictions, cache.copies.count)


def used_slots(cache: BlockKVCache, g: int) -> int:
    """Slots of layer group g that hold a live token; a slot that several requests share counts once."""
    tables, rule, pool, size = cache.tables, cache.rules[g], cache.pools[g], cache.block_size
    if rule.kernel_mask and not pool.shared:
        lengths = tables.lengths
        if rule.window is None:
            return int(lengths.sum())
        return int((lengths - np.maximum(lengths - rule.window - rule.sinks + 1, 0)).sum())
    helds = list(tables.all())
    filled = np.zeros(pool.num_blocks + 1, dtype=np.int64)
    for held in helds:
        table, length = tables.view(held, g), int(tables.lengths[held.row])
        live = np.zeros(len(table) * size, dtype=bool)
        live[:length] = ~rule.dead(0, length, length)
        np.maximum.at(filled, table, live.reshape(-1, size).sum(axis=1))
    return int(filled[1:].sum())


def check(cache: BlockKVCache) -> None:
    """Raises AssertionError when references, tables, pools and the index do not explain each other."""
    tables, size = cache.tables, cache.block_size
    for g, (rule, pool) in enumerate(zip(cache.rules, cache.pools)):
        held = np.zeros(pool.num_blocks + 1, dtype=np.int64)
        for row in tables.all():
            table, length = tables.view(row, g), int(tables.lengths[row.row])
            blocks = table[table != 0]
            before = int(held.sum())
            np.add.at(held, blocks, 1)
            assert len(set(blocks.tolist())) == len(blocks) == int(held.sum()) - before, f"{row.id} holds a block twice"
            assert len(table) * size >= length, f"{row.id} has fewer blocks than tokens"
            assert not length % size or table[length // size], f"{row.id} would write its next token to the null block"
            if len(blocks) < len(table):
                hole = np.repeat(table == 0, size)[:length]
                assert not (hole & ~rule.dead(0, length, length)).any(), f"{row.id} lost a block that a query needs"
        for source in cache.copies.locked(g):
            held[source] += 1
        pool.check(held)
        published = np.sort(cache.index.published(g))
        assert np.array_equal(published, np.flatnonzero(pool.published)), "index and pool disagree on what is published"
