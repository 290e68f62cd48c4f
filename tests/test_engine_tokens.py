"""Greedy tokens equal REF: every architecture x strategy x chunk size, with room and without."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from strategies import LENGTHS, STRATEGIES, make_engine

from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.types import Request, SamplingParams

ARCHS = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "deepseek_v3")
NEW = 8


@functools.cache
def model_of(arch: str):
    return wrap(tiny_model(arch))


@functools.cache
def prompts_of(arch: str):
    random = np.random.default_rng(7)
    return [random.integers(3, 250, n).tolist() for n in LENGTHS]


@functools.cache
def compared(arch: str, prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
    """REF by teacher forcing, remembered: the same output under another strategy needs no second look."""
    return check_greedy(model_of(arch).module, prompt, output)


def requests_of(arch: str, new: int = NEW):
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return [Request(prompt_tokens=p, sampling=params) for p in prompts_of(arch)]


# The whole grid of layouts, chunk sizes and room runs nightly. Of the conditions these three have every value of both;
# chunks of one token, the slowest, are daily for one layout.
DAILY = {(1, True), (7, False), (512, True)}
SLOW = {("paged-1", 1), ("paged-16", 1), ("paged-64", 1)}
CASES = [
    pytest.param(
        strategy,
        chunk,
        short,
        id=f"{strategy}-{chunk}-{'short' if short else 'roomy'}",
        marks=() if (chunk, short) in DAILY and (strategy, chunk) not in SLOW else pytest.mark.nightly,
    )
    for strategy in STRATEGIES
    for chunk in (1, 7, 512)
    for short in (False, True)
]


@pytest.mark.parametrize("strategy, chunk, short", CASES)
@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_tokens_equal_ref(arch, strategy, chunk, short):
    engine = make_engine(model_of(arch), strategy, short, chunk)
    outputs = run_checked(engine, requests_of(arch))
    assert [o.prompt_tokens for o in outputs] == prompts_of(arch)
    checked = 0
    for output in outputs:
        assert output.finish_reason == "length" and len(output.output_tokens) == NEW
        checked += compared(arch, tuple(output.prompt_tokens), tuple(output.output_tokens))
    assert checked >= 0.9 * NEW * len(outputs), f"only {checked} tokens could be compared: the tiny model is too flat"
    # under a window of half a block a request never holds more than when it was admitted
    if short and strategy != "contiguous" and (arch, strategy) != ("mistral", "paged-16"):
        assert engine.summary()["preemptions"] > 0, "this test wants preemption"
    if strategy == "contiguous":
        assert engine.summary()["preemptions"] == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_cpu_kernel_decodes_the_same_tokens(arch):
    pytest.importorskip("numba")
    from kvframe.kernels.cpu import CpuKernel

    kernels = (CpuKernel(), ReferenceKernel())
    for chunk in (7, 512):
        engine = make_engine(model_of(arch), "paged-16", True, chunk, kernels=kernels)
        assert {layer.kernel.name for layer in engine.cache.storage.layers} == {"cpu"}
        for output in run_checked(engine, requests_of(arch)):
            compared(arch, tuple(output.prompt_tokens), tuple(output.output_tokens))


def test_a_request_does_not_depend_on_its_neighbours():
    prompt = prompts_of("llama")[9]
    request = Request(prompt_tokens=prompt, sampling=SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    alone = make_engine(model_of("llama"), "paged-16").generate([request])[0]
    crowd = make_engine(model_of("llama"), "paged-16").generate(requests_of("llama"))[9]
    assert alone.output_tokens == crowd.output_tokens
