"""The engine against REF on one tiny model: ragged prompts, chunked prefill, decode, and hits in a prefix index.

Two runs over one cache with small blocks. The second one's prompts begin with texts of the first:

    run 1   prompts of 1, 6, 21 and 37 tokens, and 8 new ones each      prefill in chunks of 7, beside decoding
    run 2   [prompt + output + 3 tokens] of the two longest             what was published is not computed again
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from kvframe.config import build_cache, compose
from kvframe.engine import Engine
from kvframe.hf import HFModel
from kvframe.interfaces import CacheContext
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.coverage.shrink import SPECIAL
from kvframe.testing.harness import run_checked
from kvframe.testing.oracle import check_greedy, teacher_logits
from kvframe.types import Request, SamplingParams

CONFIG = "base/coverage"  # the cache, see conf/base/coverage.yaml
MAX_LEN = 64
LENGTHS = (1, 6, 21, 37)
NEW, MORE = 8, 3
CHUNK, BUDGET = 7, 16
TOLERANCE = 1e-3  # highest difference of a log-probability, in units of the logits' standard deviation


@dataclass(frozen=True)
class Agreement:
    """What was compared: tokens up to REF's first tie, all logits, and prompt tokens that came from the index."""

    tokens: int
    error: float
    hits: int


def compare(module: nn.Module, model: HFModel) -> Agreement:
    """Raises AssertionError where the engine and REF differ, and whatever the engine raises."""
    engine = _engine(model)
    draws = np.random.default_rng(5)
    prompts = [draws.integers(3, min(SPECIAL, model.vocab_size), n).tolist() for n in LENGTHS]
    first = run_checked(engine, _requests(prompts, model))
    again = [[*o.prompt_tokens, *o.output_tokens, *prompts[-1][:MORE]] for o in first[-2:]]
    second = run_checked(engine, _requests(again, model))
    hits, tokens, error = sum(o.cached_tokens for o in second), 0, 0.0
    assert hits > 0, "no prompt token of the second run was found in the index"
    for output in (*first, *second):
        assert output.finish_reason == "length", f"a request ended with {output.finish_reason!r}: {output.error}"
        error = max(error, _logits_error(module, output))
        tokens += check_greedy(module, output.prompt_tokens, output.output_tokens)
    assert error <= TOLERANCE, f"log-probabilities differ from REF's by {error:.2g} (allowed {TOLERANCE:g})"
    assert tokens, "REF's two best logits are equal everywhere: nothing could be compared"
    return Agreement(tokens, error, hits)


def _engine(model: HFModel) -> Engine:
    context = CacheContext(
        layers=model.layers, dtype=model.dtype, max_len=MAX_LEN, max_requests=len(LENGTHS), max_step_tokens=BUDGET,
        kernels=(ReferenceKernel(),), learned_sinks=model.learned_sinks, trained_len=model.max_len,
    )  # fmt: skip
    return Engine(
        model, build_cache(_composed(), context), max_len=MAX_LEN, max_requests=len(LENGTHS),
        max_step_tokens=BUDGET, prefill_chunk=CHUNK, clock="virtual", pack_weights=False,
    )  # fmt: skip


@functools.cache
def _composed():
    return compose((), CONFIG)


def _requests(prompts: list[list[int]], model: HFModel) -> list[Request]:
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=model.vocab_size)
    return [Request(prompt_tokens=prompt, sampling=params) for prompt in prompts]


def _logits_error(module: nn.Module, output) -> float:
    """The worst difference of a log-probability over all output tokens and the whole vocabulary."""
    ids = [*output.prompt_tokens, *output.output_tokens[:-1]]
    logits = teacher_logits(module, ids)[len(output.prompt_tokens) - 1 :]  # [NEW, V]
    found = torch.full(logits.shape, float("nan"))
    for row, step in zip(found, output.logprobs, strict=True):
        row[torch.tensor(list(step["top"]))] = torch.tensor(list(step["top"].values()))
    off = (found - logits.log_softmax(-1)).abs().max() / logits.std().clamp_min(1e-6)
    return float(off.nan_to_num(float("inf")))
