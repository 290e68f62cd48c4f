"""Hits, tails, holes, canonical blocks and eviction: the cache's side of a prefix index, with the tokens of a model.
Its books are walked in test_contracts.py."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from strategies import context_for
from test_cache import control
from test_engine import ask, tokens

from kvframe.cache import BlockKVCache
from kvframe.engine import Engine
from kvframe.interfaces import CacheContext
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.testing.trie import TrieIndex


def indexed(context: CacheContext, size: int, blocks: int) -> BlockKVCache:
    """A paged cache over TrieIndex."""
    parts = control(["cache=paged", f"cache.layout.block_size={size}", "cache.num_blocks=2"]).parts
    return BlockKVCache(
        context, parts.layout, TrieIndex(), parts.eviction, parts.retention, parts.codec, num_blocks=blocks
    )


@functools.cache
def model_of(arch):
    return wrap(tiny_model(arch))


@pytest.mark.parametrize("blocks", [400, 24], ids=["roomy", "short"])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mistral"])
def test_hits_change_no_token(arch, size, blocks):
    """Cold, warm, and warm again; prompts that share every kind of beginning; poisoned storage."""
    model = model_of(arch)
    context = context_for(model, max_requests=6)
    blocks = max(blocks * 4 // size, 7) if blocks == 24 else blocks
    engine = Engine(
        model, indexed(context, size, blocks), max_len=96, max_requests=6, max_step_tokens=64, clock="virtual"
    )
    shared = tokens(50, 11)
    prompts = [shared[:n] + tokens(3, n) for n in (3, 4, 5, 15, 16, 17, 33, 50)] + [shared[:n] for n in (16, 17, 32)]
    cached = []
    for _ in range(3):
        outputs = run_checked(engine, [ask(prompt, max_new_tokens=5) for prompt in prompts])
        cached.append(sum(output.cached_tokens for output in outputs))
        for output in outputs:
            assert check_greedy(model.module, output.prompt_tokens, output.output_tokens) >= 3
    assert cached[1] > cached[0] >= 0
    assert blocks != 400 or cached[1] >= sum(len(p) for p in prompts) * 0.7


def test_a_hit_is_never_the_whole_prompt_and_salts_do_not_mix():
    model = model_of("llama")
    engine = Engine(model, indexed(context_for(model), 4, 60), max_len=96, max_requests=4, max_step_tokens=64)
    prompt = tokens(16)
    engine.generate([ask(prompt)])
    assert engine.generate([ask(prompt)])[0].cached_tokens == 15, "three blocks, and three slots of the fourth"
    import dataclasses

    other = dataclasses.replace(ask(prompt), salt="another tenant")
    assert engine.generate([other])[0].cached_tokens == 0
    engine.cache.invalidate()
    assert engine.generate([ask(prompt)])[0].cached_tokens == 0
    assert np.all(engine.cache.pools[0].refs == 0)
