"""What every slot of a cache would hold, without tensors: proves on the control plane that a hit, a copy or a table
entry leads to the right tokens.

A slot's value is a number that stands for the whole prefix up to its token, the salt included. `run` does to these
numbers what a step does to keys and values.
"""

from __future__ import annotations

import numpy as np

NOTHING = -1
LONGEST = 1024
FACTORS = np.random.default_rng(0).integers(1, 1 << 62, LONGEST)  # one per position; sums wrap around


class Shadow:
    """One array of numbers per layer group, `[blocks, block_size]`."""

    def __init__(self, cache):
        self.cache = cache
        self.version = 0  # rises when weights change: what was stored before is worth nothing to new requests
        self.clear()

    def clear(self) -> None:
        size = self.cache.block_size
        self.slots = [np.full((pool.num_blocks + 1, size), NOTHING, np.int64) for pool in self.cache.pools]

    def values(self, request) -> np.ndarray:
        """int64 [n]: what the slots of a request's tokens must hold."""
        start = hash((request.salt, request.version))
        return np.cumsum((request.tokens + np.int64(1)) * FACTORS[: len(request.tokens)]) ^ start

    def run(self, plan, batch) -> None:
        """Copies and stores, as a step does; then what free blocks hold is lost."""
        for slots, copies in zip(self.slots, plan.copies):
            for source, destination, n in copies.tolist():
                slots[destination, :n] = slots[source, :n]
        for (request, n), start, stop in zip(batch, plan.query_starts, plan.query_starts[1:]):
            values = self.values(request)[request.computed : request.computed + n]
            for slots, group in zip(self.slots, plan.groups):
                slots.reshape(-1)[group.slots[start:stop]] = values

    def lose_free(self) -> None:
        """What nobody holds or keeps may be overwritten at any time."""
        for slots, pool in zip(self.slots, self.cache.pools):
            slots[pool.free_blocks()] = NOTHING

    def verify(self, request) -> None:
        """Every slot that a query of the request may still see holds the right token."""
        held = self.cache.tables[request.id]
        length = int(self.cache.tables.lengths[held.row])
        assert length == request.computed, f"{request.id} has {request.computed} tokens, the cache says {length}"
        wanted = self.values(request)[:length]
        for g, rule in enumerate(self.cache.rules):
            table = self.cache.tables.view(held, g)
            found = self.slots[g][table].reshape(-1)[:length]
            wrong = (found != wanted) & ~rule.dead(0, length, length)
            assert not wrong.any(), (
                f"{request.id}, group {g}: position {int(wrong.argmax())} of {length} is not what was computed for it"
            )
