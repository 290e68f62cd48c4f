"""Seeded workloads of token ids, and the transformers baselines that run them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Job:
    """One request: a prompt of token ids and the number of tokens to generate (EOS ignored)."""

    prompt: list[int]
    new: int


def mixed(
    requests: int = 32, seed: int = 0, prompts=(16, 512), outputs=(16, 256), vocabulary: int = 40_000
) -> list[Job]:
    """Ragged prompts and outputs, uniform between the bounds."""
    random = np.random.default_rng(seed)
    sizes = zip(random.integers(*prompts, requests, endpoint=True), random.integers(*outputs, requests, endpoint=True))
    return [Job(random.integers(100, vocabulary, n).tolist(), int(new)) for n, new in sizes]


def uniform(requests: int, prompt: int, new: int, seed: int = 0, vocabulary: int = 40_000) -> list[Job]:
    random = np.random.default_rng(seed)
    return [Job(random.integers(100, vocabulary, prompt).tolist(), new) for _ in range(requests)]


def hf_generate(module, jobs: list[Job], cache: str) -> float:
    """Seconds of `generate` on the left-padded batch; every row runs to the longest output."""
    longest, new = max(len(j.prompt) for j in jobs), max(j.new for j in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, longest - len(job.prompt) :] = 1
    began = time.perf_counter()
    with torch.inference_mode():
        out = module.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False,
            cache_implementation=None if cache == "dynamic" else cache, pad_token_id=0,
        )  # fmt: skip
    seconds = time.perf_counter() - began
    assert out.shape[1] == longest + new, "transformers stopped early"
    return seconds


def hf_continuous(module, jobs: list[Job]) -> float:
    """Seconds of transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=512)
    generation = GenerationConfig(
        do_sample=False, max_new_tokens=max(j.new for j in jobs), eos_token_id=-1, pad_token_id=0
    )
    done = 0
    with module.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5, warmup=False
    ) as manager:
        began = time.perf_counter()
        for job in jobs:
            manager.add_request(job.prompt, max_new_tokens=job.new, eos_token_id=-1)
        while done < len(jobs):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done += 1
                assert result.error is None, result.error
            assert manager.is_running() or result is not None, "continuous batching stopped"
        seconds = time.perf_counter() - began
    return seconds
