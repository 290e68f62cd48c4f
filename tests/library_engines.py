"""Engines whose attention a library's kernel computes, against REF."""

from __future__ import annotations

import functools

import numpy as np
from strategies import context_for

from kvframe.config import build_cache, compose
from kvframe.engine import Engine
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.types import Request, SamplingParams

NEW = 6
LENGTHS = (1, 15, 16, 17, 33, 64, 40)
SHARED = 21  # tokens that every second prompt begins with


@functools.cache
def model_of(arch: str):
    return wrap(tiny_model(arch))


def requests_of(samples: int = 1) -> list[Request]:
    rng = np.random.default_rng(11)
    start = rng.integers(3, 250, SHARED).tolist()
    prompts = [rng.integers(3, 250, n).tolist() for n in LENGTHS]
    prompts = [start + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, n=samples)
    return [Request(prompt_tokens=prompt, sampling=params) for prompt in prompts]


def engine_of(arch: str, kernel, overrides: list[str], chunk: int = 7, **options) -> Engine:
    """An engine in which `kernel` serves every layer."""
    model = model_of(arch)
    context = context_for(model, kernels=(kernel,), **options)
    cache = build_cache(compose(overrides), context)
    assert {layer.kernel.name for layer in cache.storage.layers} == {kernel.name}
    sizes = {name: getattr(context, name) for name in ("max_len", "max_requests", "max_step_tokens")}
    return Engine(model, cache, **sizes, prefill_chunk=chunk, clock="virtual")


def check(engine: Engine, samples: int = 1, rule=None) -> None:
    """Runs requests in poisoned storage, twice, and holds their tokens to REF (under the mask of a retention)."""
    for _ in range(2):
        outputs = run_checked(engine, requests_of(samples))
        assert len(outputs) == samples * len(LENGTHS)
        compared = sum(check_greedy(engine.model.module, o.prompt_tokens, o.output_tokens, rule) for o in outputs)
        assert compared > 0.8 * NEW * len(outputs), "REF's ties leave too little to compare"
