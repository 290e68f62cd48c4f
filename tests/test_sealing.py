"""Codecs that encode whole groups of tokens: what a query sees, and what becomes of open groups when requests share,
fork, go back, are preempted or end. Shadow and Attending hold every step against the rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attending import Attending, Steps, some_layers, walked, with_storage
from kvframe_plugins.int4 import Int4
from kvframe_plugins.lru import LRU
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.no_index import NoIndex
from kvframe_plugins.paged import Paged
from strategies import COMPOSITIONS
from test_cache import control

from kvframe import sealing
from kvframe.cache import BlockKVCache
from kvframe.errors import CapacityError, IncompatibleCacheError
from kvframe.interfaces import CacheContext, Codec, Kernel
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.walked import Walked
from kvframe.testing.walker import Walker

INT4 = ["cache/codec=int4", "cache.codec.group=4"]
WINDOW = ["cache/retention=sliding_window", "cache.retention.window=9"]
PAGED, RADIX = ([f"cache={name}", "cache.layout.block_size=8", "cache.memory=100KiB"] for name in ("paged", "radix"))


class Mixed(Codec):
    """Groups that differ by kind and layer: keys in groups of 4 and 6, values token by token or in groups of 2."""

    exact = False

    def for_layer(self, layer, kind):
        if kind == "k":
            return Int4(group=4 if layer.index == 0 else 6)
        return NoCodec() if layer.index == 0 else Int4(group=2).for_layer(layer, "v")

    def planes(self, dim):
        raise AssertionError("asks the codec of a layer")

    encode = decode = planes


# -- kernel outputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group, retention", [(4, WINDOW), (8, []), (32, [])], ids=str)
def test_any_chunking_and_a_hit_give_the_same_outputs_and_bitwise_equal_codes(group, retention):
    size, request, stored = max(group, 16), walked(90), []
    for chunk in (90, 1, 7, 32):
        cache = with_storage(
            [*RADIX, *INT4, *retention, f"cache.codec.group={group}", f"cache.layout.block_size={size}"]
        )
        steps, mine = Steps(cache), Walked("a", request.tokens)
        other = walked(50, "b", seed=1)  # a neighbour in every step
        steps.admit(mine), steps.admit(other)
        while mine.computed < 90:
            batch = [(mine, min(chunk, 90 - mine.computed))]
            steps.run(*(batch if other.computed == 50 else [*batch, (other, 1)]))
        held = cache.tables["a"]
        stored.append(_codes(cache, held))
        cache.release(mine)
        for cut in (90, 61, 33):  # hits end with whole groups, and the tail begins empty
            again = Walked(f"hit{cut}", np.append(request.tokens[:cut], np.int32(9)))
            hit = steps.admit(again)
            assert hit % group == 0 and hit >= (cut // size * size if not retention else 0)
            steps.run((again, cut + 1 - hit))
            cache.release(again)
    for other in stored[1:]:
        assert all(torch.equal(a, b) for a, b in zip(stored[0], other))


def _codes(cache, held) -> list[torch.Tensor]:
    """Every plane's sealed part of a request's live blocks, bit by bit."""
    found = []
    for layer in cache.storage.layers[:2]:
        table, size = cache.tables.view(held, layer.group), layer.codec_k.group
        for position in range(0, 90 // size * size, size):
            block, slot = table[position // cache.block_size], position % cache.block_size
            for plane in (*layer.k.values(), *layer.v.values()) if block else ():
                per_group = plane.shape[1] != cache.block_size
                part = plane[block, slot // size] if per_group else plane[block, slot : slot + size]
                found.append(part.contiguous().view(torch.uint8))
    return found


@pytest.mark.parametrize("composition", [name for name in COMPOSITIONS if not name.startswith("paged-1 ")])
def test_random_walks(composition):
    blocks = {"contiguous": 4, "paged-16": 12, "paged-64": 5}[composition.split()[0]]
    walker = Walker(control([*COMPOSITIONS[composition], *INT4, f"cache.num_blocks={blocks}"], (None, 10)), seed=2)
    walker.walk(150)


@pytest.mark.parametrize("index", ["none", "radix"])
def test_groups_that_differ_by_kind_and_layer(index):
    cache = mixed(index)
    assert (cache.unit, cache.sealed) == (12, [2, 4, 6])
    assert [(t is None) for layer in cache.storage.layers for t in (layer.tail_k, layer.tail_v)] == [
        False, True, False, False, False, True
    ]  # fmt: skip
    walker = Walker(cache, seed=5)
    walker.shadow = Attending(cache)
    walker.walk(80)
    parts = cache.parts_of_token[0]
    assert sum(parts.values()) == cache.token_bytes[0] and set(parts) == {1, 4}


def mixed(index):
    from kvframe_plugins.radix import RadixIndex as Radix

    context = CacheContext(some_layers(), max_len=96, max_requests=6, max_step_tokens=96, kernels=(ReferenceKernel(),))
    found = NoIndex() if index == "none" else Radix()
    return BlockKVCache(context, Paged(12), found, LRU(), ModelRetention(), Mixed(), num_blocks=12)


# -- open groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [6, 8, 9, 19])
def test_a_fork_goes_on_with_the_open_group(length):
    steps = Steps(with_storage([*PAGED, *INT4]))
    parent = walked(length + 20)
    steps.admit(parent)
    steps.run((parent, length))
    child = steps.fork(parent, "child", *range(30))
    grandchild = steps.fork(child, "grandchild", *range(100, 130))
    assert set(steps.cache.copies.rows.values()) == ({0} if length % 4 else set()), "a closed group is in the blocks"
    steps.run((parent, 3))  # the children wait, and their copies do not
    steps.run((grandchild, 1), (parent, 2), (child, 7))
    steps.run((child, 5), (grandchild, 9))


@pytest.mark.parametrize("fate", ["release", "truncate", "row goes to another", "row goes to a fork"])
def test_what_becomes_of_the_parent_before_the_next_step_does_not_matter(fate):
    """The child's copy of the open group waits for the next plan. Poison tells when it comes too late."""
    steps = Steps(with_storage([*PAGED, *INT4], max_requests=4))
    parent, other = walked(30), walked(31, "other", seed=1)
    steps.admit(parent), steps.admit(other)
    steps.run((parent, 11), (other, 14))
    child = steps.fork(parent, "child", *range(20))
    if fate == "truncate":
        parent.computed = steps.cache.truncate(parent, 5)
        assert parent.computed == 4, "the first group cannot be opened again"
        steps.run((parent, 13), (child, 3))
        return
    row = steps.cache.tables["a"].row
    steps.cache.release(parent)
    if fate == "row goes to another":
        new = walked(23, "new", seed=2)
        steps.admit(new)
        assert steps.cache.tables["new"].row == row
        steps.run((new, 7), (child, 1))
    elif fate == "row goes to a fork":
        nephew = steps.fork(other, "nephew", *range(9))
        assert steps.cache.tables["nephew"].row == row
        steps.run((nephew, 2), (child, 2), (other, 3))
    steps.shadow.lose_free_rows()
    steps.run((child, 4))


def test_truncate_keeps_within_the_open_group_and_goes_back_to_the_beginning_of_a_sealed_one():
    steps = Steps(with_storage([*RADIX, *INT4], some_layers((None,))))
    request = walked(60)
    steps.admit(request)
    for length, kept in ((22, 22), (21, 21), (20, 20), (19, 16), (14, 12), (8, 8), (3, 0)):
        steps.run((request, 23 - request.computed))
        request.computed = steps.cache.truncate(request, length)
        assert request.computed == kept
        request.tokens = np.append(request.tokens[:kept], np.full(40, length, np.int32))
        steps.cache.check()


def test_lengths_that_can_be_kept():
    for computed in range(40):
        for length in range(computed + 1):
            assert sealing.keepable(length, computed, []) == length
            kept = sealing.keepable(length, computed, [4, 6])
            fine = [m for m in range(length + 1) if all(m % g == 0 or m // g == computed // g for g in (4, 6))]
            assert kept == max(fine)


# -- bytes, kernels -----------------------------------------------------------------------------------------


def test_stats_agree_with_the_tensors():
    cache = with_storage([*RADIX, *INT4], max_requests=3)
    layers, groups = cache.storage.layers, cache.stats().groups
    assert cache.storage.nbytes() == sum((g.num_blocks + 1) * g.block_bytes for g in groups)
    pool = sum(tail.plane.nbytes for tail in cache.storage.tails())
    assert sum(g.tail_pool for g in groups) == pool == 3 * 2 * 4 * 2 * (8 + 4) * 4
    assert 0.9 * 102400 < cache.storage.nbytes() + pool <= 102400, "tails are part of cache.memory"
    steps = Steps(cache)
    a, b = walked(40), walked(40, "b")
    steps.admit(a)
    steps.run((a, 11))
    stats = cache.stats()
    token = sum(p[0, 0].nbytes / (1 if p.shape[1] == 8 else 4) for p in (*layers[0].k.values(), *layers[0].v.values()))
    assert [g.used for g in stats.groups] == [8 * token, (8 - 2) * token], "the window's first sealed two are dead"
    assert stats.total("reserved") == 4 * stats.groups[0].block_bytes and stats.total("tail") == pool // 3
    b = steps.fork(a, "b", *range(20))
    assert cache.stats().total("used") == stats.total("used") and cache.stats().total("tail") == 2 * pool // 3
    steps.run((b, 1))
    assert cache.stats().groups[0].used == 12 * token, "its first group of the second block is full now"
    cache.release(a), cache.release(b)
    assert cache.stats().total("used") == cache.stats().total("tail") == cache.stats().total("reserved") == 0


def test_memory_that_tails_take_whole():
    with pytest.raises(
        CapacityError, match=r"for the open groups of all requests\n  fix: cache.memory=\d+ or more"
    ) as e:
        control([*PAGED, *INT4, "cache.memory=2KiB"])
    least = str(e.value).split("cache.memory=")[-1].split(" ")[0]
    control([*PAGED, *INT4, f"cache.memory={least}"]).check()


def test_a_kernel_that_cannot_is_not_asked():
    assert not Kernel.sealing and not CpuKernel.sealing
    layers = some_layers((None,), ())
    assert CpuKernel().unsupported(
        layers[0], (Int4(), Int4().for_layer(layers[0], "v")), control(PAGED).rules[0], "cpu", 16
    )
    cache = with_storage([*PAGED, *INT4], layers, kernels=(CpuKernel(), ReferenceKernel()))
    assert cache.storage.layers[0].kernel.name == "reference"
    with pytest.raises(IncompatibleCacheError, match="kernel cpu: .*open groups.*: kernel=auto"):
        with_storage([*PAGED, *INT4], layers, kernels=(CpuKernel(),))
