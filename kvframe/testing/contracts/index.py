"""IndexContract: what kvframe.interfaces.PrefixIndex promises, under a cache whose every call is drawn at random."""

from __future__ import annotations

import functools

import numpy as np

from kvframe.interfaces import Eviction
from kvframe.testing.contracts.part import PartContract, cache_of
from kvframe.testing.contracts.promises import example, promise
from kvframe.testing.contracts.walks import walks
from kvframe.testing.contracts.watched import Watched
from kvframe.testing.parts import Band, Blocks, Oldest, some_layers
from kvframe.testing.walked import Walked
from kvframe.testing.walker import Walker


class IndexContract(PartContract):
    """Subclass it and define `make(self) -> PrefixIndex`.

    Attributes:
        shapes: pairs of a block size, and the windows of the layers.
        steps: calls of a cache in each of the longer walks.
    """

    kind = "index"
    shapes = ((4, (None,)), (4, (None, 10)), (1, (7,)), (16, (None, 10, 30)))
    steps = 300

    def eviction(self) -> Eviction:
        """What orders the blocks that nobody uses; overwrite it to try the index with another policy."""
        return Oldest()

    def walker(self, size: int, windows, longest: int) -> Walker:
        """Over a cache that has room for one request of the longest and a half."""
        parts = {"layout": Blocks(size), "index": Watched(self.make()), "eviction": self.eviction()}
        return Walker(cache_of(some_layers(windows), {"max_len": longest}, **parts), max_len=longest)

    @promise("an index serves a cache: every call, in any order")
    def test_walks(self):
        for size, windows in self.shapes:
            with example(block_size=size, windows=windows):
                steps = self.steps if self.make().keeps else 50
                walker = walks(functools.partial(self.walker, size, windows), 6, 40, steps, ("evict",) * 2)
                if walker.cache.index.keeps:
                    with promise("an index that keeps something is of use: tokens that were seen are found again"):
                        assert walker.hits and walker.calls["evict"], f"{walker.hits} tokens of {walker.calls}"

    def _attached(self, *rules: Band) -> Watched:
        index = Watched(self.make())
        index.attach(4, list(rules) or [Band()], self.eviction(), lambda: 0.0)
        return index

    def _insert(self, index: Watched, tokens: list[int], first: int, salt: str = "") -> None:
        n = len(tokens) // index.size
        tables = [np.arange(first, first + n, dtype=np.int32) for _ in index.rules]
        index.insert(Walked("a", np.array(tokens, np.int32), salt), tables, n * index.size)

    @promise("requests with different salts share nothing")
    def test_salts(self):
        index = self._attached()
        for i, salt in enumerate(("", "a", "b")):
            self._insert(index, [1, 2, 3, 4, 5, 6, 7, 8], 1 + 2 * i, salt)
        for salt in ("", "a", "b", "c"):
            index.match(Walked("b", np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32), salt), 8)

    @promise("clear forgets everything, and the index can be used again")
    def test_clear(self):
        index = self._attached(Band(), Band(5))
        self._insert(index, [1, 2, 3, 4, 5, 6, 7, 8], 1)
        index.clear()
        asked = Walked("b", np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32))
        found = index.match(asked, 8)
        assert found.n_tokens == 0, f"it finds {found.n_tokens} tokens"
        self._insert(index, [1, 2, 3, 4, 5, 6, 7, 8], 1)
        assert not index.keeps or index.match(asked, 8).n_tokens == 8, "it finds nothing any more"
        index.evict([2, 2], [lambda ids: np.ones(len(ids), dtype=bool)] * 2)

    @promise("whatever nobody uses can be evicted, wherever it lies in a prefix")
    def test_evict_to_the_last(self):
        for used in ((), (2,), (1, 4), (1, 2, 3)):
            index = self._attached()
            self._insert(index, list(range(12)), 1)
            self._insert(index, [0, 1, 2, 3, 9, 9, 9, 9], 11)
            unused = lambda ids, used=used: ~np.isin(ids, used)
            with example(in_use=used):
                while free := int(unused(index.published(0)).sum()):
                    index.evict([min(2, free)], [unused])
