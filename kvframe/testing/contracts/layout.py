"""LayoutContract: what kvframe.interfaces.Layout promises."""

from __future__ import annotations

from kvframe.interfaces import Codec
from kvframe.testing.contracts.part import PartContract, cache_of
from kvframe.testing.contracts.promises import example, promise
from kvframe.testing.parts import Verbatim, some_layers
from kvframe.testing.trie import TrieIndex
from kvframe.testing.walker import Walker

LENGTHS = (1, 2, 15, 16, 17, 96, 2048, 131_072)
UNITS = (1, 2, 4, 12, 32)


class Sealed(Verbatim):
    """Seals groups of 4 tokens, and stores them as they are."""

    group, plain, exact = 4, False, False


class LayoutContract(PartContract):
    """Subclass it and define `make(self) -> Layout`.

    Attributes:
        chosen: True when the block size is what a user asked for, so that it need not hold whole units of a codec.
    """

    kind = "layout"
    chosen = False

    @promise("block_size is an integer of at least 1")
    def test_block_size_is_a_size(self):
        for length in LENGTHS:
            for unit in UNITS:
                with example(max_len=length, unit=unit):
                    size = self.make().block_size(length, unit)
                    assert type(size) is int and size >= 1, f"it answered {size!r}"

    @promise("block_size is always the same for the same max_len and unit: tables, pools and index are built on it")
    def test_block_size_does_not_change(self):
        layout, seen = self.make(), {}
        for _ in range(2):
            for length in LENGTHS:
                for unit in UNITS:
                    with example(max_len=length, unit=unit):
                        size = layout.block_size(length, unit)
                        assert size == seen.setdefault((length, unit), size), f"{size}, before {seen[length, unit]}"
                        assert size == self.make().block_size(length, unit), "another one of the same kind differs"
        for length in LENGTHS:
            with example(max_len=length):
                assert layout.block_size(length) == seen[length, 1], "without a unit it is not that of unit=1"

    @promise("a block size that the layout chooses by itself holds whole units of a codec that seals")
    def test_blocks_hold_whole_units(self):
        for length in LENGTHS:
            for unit in UNITS:
                with example(max_len=length, unit=unit):
                    size = self.make().block_size(length, unit)
                    assert self.chosen or size >= length or size % unit == 0, f"blocks of {size}"

    @promise("a cache with this layout keeps its books: no block has two owners, none is lost, none is freed twice")
    def test_in_a_cache(self):
        for max_len, codec in ((1, Verbatim()), (40, Verbatim()), (96, Sealed())):
            with example(max_len=max_len, codec=f"seals groups of {codec.group}"):
                self._walk(max_len, codec)

    def _walk(self, max_len: int, codec: Codec) -> None:
        from kvframe.errors import IncompatibleCacheError

        layout = self.make()
        whole = layout.block_size(max_len, codec.group) >= max_len  # such blocks are never shared
        try:
            cache = cache_of(
                some_layers((None, 10)), {"max_len": max_len}, layout=layout, codec=codec,
                **({} if whole else {"index": TrieIndex()}),
            )  # fmt: skip
        except IncompatibleCacheError:
            assert self.chosen and codec.group > 1, "a cache of plain parts refuses it"
            return
        assert cache.capacity() == max_len, f"the longest request is {cache.capacity()}, room is for more"
        Walker(cache, seed=1, max_len=max_len).walk(200)
