"""Greedy tokens equal REF (under the mask of the retention) for every composition of layout, index and retention: cold,
warm and warm again, in one batch and in ten, with prompts around every edge of blocks and windows."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from strategies import COMPOSITIONS, make_engine

from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.types import Request, SamplingParams

SHARED = (3, 11, 12, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65)
NEW = 5


@functools.cache
def model_of(arch):
    return wrap(tiny_model(arch))


def prompts() -> list[list[int]]:
    """Beginnings of one text, each with an end of its own; and some of them as they are."""
    random = np.random.default_rng(5)
    text = random.integers(3, 250, 80).tolist()
    return [text[:n] + random.integers(3, 250, 3).tolist() for n in SHARED] + [text[:n] for n in (12, 16, 17, 48, 64)]


@functools.cache
def compared(arch: str, retention, prompt: tuple, output: tuple) -> int:
    return check_greedy(model_of(arch).module, prompt, output, retention=retention)


def check(engine, arch: str, composition: str, batches: int) -> list[int]:
    """Runs the prompts in so many batches. Answers the cached tokens of each prompt."""
    retention = None if composition.endswith("model") else engine.cache.parts.retention
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    requests = [Request(prompt_tokens=p, sampling=params) for p in prompts()]
    outputs, total = [], 0
    for i in range(batches):
        outputs += run_checked(engine, requests[i * len(requests) // batches : (i + 1) * len(requests) // batches])
    for output in outputs:
        total += compared(arch, retention, tuple(output.prompt_tokens), tuple(output.output_tokens))
    assert total > 0.8 * NEW * len(outputs), "REF's ties leave too little to compare"
    return [output.cached_tokens for output in outputs]


@pytest.mark.parametrize(
    "arch, batches",
    [
        ("llama", 1),
        ("gemma3", 10),
        pytest.param("llama", 10, marks=pytest.mark.nightly),
        pytest.param("gemma3", 1, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_tokens_equal_ref_cold_and_warm(composition, arch, batches):
    engine = make_engine(
        model_of(arch), composition, overrides=["cache.memory=4MiB"], max_requests=7, max_step_tokens=64
    )
    cold, warm, again = (check(engine, arch, composition, batches) for _ in range(3))
    if "radix" not in composition:
        assert sum(cold + warm + again) == 0
        return
    size = engine.cache.block_size
    assert sum(cold) > 0 or size == 64
    assert not engine.cache.stats().evictions
    for prompt, cached in zip(prompts(), again):
        assert cached >= (len(prompt) - 1) // size * size


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("composition", [name for name in COMPOSITIONS if "radix" in name])
def test_tokens_equal_ref_under_pressure(composition, arch):
    """Pools so small that requests are preempted and cached blocks evicted, and chunks of seven tokens."""
    engine = make_engine(model_of(arch), composition, short=True, chunk=7, max_requests=7, max_step_tokens=64)
    for _ in range(2):
        check(engine, arch, composition, 1)
    assert engine.cache.stats().evictions > 0
