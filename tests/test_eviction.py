"""Eviction policies through their interface, with runs that are nothing but numbers."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from kvframe_plugins.half_life import HalfLife
from kvframe_plugins.lfu import LFU
from kvframe_plugins.lru import LRU

from kvframe.errors import ConfigError
from kvframe.eviction import Memory

POLICIES = {"lru": LRU, "lfu": LFU, "half_life": HalfLife}
names = itertools.count()


@dataclass(eq=False)
class Fake:
    """A run; the same key means the same tokens."""

    start: int = 0
    stop: int = 4
    key: object = field(default_factory=lambda: next(names))


def order(policy, evictable=lambda run: True, take=None) -> list:
    """The runs that would go, the first to go first; nothing goes."""
    victims = policy.victims(evictable)
    found = list(itertools.islice(victims, take))
    victims.close()
    return found


def filled(policy, n: int = 3) -> list[Fake]:
    runs = [Fake() for _ in range(n)]
    for run in runs:
        policy.on_insert(run)
    return runs


def comes_back(policy, run: Fake, **changes) -> Fake:
    """The run is evicted, and then its tokens are inserted again."""
    policy.on_remove(run)
    again = Fake(**{"start": run.start, "stop": run.stop, "key": run.key, **changes})
    policy.on_insert(again)
    return again


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]()


# -- what all of them do -------------------------------------------------------------------------------------


def test_of_runs_with_equal_uses_the_oldest_goes_first(policy):
    a, b, c = filled(policy)
    assert order(policy) == [a, b, c]
    for run in (a, c, b):
        policy.on_hit(run)
    assert order(policy) == [a, c, b]


def test_a_run_that_was_hit_goes_after_those_that_were_not(policy):
    a, b, c = filled(policy)
    policy.on_hit(a)
    assert order(policy) == [b, c, a]


def test_growing_is_recent_but_no_use(policy):
    a, b, c = filled(policy)
    for stop in (8, 12, 16):
        a.stop = stop
        policy.on_insert(a)
    assert order(policy) == [b, c, a]
    policy.on_hit(b)
    assert order(policy) == [c, a, b]


def test_a_removed_run_is_no_victim_and_a_skipped_one_is_next_time(policy):
    a, b, c = filled(policy)
    assert order(policy, lambda run: run is not a) == [b, c]
    policy.on_remove(b)
    assert order(policy) == [a, c]
    assert order(policy, lambda run: False) == []
    assert order(policy) == [a, c]


def test_both_parts_of_a_split_have_the_history(policy):
    a, b, c = filled(policy)
    policy.on_hit(a)
    head = Fake(0, 2, key=a.key)
    a.start, a.key = 2, "rest of a"
    policy.on_split(a, head)
    assert order(policy)[:2] == [b, c] and set(order(policy)[2:]) == {a, head}
    policy.on_remove(a)
    assert order(policy) == [b, c, head]
    d = Fake()
    policy.on_insert(d)
    policy.on_hit(b)
    assert order(policy)[0] is c and order(policy)[-1] is b


def test_a_split_makes_nothing_recent(policy):
    a, b, c = filled(policy)
    head = Fake(0, 2, key=a.key)
    a.start, a.key = 2, "rest of a"
    policy.on_split(a, head)
    assert order(policy) == [a, head, b, c]


@pytest.mark.parametrize("make", [LFU, HalfLife])
def test_uses_go_on_in_both_parts_of_a_split(make):
    policy = make()
    a, b, c = filled(policy)
    for _ in range(5):
        policy.on_hit(a)
    head = Fake(0, 2, key=a.key)
    a.start, a.key = 2, "rest of a"
    policy.on_split(a, head)
    for run in (a, head, b):
        policy.on_hit(run)
    assert order(policy)[:2] == [c, b] and set(order(policy)[2:]) == {a, head}


def test_victims_is_asked_one_by_one_and_may_change_what_it_walks(policy):
    a, b, c = filled(policy)
    asked = []

    def evictable(run):
        asked.append(run)
        return run is not b or a not in policy.ranks  # b has a behind it

    victims = policy.victims(evictable)
    assert next(victims) is a and asked == [a]
    policy.on_remove(a)
    assert next(victims) is b and asked == [a, b]
    victims.close()
    assert order(policy) == [b, c]


def test_copies_are_independent(policy):
    a, b, c = filled(policy)
    other = copy.deepcopy(policy)
    policy.on_hit(a)
    policy.on_remove(b)
    assert order(policy) == [c, a]
    assert len(order(other)) == 3
    fresh, twin = type(policy)(), copy.deepcopy(type(policy)())
    runs = filled(fresh)
    assert order(fresh) == runs and order(twin) == []


def test_what_was_overtaken_does_not_pile_up(policy):
    runs = filled(policy, 10)
    for _ in range(1000):
        for run in runs:
            policy.on_hit(run)
    assert len(policy._heap) <= 64 + 4 * len(runs) + 1
    assert order(policy) == runs


def test_hits_while_victims_are_walked(policy):
    runs, taken = filled(policy, 10), set()
    victims = policy.victims(lambda run: run not in taken)
    assert next(victims) is runs[0]
    taken.add(runs[0])
    for run in runs[1:5] * 100:  # so many that the heap is rebuilt
        policy.on_hit(run)
    assert next(victims) is runs[5]
    victims.close()
    assert order(policy) == [runs[0], *runs[5:], *runs[1:5]]


# -- against plain models ------------------------------------------------------------------------------------


def naive(kind, uses, last):
    return (last,) if kind == "lru" else (uses, last)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["lru", "lfu"])
def test_random_histories_against_a_sorted_list(kind, seed):
    draw, policy = random.Random(seed), POLICIES[kind]()
    cached: dict[Fake, tuple[int, int]] = {}  # run -> (uses, last use)
    uses = Counter()  # of all tokens that ever were there, by key
    for now in range(400):
        action = draw.random()
        if action < 0.3 or not cached:
            key = draw.randrange(30)
            if any(run.key == key for run in cached):
                continue
            run = Fake(key=key)
            policy.on_insert(run)
            uses[key] += 1
            cached[run] = uses[key], now
        elif action < 0.7:
            run = draw.choice(list(cached))
            policy.on_hit(run)
            uses[run.key] += 1
            cached[run] = uses[run.key], now
        elif action < 0.75:
            run = draw.choice(list(cached))
            policy.on_insert(run)  # it has grown
            cached[run] = uses[run.key], now
        else:
            free = set(draw.sample(list(cached), draw.randrange(len(cached)) + 1))
            expected = sorted(free, key=lambda run: naive(kind, *cached[run]))
            take = draw.randrange(len(free)) + 1
            gone = []
            victims = policy.victims(free.__contains__)
            for run in itertools.islice(victims, take):
                gone.append(run)
                if draw.random() < 0.7:
                    policy.on_remove(run)
                    del cached[run]
            victims.close()
            assert gone == expected[:take]
        assert order(policy) == sorted(cached, key=lambda run: naive(kind, *cached[run]))


# -- what is remembered --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LFU, HalfLife])
def test_uses_are_remembered_beyond_eviction(make):
    policy = make()
    a, b, _ = filled(policy)
    for _ in range(5):
        policy.on_hit(a)
    a = comes_back(policy, a)
    policy.on_hit(b)
    assert order(policy)[-1] is a


@pytest.mark.parametrize("make", [LFU, HalfLife])
def test_without_memory_a_run_starts_again(make):
    policy = make(memory=0)
    a, b, _ = filled(policy)
    for _ in range(5):
        policy.on_hit(a)
    a = comes_back(policy, a)
    policy.on_hit(b)
    assert order(policy)[-1] is b
    assert len(policy._gone) == 0


@pytest.mark.parametrize("make", [LFU, HalfLife])
def test_memory_is_in_proportion_to_what_is_cached(make):
    policy = make(memory=3)
    runs = filled(policy, 100)
    for run in runs[:90]:
        policy.on_remove(run)
    assert len(policy._gone) == 3 * 11
    assert len(make(memory=3)._gone) == 0


def test_memory_forgets_the_oldest_and_answers_once():
    memory = Memory()
    for i, key in enumerate("abcad"):
        memory.keep(key, i, most=3)
    assert [memory.recall(key, None) for key in "bcad"] == [None, 2, 3, 4]
    assert memory.recall("a", 0) == 0 and len(memory) == 0


# -- half-life -----------------------------------------------------------------------------------------------


def test_half_life_is_measured_in_tokens_used_again():
    policy = HalfLife(patience=3)
    long, short = Fake(0, 30), Fake(0, 10)
    policy.on_insert(long)
    policy.on_insert(short)
    policy.on_hit(short)  # after 1
    policy.on_hit(long)  # after 3
    assert policy._interval == pytest.approx((10 * 1 + 30 * 3) / 40)
    assert policy.ranks[long] == pytest.approx(4 + 3 * 2.5 * math.log2(2))


def test_without_patience_it_is_lru():
    draw, policy, lru = random.Random(0), HalfLife(patience=0), LRU()
    runs = [Fake() for _ in range(20)]
    for run in runs:
        policy.on_insert(run)
        lru.on_insert(run)
    for run in draw.choices(runs, k=300):
        policy.on_hit(run)
        lru.on_hit(run)
        assert order(policy) == order(lru)


def test_with_all_patience_it_is_lfu():
    draw, policy, lfu = random.Random(0), HalfLife(patience=1e6), LFU()
    runs = [Fake() for _ in range(20)]
    for run in runs:
        policy.on_insert(run)
        lfu.on_insert(run)
    for run in runs * 5 + draw.choices(runs, k=300):  # the half-life is short before anything came back
        policy.on_hit(run)
        lfu.on_hit(run)
    uses = {run: lfu.ranks[run][0] for run in runs}
    found = order(policy)
    assert [uses[run] for run in found] == sorted(uses.values())
    assert len(set(uses.values())) > 5


def test_old_uses_fade():
    policy, lfu = HalfLife(), LFU()
    often, twice = Fake(), Fake()
    runs = [often, *filled(HalfLife(), 5)]
    for policy_ in (policy, lfu):
        for run in runs * 8:
            (policy_.on_hit if run in policy_.ranks else policy_.on_insert)(run)
        policy_.on_insert(twice)
        policy_.on_hit(twice)
        assert order(policy_)[0] is twice
        for _ in range(20):  # nobody asks for `often` any more
            for run in [*runs[1:], twice][::5]:
                policy_.on_hit(run)
    assert policy.ranks[often] < policy.ranks[twice]
    for policy_ in (policy, lfu):
        new = [Fake() for _ in range(60)]
        for run in new:
            policy_.on_insert(run)
        assert (order(policy_)[0] in new) == (policy_ is lfu)


def test_new_tokens_behind_what_comes_back_dilute_its_history():
    same, longer = HalfLife(), HalfLife()
    for policy, stop in ((same, 4), (longer, 16)):
        a, *_ = filled(policy)
        policy.on_hit(a)
        a = comes_back(policy, a, stop=stop)
        uses, _ = policy._history[a]
        assert uses == (3 if stop == 4 else 1 + 2 * 4 / 16)


def test_an_evicted_run_still_measures_the_interval():
    policy = HalfLife()
    a, *_ = filled(policy, 10)
    comes_back(policy, a)
    assert policy._interval == 10


# -- parameters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, math.nan, True, "16", None])
@pytest.mark.parametrize("make, name", [(LFU, "memory"), (HalfLife, "memory"), (HalfLife, "patience")])
def test_bad_parameters_name_the_key_and_the_fix(make, name, value):
    with pytest.raises(ConfigError) as error:
        make(**{name: value})
    assert f"cache.eviction.{name}={value!r}" in str(error.value)
    assert error.value.options and error.value.fix.startswith(f"cache.eviction.{name}=")


def test_lfu_may_forget_nothing():
    policy = LFU(memory=math.inf)
    for run in filled(policy, 1000):
        policy.on_remove(run)
    assert len(policy._gone) == 1000
