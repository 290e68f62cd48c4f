"""Long random walks over the control plane of every composition, with tiny pools: the books and what slots hold are
checked after each call. Short ones, and those with tensors, are in the contract suites (test_contracts.py)."""

from __future__ import annotations

import pytest
from strategies import COMPOSITIONS
from test_cache import control

from kvframe.testing.walker import Walker

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
def test_three_thousand_steps(composition):
    walker = walk(composition, 3_000, seed=1)
    if "radix" in composition:
        assert walker.calls["evict"] and walker.calls["invalidate"] and walker.cache.evictions


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [10_000, 100_000])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_many_steps(composition, steps):
    walk(composition, steps, seed=2)
