"""What every slot of a cache would hold, without tensors: proves on the control plane that a hit, a copy or a table
entry leads to the right tokens.

A slot's value is a number that stands for the whole prefix up to its token, the salt included. `run` does to these
numbers what a step does to keys and values. Under a codec that seals groups of tokens there are tails, and a slot gets
its number when its group is full.
"""

from __future__ import annotations

import zlib

import numpy as np

from kvframe.testing.contracts.promises import promise
from kvframe.testing.walked import Watcher

NOTHING = -1
LONGEST = 1024
FACTORS = np.random.default_rng(0).integers(1, 1 << 62, LONGEST)  # one per position; sums wrap around


def values(request) -> np.ndarray:
    """int64 [n]: a number for each token of a request that stands for all tokens up to it, the salt and the weights."""
    start = np.int64(zlib.crc32(f"{request.version} {request.salt}".encode()) << 20)
    return np.cumsum((request.tokens + np.int64(1)) * FACTORS[: len(request.tokens)]) ^ start


class Shadow(Watcher):
    """One array of numbers per layer group and sealing group, `[blocks, block_size]`, and one per sealing group for
    the tails, `[rows, group]`."""

    def __init__(self, cache):
        self.cache = cache
        self.clear()

    def clear(self) -> None:
        size, units = self.cache.block_size, [sorted(parts) for parts in self.cache.parts_of_token]
        self.slots = {
            (g, unit): np.full((pool.num_blocks + 1, size), NOTHING, np.int64)
            for g, pool in enumerate(self.cache.pools)
            for unit in units[g]
        }
        rows = self.cache.context.max_requests
        self.tails = {unit: np.full((rows, unit), NOTHING, np.int64) for unit in {u for _, u in self.slots}}

    def before(self) -> None:
        self.lose_free_rows()

    def run(self, plan, batch) -> None:
        """What free blocks hold is lost; then copies and stores, as a step does."""
        self.lose_free()
        for (g, unit), slots in self.slots.items():
            for source, destination, n in plan.copies[g].tolist():
                slots[destination, : n // unit * unit] = slots[source, : n // unit * unit]
        for tail in self.tails.values():
            tail[plan.tails[:, 1]] = tail[plan.tails[:, 0]]
        size, starts = self.cache.block_size, plan.query_starts
        for r, (request, n) in enumerate(batch):
            numbers, row = values(request), plan.rows[r]
            positions = np.arange(request.computed, request.computed + n)
            for group in plan.groups:
                slots = group.tables[r][positions // size].astype(np.int64) * size + positions % size
                assert np.array_equal(group.slots[starts[r] : starts[r + 1]], slots), "slots are not those of the table"
            for unit, tail in self.tails.items():
                first = request.computed // unit * unit
                raw = np.append(tail[row, : request.computed - first], numbers[positions])
                sealed = len(raw) // unit * unit
                for g, group in enumerate(plan.groups):
                    if (g, unit) in self.slots:
                        self._write(self.slots[g, unit], group.tables[r], first, raw[:sealed])
                tail[row, : len(raw) - sealed] = raw[sealed:]

    def _write(self, slots: np.ndarray, table: np.ndarray, start: int, values: np.ndarray) -> None:
        positions = np.arange(start, start + len(values))
        blocks = table[positions // self.cache.block_size]
        assert blocks.all(), "a token was written to the null block"
        slots[blocks, positions % self.cache.block_size] = values

    def lose_free(self) -> None:
        """What nobody holds or keeps may be overwritten at any time."""
        for (g, _), slots in self.slots.items():
            slots[self.cache.pools[g].free_blocks()] = NOTHING

    def lose_free_rows(self) -> None:
        """The same for tails; rows that a waiting copy will read are left alone."""
        rows = sorted(set(self.cache.tables.free_rows()) - set(self.cache.copies.rows.values()))
        for tail in self.tails.values():
            tail[rows] = NOTHING

    @promise("a slot that a query may still see holds what was computed for its token, whoever computed it")
    def verify(self, request) -> None:
        """Every slot that a query of the request may still see holds the right token, and so does the tail."""
        held = self.cache.tables[request.id]
        length = int(self.cache.tables.lengths[held.row])
        assert length == request.computed, f"{request.id} has {request.computed} tokens, the cache says {length}"
        wanted = values(request)[:length]
        for (g, unit), slots in self.slots.items():
            table = self.cache.tables.view(held, g)
            sealed = length // unit * unit
            found = slots[table].reshape(-1)[:sealed]
            wrong = (found != wanted[:sealed]) & ~self.cache.rules[g].dead(0, length, length)[:sealed]
            assert not wrong.any(), (
                f"{request.id}, group {g}: position {int(wrong.argmax())} of {length} is not what was computed for it"
            )
        if held.row not in self.cache.copies.rows:  # its copy waits
            for unit, tail in self.tails.items():
                at = length // unit * unit
                assert np.array_equal(tail[held.row, : length - at], wanted[at:]), (
                    f"{request.id}: its open group of {unit} does not hold the tokens from {at} to {length}"
                )
