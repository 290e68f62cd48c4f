"""Blocks hold whole groups of a codec that seals; the books on tails: copies that wait, and what is kept how long."""

from __future__ import annotations

import pytest
from attending import Steps, some_layers, walked, with_storage
from kvframe_plugins.int4 import Int4
from kvframe_plugins.lru import LRU
from kvframe_plugins.mixed import Mixed
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.no_index import NoIndex
from kvframe_plugins.paged import Paged
from test_cache import control

from kvframe.cache import BlockKVCache
from kvframe.errors import IncompatibleCacheError
from kvframe.interfaces import CacheContext

FOURS = ["cache=paged", "cache.layout.block_size=8", "cache.memory=100KiB", "cache/codec=int4", "cache.codec.group=4"]

# -- blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, groups, fix", [(16, (32, 32), 32), (5, (4, 4), 8), (8, (6, 6), 12), (16, (48, 32), 96),
    (64, (48, 32), 96), (20, (4, 6), 24), (13, (4, 4), 16)])  # fmt: skip
def test_blocks_that_a_user_chose_and_that_do_not_hold_whole_groups(size, groups, fix):
    """One fix, which works, whatever the groups of keys and values."""
    with pytest.raises(IncompatibleCacheError) as error:
        paged(size, groups)
    (reason,) = error.value.reasons
    assert reason.endswith(f": cache.layout.block_size={fix}") and f"and blocks of {size} do not hold" in reason
    assert f"groups of {' and '.join(map(str, sorted(set(groups))))} tokens" in reason
    assert paged(fix, groups).block_size == fix


@pytest.mark.parametrize("groups, size", [((2, 2), 16), ((16, 16), 16), ((32, 32), 32), ((6, 6), 48), ((48, 32), 96),
    ((20, 1), 80)])  # fmt: skip
def test_blocks_that_nobody_chose_hold_whole_groups(groups, size):
    cache = paged(None, groups)
    assert cache.block_size == size and size % cache.unit == 0
    assert Paged(8).block_size(96, 32) == 8, "what a user chose is not changed"


def paged(size: int | None, groups: tuple[int, int]) -> BlockKVCache:
    """A cache whose keys and values are sealed in such groups."""
    k, v = (Int4(group=group) if group > 1 else NoCodec() for group in groups)
    context = CacheContext(some_layers(), max_len=200)
    return BlockKVCache(context, Paged(size), NoIndex(), LRU(), ModelRetention(), Mixed(k, v), num_blocks=4)


@pytest.mark.parametrize("preset", ["paged", "radix", "sliding_window", "int4"])
def test_a_codec_that_seals_needs_no_other_option(preset):
    assert control([f"cache={preset}", "cache/codec=int4", "cache.num_blocks=4"]).block_size == 32


def test_the_list_shows_the_blocks_that_are_used():
    from kvframe.commands.list import listed, row

    found = {file.name: row(file) for file in listed() if file.group == "cache" and file.name in ("paged", "int4")}
    contiguous = row(next(file for file in listed() if (file.group, file.name) == ("cache", "contiguous")))
    assert {name: r["block_size"] for name, r in found.items()} == {"paged": 16, "int4": 32}
    assert "blocks of 32 tokens" in found["int4"]["notes"] and contiguous["block_size"] is None


# -- books ---------------------------------------------------------------------------------------------------


def forked(**options):
    """A cache with a running parent of six tokens and its child, whose copy of the open group waits."""
    cache = control(FOURS, **options)
    parent, child = walked(40), walked(40, "child")
    assert cache.admit(parent) == 0 and cache.grow(parent, 6)
    cache.plan([(parent, 6)])
    cache.commit(parent, 6)
    child.tokens = parent.tokens
    cache.fork(parent, child)
    cache.check()
    return cache, parent, child


def test_a_child_that_ends_takes_its_copy_with_it():
    cache, parent, child = forked()
    row = cache.tables["child"].row
    assert cache.copies.rows == {row: cache.tables["a"].row}
    cache.release(child)
    assert not cache.copies.rows
    cache.check()
    cache.fork(parent, walked(40, "other"))
    cache.release(parent)  # its row may go; what it holds is copied before anybody writes
    assert len(cache.copies.rows) == 1
    cache.check()


def wait_for_nobody(cache):
    cache.copies.rows[cache.tables.free_rows()[0]] = cache.tables["a"].row


def copy_from_nowhere(cache):
    cache.copies.rows[cache.tables["child"].row] = 99


def copy_under_a_codec_without_groups(cache):
    cache.sealed = []


def promise_to_nobody(cache):
    cache.tables._promised[0] += 1


def promise_too_much(cache):
    cache.tables.promise(cache.tables["a"], [cache.pools[0].num_blocks + 1, 0])


def redeem_twice(cache):
    cache.tables.promise(cache.tables["child"], [-1, 0])


@pytest.mark.parametrize("damage", [wait_for_nobody, copy_from_nowhere, copy_under_a_codec_without_groups,
    promise_to_nobody, promise_too_much, redeem_twice])  # fmt: skip
def test_check_sees_copies_and_promises_that_cannot_be(damage):
    cache, _, _ = forked()
    damage(cache)
    with pytest.raises(AssertionError, match="copy of a tail|copied from|promise"):
        cache.check()


def test_full_precision_goes_when_the_last_layer_has_read_it():
    """A step's own keys and values are kept beside the tails no longer than its attention needs them."""
    cache = with_storage(FOURS, some_layers((None, 10), sources=(0,)))
    request, kept, attend = walked(60), [], cache.attend

    def watch(layer, *args):
        out = attend(layer, *args)
        kept.append([tail.raw is not None for tail in cache.storage.tails()])
        return out

    cache.attend = watch
    steps = Steps(cache)
    steps.admit(request)
    steps.run((request, 30))
    assert kept == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], "layer 2 reads what layer 0 stored"
    steps.run((request, 1))
    assert all(tail.raw is None and tail.plan is None for tail in cache.storage.tails())
