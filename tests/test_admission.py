"""The order of admission, with a scheduler alone: who goes first, how often anybody is overtaken, who is peeked at."""

from __future__ import annotations

import random

import pytest

from kvframe.policies import PATIENCE, FirstCome, LongestPrefix, make_policy
from kvframe.scheduler import LOOK, Scheduler

POLICIES = ("fcfs", "prefix")


class Stub:
    """What a scheduler knows of a sequence."""

    salt, keep = "", None

    def __init__(self, name: int, arrival: float = 0.0, cached: int = 0, n: int = 50):
        self.id, self.arrival, self.match, self.n = str(name), arrival, cached, n
        self.computed = self.preemptions = self.cached = self.outputs = 0


class Room:
    """A cache with room for some sequences that says of each what it is told to."""

    def __init__(self, rows: int = 1):
        self.rows, self.held, self.peeks = rows, set(), 0
        self.pending = lambda sequence: 0

    def peek(self, sequence):
        self.peeks += 1
        return sequence.match, self.pending(sequence)

    def admit(self, sequence):
        if len(self.held) == self.rows:
            return None
        self.held.add(sequence)
        return sequence.match

    def grow(self, sequence, n):
        return True

    def release(self, sequence):
        self.held.remove(sequence)


def overtaken_at_most(policy, seed: int, queue: int, waits: float = 0.0) -> int:
    """The most later arrivals that went before anybody who could have been next. Arrivals keep up with one start a
    step, behind a queue; a share of them `waits` for what the one who runs all the time computes, for a while."""
    draw = random.Random(seed)
    cache = Room(rows=2)
    scheduler = Scheduler(cache, 8, 1000, 100, policy)
    scheduler.add(Stub(-1))
    scheduler.schedule(0)
    stubs = [Stub(i, arrival=max(0, i - queue), cached=draw.choice([0, 8, 16, 40])) for i in range(400)]
    until = {s: s.arrival + draw.randrange(100) if draw.random() < waits else 0 for s in stubs}
    for stub in stubs:
        scheduler.add(stub)
    left, overtaken, step = list(stubs), dict.fromkeys(stubs, 0), 0
    while left:
        cache.pending = lambda s, step=step: 16 * (until[s] > step)
        scheduler.schedule(step)
        if len(scheduler.running) == 2:
            running = scheduler.running[1]
            for other in left[: left.index(running)]:
                overtaken[other] += until[other] <= step
            left.remove(running)
            scheduler.finish(running)
        step += 1
    return max(overtaken.values())


@pytest.mark.parametrize("waits", [0.0, 0.3])
@pytest.mark.parametrize("queue", [3, 20, 50, 100])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_overtaken_more_than_the_bound(seed, queue, waits):
    assert overtaken_at_most(LongestPrefix(), seed, queue, waits) <= PATIENCE
    assert overtaken_at_most(LongestPrefix(patience=5), seed, queue, waits) <= 5
    assert overtaken_at_most(FirstCome(), seed, queue, waits) == 0
    if queue > 20:
        assert overtaken_at_most(LongestPrefix(10**9), seed, queue, waits) > PATIENCE, "the rule is what bounds it"


def test_those_who_go_in_turn_overtake_nobody():
    scheduler = Scheduler(Room(), 1, 1000, 100, LongestPrefix())
    for i in range(2 * PATIENCE):
        scheduler.add(Stub(i))
    for i in range(PATIENCE + 1):
        ((running, _),) = scheduler.schedule(i)
        assert running.id == str(i)
        scheduler.finish(running)
    scheduler.add(Stub("match", cached=40))
    assert scheduler.schedule(99)[0][0].id == "match"


def test_one_that_does_not_fit_is_not_overtaken_by_those_that_do():
    cache = Room(rows=2)
    scheduler = Scheduler(cache, 8, 100, 100, LongestPrefix())
    cache.admit = lambda s: None if s.n > 50 and cache.held else Room.admit(cache, s)
    first, big = Stub(0), Stub(1, cached=30, n=90)
    scheduler.add(first)
    scheduler.schedule(0)
    scheduler.add(big)
    for i in range(5):
        scheduler.add(Stub(2 + i, cached=40 if i else 10))  # better matches, of which one more would fit
        if i == 0:
            scheduler.schedule(0)
    scheduler.schedule(0)
    assert scheduler.running == [first]
    scheduler.finish(first)
    scheduler.schedule(0)
    assert scheduler.running[0] is big


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_one_goes_first(policy):
    cache = Room(rows=2)
    scheduler = Scheduler(cache, 8, 100, 100, make_policy(policy))
    stubs = [Stub(0), Stub(1), Stub(2, cached=40), Stub(3, cached=40)]
    for stub in stubs[:2]:
        scheduler.add(stub)
    scheduler.schedule(0)
    for stub in stubs[2:]:
        scheduler.add(stub)
    scheduler._preempt(stubs[1])
    scheduler.schedule(0)
    assert scheduler.running == stubs[:2]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_waits_when_nothing_runs_and_what_never_fits_is_stuck(policy):
    cache = Room(rows=1)
    cache.pending = lambda sequence: 16
    scheduler = Scheduler(cache, 8, 100, 100, make_policy(policy))
    stubs = [Stub(i) for i in range(3)]
    for stub in stubs:
        scheduler.add(stub)
    for stub in stubs:
        assert [s for s, _ in scheduler.schedule(0)] == [stub]
        scheduler.finish(stub)
    cache.grow = lambda sequence, n: False
    for stub in stubs:
        stub.match = 8
        scheduler.add(stub)
    assert scheduler.schedule(0) == [] and scheduler.stuck == stubs and not scheduler.waiting
    assert not cache.held and [stub.computed for stub in stubs] == [0, 0, 0], "what was given back is not there"
    cache.rows = 0
    scheduler.stuck.clear()
    for stub in stubs:
        scheduler.add(stub)
    assert scheduler.schedule(0) == [] and scheduler.stuck == stubs and not scheduler.waiting


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_asks_the_cache_about_few(policy):
    cache = Room(rows=4)
    scheduler = Scheduler(cache, 4, 1000, 100, make_policy(policy))
    for i in range(500):
        scheduler.add(Stub(i))
    scheduler.schedule(0)
    assert len(scheduler.running) == 4 and cache.peeks <= {"fcfs": 4, "prefix": LOOK + 2 * 4}[policy]
    cache.peeks = 0
    scheduler.schedule(0)
    assert cache.peeks == 0, "no row is free"
    scheduler.finish(scheduler.running[0])
    cache.pending = lambda sequence: 16
    scheduler.schedule(0)
    assert len(scheduler.running) == 3 and cache.peeks <= LOOK + 1, "all that are near wait"
    cache.pending, cache.rows, cache.peeks = (lambda sequence: 0), 3, 0
    scheduler.schedule(0)
    scheduler.schedule(0)
    assert cache.peeks <= {"fcfs": 2, "prefix": LOOK + 2}[policy], "who does not fit stays next"
