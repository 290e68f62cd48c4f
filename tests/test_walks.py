"""Random walks over the control plane of every composition, with tiny pools: the books and what slots hold are checked
after each call."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from strategies import COMPOSITIONS
from test_cache import control
from walker import Walker

SMALL = {"contiguous": 4, "paged-1": 150, "paged-16": 12, "paged-64": 5}
CALLS = {"admit", "grow", "commit", "release", "preempt", "fork", "truncate", "peek"}


def small(composition: str, windows=(None, 10, None, 10)):
    """A cache with room for one long request and a half."""
    blocks = SMALL[composition.split()[0]]
    return control([*COMPOSITIONS[composition], f"cache.num_blocks={blocks}"], windows)


def walk(composition: str, steps: int, seed: int) -> Walker:
    walker = Walker(small(composition), seed=seed)
    walker.walk(steps)
    assert walker.steps >= steps and set(walker.calls) >= CALLS, walker.calls
    return walker


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_ten_thousand_steps(composition):
    walker = walk(composition, 10_000, seed=1)
    if "radix" in composition:
        assert walker.calls["evict"] and walker.calls["invalidate"] and walker.cache.evictions


@pytest.mark.nightly
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_hundred_thousand_steps(composition):
    walk(composition, 100_000, seed=2)


@pytest.mark.parametrize("eviction", ["lfu", "half_life"])
@pytest.mark.parametrize("windows", [(None,), (7,)], ids=str)
def test_walks_under_other_evictions_and_models(eviction, windows):
    cache = control(["cache=radix", f"cache/eviction={eviction}", "cache.num_blocks=12"], windows)
    walker = Walker(cache, seed=3)
    walker.walk(2000)
    assert cache.hit_tokens and cache.evictions


class Machine(RuleBasedStateMachine):
    """The walker's calls, chosen by Hypothesis, which shrinks what fails. What a call does comes from a seed of its
    own: drawing each token by itself made this ten times slower."""

    composition: str
    cache = None
    steps = 0

    @initialize(seed=st.integers(0, 1 << 16))
    def start(self, seed):
        self.cache.reset()
        self.walker = Walker(self.cache, seed=seed)

    def move(self, name, seed):
        self.walker.random.seed(seed)
        self.walker.move(name)

    @rule(seed=st.integers(0, 1 << 16))
    def admit(self, seed):
        self.move("admit", seed)

    @precondition(lambda self: self.walker.running)
    @rule(
        name=st.sampled_from(["grow", "grow", "grow", "release", "preempt", "fork", "truncate", "peek"]),
        seed=st.integers(0, 1 << 16),
    )
    def use(self, name, seed):
        self.move(name, seed)

    @rule(name=st.sampled_from(["evict", "evict", "evict", "invalidate", "reset"]), seed=st.integers(0, 1 << 16))
    def disturb(self, name, seed):
        self.move(name, seed)

    def teardown(self):
        if hasattr(self, "walker"):
            self.walker.finish()
            type(self).steps += self.walker.steps


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_state_machine(composition):
    machine = type("Machine", (Machine,), {"composition": composition, "cache": small(composition)})
    machine.TestCase.settings = settings(
        max_examples=40, stateful_step_count=50, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    machine.TestCase("runTest").runTest()
    assert machine.steps >= 1000
