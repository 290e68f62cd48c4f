"""Whole engines on a GPU: the Triton kernels, CUDA graphs and steps that are started ahead, against the reference."""

from __future__ import annotations

import pytest
import torch

from kvframe.config import build_engine, compose
from kvframe.hf import random_model
from kvframe.types import Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OWN = ["model=random", "model.shape=smollm2_135m", "cache.memory=2GiB", "engine.max_len=512", "engine.max_requests=64"]


@pytest.fixture(scope="module")
def model():
    return random_model("smollm2_135m", "float32", device="cuda")


def tokens(model, requests, *overrides) -> tuple[list[list[int]], object]:
    engine = build_engine(compose([*OWN, *overrides]), model)
    found = [output.output_tokens for output in engine.generate(requests)]
    engine.cache.check()
    return found, engine


def asked(n: int, new=40) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return [Request(prompt_tokens=list(range(7 + i, 57 + i * 5)), sampling=sampling) for i in range(n)]


@pytest.mark.parametrize("cache", ["contiguous", "paged", "radix", "sliding_window", "int8", "fp8", "int4"])
def test_tokens_are_those_of_the_reference_kernel(model, cache):
    want, _ = tokens(model, asked(4), f"cache={cache}", "kernel=reference", "engine.cuda_graphs=false")
    got, engine = tokens(model, asked(4), f"cache={cache}", "kernel=triton")
    assert got == want and engine.ahead
    assert engine.graphs.why is None and len(engine.graphs) > 0
    plain, _ = tokens(model, asked(4), f"cache={cache}", "kernel=triton", "engine.cuda_graphs=false")
    assert plain == want


def test_alone_and_in_a_batch_of_64(model):
    requests = asked(64)
    together, _ = tokens(model, requests, "cache=paged", "kernel=triton")
    for i in (0, 17, 63):
        assert tokens(model, [requests[i]], "cache=paged", "kernel=triton")[0] == [together[i]]
        assert tokens(model, [requests[i]], "cache=paged", "kernel=reference")[0] == [together[i]]


def test_a_step_ahead_changes_nothing(model):
    sampling = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, stop_token_ids=tuple(range(0, 49152, 40)))
    requests = [Request(prompt_tokens=list(range(5, 30 + 3 * i)), sampling=sampling) for i in range(9)]
    engine = build_engine(compose([*OWN, "cache=radix"]), model)
    got = [output.output_tokens for output in engine.generate(requests)]
    plain = build_engine(compose([*OWN, "cache=radix", "engine.ahead=false"]), model)
    assert engine.ahead and not plain.ahead
    assert got == [output.output_tokens for output in plain.generate(requests)]
