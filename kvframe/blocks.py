"""BlockPool: who holds which block of one layer group.

A block is in exactly one of these states:

    null    block 0; never allocated, never freed
    free    on the free list
    live    refs > 0 (table entries and locks that name it)
    cached  refs == 0, but a prefix index holds it: evictable
"""

from __future__ import annotations

import numpy as np


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks (ids 1..num_blocks) plus the null block 0."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        self.refs = np.zeros(self.num_blocks + 1, dtype=np.int32)
        self.published = np.zeros(self.num_blocks + 1, dtype=bool)
        # a stack; the lowest ids are handed out first, which keeps small workloads in few pages
        self._free = np.arange(self.num_blocks, 0, -1, dtype=np.int32)
        self._top = self.num_blocks
        self.live = self.peak = self.holds = 0
        self.cached = 0

    @property
    def free(self) -> int:
        return self._top

    @property
    def shared(self) -> bool:
        """Does some block have more than one holder?"""
        return self.holds != self.live

    def alloc(self, n: int) -> np.ndarray:
        """Takes n free blocks, each with one reference. int32 [n]. The caller has checked `free`."""
        assert 0 <= n <= self._top, f"alloc({n}) with {self._top} free blocks"
        blocks = self._free[self._top - n : self._top][::-1].copy()
        self._top -= n
        self.refs[blocks] = 1
        self.holds += n
        self._wake(n)
        return blocks

    def hold(self, blocks: np.ndarray) -> None:
        """One more reference for each block (each id at most once); null entries are skipped."""
        blocks = blocks[blocks != 0]
        woken = self.refs[blocks] == 0
        assert bool(self.published[blocks[woken]].all()), "hold() of a block that is neither live nor cached"
        self.refs[blocks] += 1
        self.holds += len(blocks)
        n = int(woken.sum())
        self.cached -= n
        self._wake(n)

    def drop(self, blocks: np.ndarray) -> None:
        """One reference less for each block (each id at most once); the last one frees or caches it."""
        blocks = blocks[blocks != 0]
        assert bool((self.refs[blocks] > 0).all()), "drop() of a block that nobody holds"
        self.refs[blocks] -= 1
        self.holds -= len(blocks)
        gone = blocks[self.refs[blocks] == 0]
        self.live -= len(gone)
        keep = self.published[gone]
        self.cached += int(keep.sum())
        self._push(gone[~keep])

    def publish(self, blocks: np.ndarray) -> None:
        """The index holds these live blocks from now on."""
        assert bool((self.refs[blocks] > 0).all()), "publish() of a block that nobody holds"
        self.published[blocks] = True

    def unpublish(self, blocks: np.ndarray) -> None:
        """The index no longer holds these blocks; the unused ones become free."""
        blocks = blocks[self.published[blocks]]
        self.published[blocks] = False
        unused = blocks[self.refs[blocks] == 0]
        self.cached -= len(unused)
        self._push(unused)

    def _wake(self, n: int) -> None:
        self.live += n
        self.peak = max(self.peak, self.live)

    def _push(self, blocks: np.ndarray) -> None:
        self._free[self._top : self._top + len(blocks)] = blocks
        self._top += len(blocks)

    def unused(self, blocks: np.ndarray) -> np.ndarray:
        """bool: which of these published blocks nobody holds."""
        return self.refs[blocks] == 0

    def free_blocks(self) -> np.ndarray:
        """Ids on the free list (a copy)."""
        return self._free[: self._top].copy()

    def check(self, held: np.ndarray) -> None:
        """`held`: int array over block ids, the table entries and locks that really exist."""
        assert self.refs[0] == 0 and not self.published[0], "the null block is held or published"
        assert bool((self.refs == held).all()), (
            f"reference counts differ from the holders at blocks {np.flatnonzero(self.refs != held)[:8].tolist()}"
        )
        live, free = self.refs > 0, np.zeros(self.num_blocks + 1, dtype=bool)
        free[self._free[: self._top]] = True
        assert np.count_nonzero(free) == self._top, "a block is twice on the free list"
        assert not (free & live).any(), "a live block is on the free list"
        assert not (free & self.published).any(), "a cached block is on the free list"
        alive, cached = np.count_nonzero(live), np.count_nonzero(self.published & ~live)
        assert alive == self.live and cached == self.cached, "the counters of live or cached blocks are wrong"
        assert self.holds == int(self.refs.sum()), "the counter of references is wrong"
        assert self._top + alive + cached == self.num_blocks, (
            f"free {self._top} + live {alive} + cached {cached} != {self.num_blocks}"
        )
