"""Codecs inside a cache: the same codes whatever the chunking, bytes as declared, engines under suspicion, calibration.

Shape legend: L tokens of a request, Hq/Hkv heads, D size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from strategies import context_for

from kvframe.config import build_cache, compose
from kvframe.engine import Engine
from kvframe.interfaces import CacheContext
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing import tiny_model, wrap
from kvframe.testing.harness import poison_free, run_checked
from kvframe.types import LayerSpec, Request, SamplingParams

CODECS = {
    "int8": [],
    "int8 zero": ["cache.codec.symmetric=false", "cache.codec.percentile=97"],
    "fp8": [],
    "fp8 e5m2": ["cache.codec.format=e5m2", "cache.codec.scales=0.001"],
}
KERNELS = {"cpu": (CpuKernel, ReferenceKernel), "reference": (ReferenceKernel,)}
L, HQ, HKV, D = 75, 4, 2, 16


@dataclass(eq=False)
class Held:
    """A request for a cache, whose keys and values depend on position and salt only."""

    id: str
    tokens: np.ndarray = field(default_factory=lambda: np.arange(L + 1, dtype=np.int32))
    salt: str = ""
    keep: Any = None


def cache_of(codec: str, kernel: str = "cpu", cache: str = "paged", dtype: str = "float32", overrides=()):
    spec = LayerSpec(0, HQ, HKV, D, D, D**-0.5, dtype=dtype)
    context = CacheContext((spec,), dtype, max_len=128, max_requests=4, kernels=tuple(k() for k in KERNELS[kernel]))
    chosen = [f"cache={cache}", f"cache/codec={codec.split()[0]}", *CODECS[codec], "cache.num_blocks=20", *overrides]
    return build_cache(compose(chosen), context)


def vectors(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(L, heads, D, generator=torch.Generator().manual_seed(seed))


def drive(cache, request: Held, chunks, dtype=torch.float32) -> tuple[torch.Tensor, dict, int]:
    """Computes L tokens in chunks. Answers outputs `[computed, Hq, D]`, codes `[L, ...]` per plane, cached tokens."""
    q, k, v = (vectors(heads, seed).to(dtype) for seed, heads in enumerate((HQ, HKV, HKV)))
    poison_free(cache)
    at = start = cache.admit(request)
    outs, chunks = [], iter(chunks)
    while at < L:
        n = min(next(chunks), L - at)
        assert cache.grow(request, n)
        plan = cache.plan([(request, n)])
        outs.append(cache.attend(0, q[at : at + n], k[at : at + n], v[at : at + n], plan))
        cache.commit(request, n)
        cache.check()
        at += n
    table = torch.from_numpy(cache.tables.view(cache.tables[request.id], 0).astype(np.int64))
    layer = cache.storage.layers[0]
    codes = {
        (kind, name): plane[table].flatten(0, 1)[:L].clone()
        for kind, planes in (("k", layer.k), ("v", layer.v))
        for name, plane in planes.items()
    }
    return torch.cat(outs), codes, start


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_chunked_whole_and_prefix_hit_are_the_same(codec, kernel):
    """Codes bit by bit, attention within 1e-5; each kernel's codes are those of the other."""
    whole, codes, _ = drive(cache_of(codec, "reference"), Held("whole"), [L])
    radix = cache_of(codec, kernel, "radix")
    for name, chunks in (("chunks", [20, 1, 1, 17, 3, 30, 1, 50]), ("hit", [3, 40, 1, 99]), ("decode", [1] * L)):
        cache = radix if name != "decode" else cache_of(codec, kernel)
        outs, its_codes, start = drive(cache, Held(name), chunks)
        assert (start > 60) == (name == "hit")
        for plane, held in codes.items():
            assert torch.equal(its_codes[plane].contiguous().view(torch.uint8), held.contiguous().view(torch.uint8))
        torch.testing.assert_close(outs, whole[start:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_are_those_of_the_tensors(codec):
    cache = cache_of(codec, dtype="bfloat16")
    request = Held("one")
    drive(cache, request, [L], torch.bfloat16)
    layer, stats = cache.storage.layers[0], cache.stats()
    tensors = sum(plane.nbytes for plane in (*layer.k.values(), *layer.v.values()))
    assert cache.storage.nbytes() == tensors == stats.groups[0].block_bytes * 21
    assert stats.total("used") * 16 == stats.groups[0].block_bytes * L
    specs = [*cache.codec.planes(D).values()]
    assert cache.token_bytes[0] == 2 * HKV * sum(spec.nbytes("bfloat16") for spec in specs)


def test_half_of_the_bytes_of_bf16():
    """As allocated, at head size 64."""
    sizes = {}
    for codec in ("none", "int8", "fp8"):
        spec = LayerSpec(0, 9, 3, 64, 64, 0.125, dtype="bfloat16")
        context = CacheContext((spec,), "bfloat16", max_len=128, kernels=(CpuKernel(),))
        sizes[codec] = build_cache(
            compose(["cache=paged", f"cache/codec={codec}", "cache.num_blocks=8"]), context
        ).storage.nbytes()
    assert sizes["int8"] <= 0.54 * sizes["none"] and sizes["fp8"] <= 0.54 * sizes["none"]


@functools.cache
def model_of():
    return wrap(tiny_model("llama"))


WINDOW = ["cache.retention.window=12", "cache.retention.sinks=3"]
ENGINES = {
    "int8": ["cache=int8"],
    "fp8": ["cache=fp8"],
    "radix int8": ["cache=radix", "cache/codec=int8"],
    "window fp8": ["cache=sliding_window", "cache/codec=fp8", *WINDOW],
    "turned int8": ["cache=sliding_window", "cache/codec=int8", *WINDOW, "cache.retention.positions=cache"],
    "fixed fp8": ["cache=radix", "cache/codec=fp8", "cache.codec.scales=0.02"],
    "contiguous int8": ["cache=contiguous", "cache/codec=int8", "cache.codec.group_size=4"],
}  # fmt: skip


def run_engine(overrides, kernels, chunk=None, batches=1, **options):
    model = model_of()
    context = context_for(model, kernels=kernels, max_requests=8, **options)
    cache = build_cache(compose(overrides), context)
    engine = Engine(
        model, cache, max_len=context.max_len, max_requests=8, max_step_tokens=64, prefill_chunk=chunk, clock="virtual"
    )
    text = np.random.default_rng(0).integers(3, 250, 60).tolist()
    prompts = [text[:n] + [n] * 3 for n in (3, 15, 16, 17, 40, 55)]
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=1)
    requests = [Request(prompt_tokens=p, sampling=params) for p in prompts]
    outputs = []
    for i in range(batches):
        outputs += run_checked(engine, requests[i * len(requests) // batches : (i + 1) * len(requests) // batches])
    return outputs, cache


@pytest.mark.parametrize("name", ENGINES)
def test_engines_under_suspicion(name):
    """Poisoned storage, invariants after every step, both kernels; chunks and hits change nothing that matters."""
    plain = [o.replace("=int8", "=paged").replace("=fp8", "=paged") for o in ENGINES[name] if "codec" not in o]
    room = [] if "contiguous" in name else ["cache.num_blocks=40"]
    exact, _ = run_engine([*plain, *room], (ReferenceKernel(),))
    runs = [
        run_engine([*ENGINES[name], *room], kernels, **more)
        for kernels, more in (
            ((CpuKernel(), ReferenceKernel()), {}),
            ((CpuKernel(), ReferenceKernel()), {"chunk": 5, "batches": 3}),
            ((ReferenceKernel(),), {"chunk": 9}),
        )
    ]
    assert not runs[0][1].exact
    for outputs, _cache in runs:
        assert all(len(output.output_tokens) == 8 for output in outputs)
        for output, wanted in zip(outputs, exact):  # the first token: nothing has gone another way yet
            assert abs(output.logprobs[0]["logprob"] - wanted.logprobs[0]["logprob"]) < 0.3
    first = [[o.output_tokens[0] for o in outputs] for outputs, _ in runs]
    assert first[0] == first[1] == first[2]


def test_calibration_sees_every_vector():
    from kvframe.commands.calibrate import watch

    cache = cache_of("fp8", cache="paged")
    sizes = watch(cache, 1)
    drive(cache, Held("one"), [20, 1, 60])
    assert float(sizes[0]["k"]) == float(vectors(HKV, 1).abs().max())
    assert float(sizes[0]["v"]) == float(vectors(HKV, 2).abs().max())
