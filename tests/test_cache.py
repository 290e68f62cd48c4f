"""The control plane of a composed cache: books, groups, memory, errors. No tensors, no torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from strategies import STRATEGIES

from kvframe.config import build_cache, compose
from kvframe.errors import CapacityError, ConfigError, IncompatibleCacheError
from kvframe.interfaces import CacheContext
from kvframe.memory import parse_bytes
from kvframe.testing.walked import Walked
from kvframe.types import LayerSpec


def layers(*windows):
    return tuple(LayerSpec(i, 4, 2, 8, 8, 1.0, window=w) for i, w in enumerate(windows))


def control(overrides, windows=(None, 10, None, 10), **options):
    options = {"max_len": 96, "max_requests": 6, "max_step_tokens": 16, **options}
    return build_cache(compose(overrides), CacheContext(layers(*windows), **options))


# -- books ---------------------------------------------------------------------------------------------------


def break_a_reference(cache):
    cache.pools[0].refs[1] += 1


def free_a_live_block(cache):
    cache.pools[0]._push(np.array([1], dtype=np.int32))


def lose_a_block(cache):
    cache.pools[0]._top -= 1


def null_an_entry(cache):
    cache.tables.replace(next(iter(cache.tables.all())), 0, 0, 0)


@pytest.mark.parametrize("damage", [break_a_reference, free_a_live_block, lose_a_block, null_an_entry])
def test_check_sees_damage(damage):
    cache = control(["cache=paged", "cache.num_blocks=8"])
    request = Walked("a", np.arange(20, dtype=np.int32))
    assert cache.admit(request) == 0 and cache.grow(request, 20)
    cache.plan([(request, 20)])
    cache.commit(request, 20)
    cache.check()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()


def test_grow_and_admit_are_all_or_nothing():
    cache = control(["cache=paged", "cache.num_blocks=8"])  # the window group has fewer blocks
    a, b = Walked("a", np.zeros(90, np.int32)), Walked("b", np.zeros(60, np.int32))
    assert cache.admit(a) == 0
    before = cache.stats()
    assert cache.admit(b) is None, "the blocks are promised to the first request"
    assert not cache.grow(a, 96 * 2)
    assert cache.stats() == before
    cache.check()


def test_window_blocks_return_at_once_and_memory_stays_flat():
    cache = control(["cache=paged", "cache.layout.block_size=4", "cache.num_blocks=24"], windows=(10,))
    request = Walked("a", np.zeros(96, np.int32))
    cache.admit(request)
    most = 0
    for _ in range(24):
        assert cache.grow(request, 4)
        cache.plan([(request, 4)])
        most = max(most, cache.pools[0].live)
        cache.commit(request, 4)
        cache.check()
    assert most * 4 <= 10 + 4 + 4, "window + chunk + one block"
    assert cache.stats().total("used") == 9 * cache.token_bytes[0], "the next query sees 9 stored positions and itself"


def test_contiguous_keeps_dead_slots_until_release_but_does_not_count_them_as_used():
    cache = control(["cache=contiguous", "cache.num_blocks=2"], windows=(10,))
    request = Walked("a", np.zeros(50, np.int32))
    cache.admit(request)
    cache.grow(request, 50)
    cache.plan([(request, 50)])
    cache.commit(request, 50)
    stats = cache.stats()
    assert stats.total("reserved") == 96 * cache.token_bytes[0] and stats.total("used") == 9 * cache.token_bytes[0]


def test_fork_shares_and_the_writer_copies():
    cache = control(["cache=paged", "cache.num_blocks=8"], windows=(None,))
    a, b = Walked("a", np.zeros(20, np.int32)), Walked("b", np.zeros(20, np.int32))
    cache.admit(a)
    cache.grow(a, 20)
    cache.plan([(a, 20)])
    cache.commit(a, 20)
    cache.fork(a, b)
    stats = cache.stats()
    assert stats.total("reserved") == 2 * stats.groups[0].block_bytes
    assert stats.total("used") == 20 * cache.token_bytes[0], "shared bytes count once"
    assert cache.grow(b, 1)
    plan = cache.plan([(b, 1)])
    assert plan.copies[0].tolist() == [[2, 3, 4]], "4 slots of the open block 2 move to block 3"
    assert plan.groups[0].slots.tolist() == [3 * 16 + 4]
    cache.check()
    cache.commit(b, 1)
    cache.check()
    assert cache.tables.view(cache.tables["a"], 0).tolist() == [1, 2]
    assert cache.tables.view(cache.tables["b"], 0).tolist() == [1, 3]


def test_truncate_answers_what_the_window_has_left():
    cache = control(["cache=paged", "cache.layout.block_size=4"], windows=(8,))
    request = Walked("a", np.zeros(40, np.int32))
    cache.admit(request)
    for _ in range(10):
        cache.grow(request, 4)
        cache.plan([(request, 4)])
        cache.commit(request, 4)
    assert cache.truncate(request, 39) == 39, "block 8 still holds what position 39 needs"
    assert cache.truncate(request, 20) == 0
    cache.check()


# -- memory --------------------------------------------------------------------------------------------------


def test_memory_is_split_in_proportion_to_need():
    cache = control(["cache=paged", "cache.memory=200KiB"], max_requests=10_000)
    full, window = cache.stats().groups
    assert (full.name, window.name, full.layers, window.layers) == ("full", "window10", 2, 2)
    total = sum((g.num_blocks + 1) * g.block_bytes for g in (full, window))
    assert 0.9 * 200 * 1024 <= total <= 200 * 1024
    need = [6, 3]  # blocks of 16 for 96 tokens; for window 10 and a chunk of 16
    assert full.num_blocks / window.num_blocks == pytest.approx(need[0] / need[1], rel=0.15)


def test_num_blocks_means_the_neediest_group_and_the_others_scale():
    cache = control(["cache=paged", "cache.num_blocks=60"])
    assert [g.num_blocks for g in cache.stats().groups] == [60, 30]


def test_group_share_overrides_and_names_the_groups():
    cache = control(
        ["cache=paged", "cache.memory=200KiB", "cache.group_share={full:1,window10:1}"], max_requests=10_000
    )
    full, window = cache.stats().groups
    assert abs(full.num_blocks - window.num_blocks) <= 1
    with pytest.raises(ConfigError, match="full, window10"):
        control(["cache=paged", "cache.group_share={ful:1}"])


def test_without_an_index_the_pool_is_not_larger_than_can_be_used():
    cache = control(["cache=paged", "cache.memory=1GiB"], windows=(None,))
    assert cache.stats().groups[0].num_blocks == 6 * 6


def test_memory_that_holds_no_block_says_how_much_is_needed():
    with pytest.raises(CapacityError, match=r"cache.memory=\d+ or more") as error:
        control(["cache=paged", "cache.memory=4KiB"])
    least = str(error.value).split("cache.memory=")[-1].split(" ")[0]
    control(["cache=paged", f"cache.memory={least}"]).check()


@pytest.mark.parametrize(
    "value, wanted",
    [("2GiB", 2 << 30), ("500MB", 500_000_000), (4096, 4096), (0.5, 0.5), ("0.5", 0.5), ("1.5 kib", 1536)],
)
def test_amounts_of_memory(value, wanted):
    assert parse_bytes(value) == wanted


@pytest.mark.parametrize("value", ["much", -1, 0, "1.2.3GB", None, True])
def test_what_is_no_amount_of_memory(value):
    with pytest.raises(ConfigError, match="cache.memory"):
        parse_bytes(value)


def test_capacity_is_what_one_request_can_reach():
    for strategy in STRATEGIES:
        for blocks in (1, 2, 3):
            cache = control([*STRATEGIES[strategy], f"cache.num_blocks={blocks}"])
            limit = cache.capacity()
            request = Walked("a", np.zeros(max(limit, 1), np.int32))
            reached = 0
            assert cache.admit(request) == 0
            while reached < 96 and cache.grow(request, 1):
                cache.plan([(request, 1)])
                cache.commit(request, 1)
                reached += 1
            assert reached == limit, (strategy, blocks)


# -- composition ---------------------------------------------------------------------------------------------


def test_conflicts_are_raised_together():
    from kvframe_plugins.paged import Paged

    from kvframe.cache import BlockKVCache

    cache = control(["cache=paged"])

    class Picky(Paged):
        def conflicts(self, others):
            return ["wants cache/codec=other", f"wants more than {others.max_len} tokens: engine.max_len=200"]

    parts = cache.parts
    with pytest.raises(IncompatibleCacheError) as error:
        BlockKVCache(cache.context, Picky(), parts.index, parts.eviction, parts.retention, parts.codec)
    assert len(error.value.reasons) == 2 and "engine.max_len=200" in str(error.value)


@pytest.mark.parametrize("size", [0, -1, "a", 1.5, True])
def test_block_size_that_cannot_be(size):
    from kvframe_plugins.paged import Paged

    with pytest.raises(ConfigError, match="block_size=.* cannot be used"):
        Paged(size)


def test_control_plane_imports_no_torch():
    code = (
        "import sys, numpy as np\n"
        "from kvframe.config import build_cache, compose\n"
        "from kvframe.interfaces import CacheContext\n"
        "from kvframe.types import LayerSpec\n"
        "layers = (LayerSpec(0, 1, 1, 8, 8, 1.0),)\n"
        "cache = build_cache(compose(['cache=paged', 'cache.num_blocks=8']), CacheContext(layers))\n"
        "import kvframe.scheduler\n"
        "cache.check()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
