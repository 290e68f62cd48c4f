"""The `cpu` kernel against the reference kernel, on steps that are built by hand: threads, tiles, what it shares
between steps. What every kernel promises is tried in test_contracts.py.

Shape legend: R requests, T tokens, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.no_codec import NoCodec
from numba.core import caching

from kvframe.kernels import cpu, cpu_prefill, native
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.cpu_work import FEW
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.parts import Band
from kvframe.testing.steps import Step, make_spec, make_step

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def attend(kernel, step: Step) -> torch.Tensor:
    return step.run(kernel)


def agree(step: Step) -> torch.Tensor:
    """Runs both kernels; the reference in fp32 on the same stored numbers."""
    kernel = CpuKernel()
    assert not kernel.unsupported(step.storage.spec, (NoCodec(), NoCodec()), step.storage.retention, "cpu", 16)
    copy = replace(step.storage, k={n: p.clone() for n, p in step.storage.k.items()},
                   v={n: p.clone() for n, p in step.storage.v.items()})  # fmt: skip
    got = attend(kernel, step)
    ReferenceKernel().store(step.k, step.v, copy, step.plan)
    for mine, theirs in ((step.storage.k, copy.k), (step.storage.v, copy.v)):
        assert torch.equal(mine["payload"].view(torch.uint8), theirs["payload"].view(torch.uint8))
    want = ReferenceKernel().attend(step.q.float(), copy, step.plan)
    assert got.dtype == step.q.dtype and got.shape == want.shape
    limit = TOLERANCE[step.storage.spec.dtype]
    torch.testing.assert_close(got.float(), want, atol=limit, rtol=limit)
    return got


MIXED = [(1, 1), (40, 1), (17, 1), (70, 30), (33, 33), (300, 1), (90, 3), (521, 1), (64, 1)]
RULES = {
    "full": Band(),
    "window": Band(24),
    "sinks": Band(24, 5),
    "wide": Band(300, 4),
    "many": Band(9, 270),
    "own": Band(1),
}
HEADS = [(4, 4), (9, 3), (8, 1)]
BLOCKS = [256, 600]  # others in test_contracts.py


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("rule", RULES)
def test_mixed_steps(block_size, rule):
    """Every pair of block size and mask; dtype and heads take turns so that each meets each."""
    turn = BLOCKS.index(block_size) + list(RULES).index(rule)
    for dtype, heads in (("float32", HEADS[turn % 3]), ("bfloat16", HEADS[(turn + 1) % 3])):
        agree(make_step(make_spec(*heads, dtype=dtype), MIXED, block_size, RULES[rule], seed=turn))


@given(
    requests=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16, 100]),
    window=st.none() | st.integers(1, 60),
    sinks=st.integers(0, 20),
    heads=st.sampled_from(HEADS),
)
@settings(max_examples=40, deadline=None)
def test_any_step(requests, block_size, window, sinks, heads):
    requests = [(max(context, chunk), chunk) for context, chunk in requests]
    agree(make_step(make_spec(*heads, k_dim=8, v_dim=8), requests, block_size, Band(window, sinks)))


@pytest.mark.parametrize("rule", ["full", "window", "sinks"])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_tiles_of_a_prefill(monkeypatch, rule, softcap):
    """Chunks that need several tiles of queries and of keys."""
    monkeypatch.setattr(cpu_prefill, "TILE_Q", 16)
    monkeypatch.setattr(cpu_prefill, "TILE_K", 24)
    agree(make_step(make_spec(4, 2, softcap=softcap), [(150, 100), (60, 60)], 16, RULES[rule]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["full", "wide", "sinks"])
def test_a_request_does_not_depend_on_its_neighbours(dtype, rule):
    """Decode: bit by bit the same alone, in a batch, with one thread, and beside prefill chunks."""
    spec = make_spec(9, 3, dtype=dtype)
    batch = attend(CpuKernel(), make_step(spec, MIXED, 16, RULES[rule]))
    threads, at = torch.get_num_threads(), 0
    for context, chunk in MIXED:
        if chunk <= FEW:
            for n in (1, threads):
                torch.set_num_threads(n)
                kernel = CpuKernel()
                alone = attend(kernel, make_step(spec, [(context, chunk)], 16, RULES[rule]))
                assert torch.equal(alone, batch[at : at + chunk]), (context, chunk, n)
        at += chunk


def test_result_does_not_depend_on_the_number_of_threads(monkeypatch):
    """Work that is shared out by items and by heads, with the team forced on and off."""
    step = make_step(make_spec(8, 4, 32, 32), [(2000, 1), (700, 2), (30, 1)], 16)
    results = []
    for threads in (1, 2, 3, 8):
        monkeypatch.setattr(cpu, "ALONE", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        results.append(attend(CpuKernel(), step))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_no_folder_for_the_cache(monkeypatch):
    """numba finds no place to keep what it compiled: it is compiled for this process."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert native.compiled("scatter").address


PLAIN = "float32", "float32", "float32"
COMPILED = [("scatter",), ("norm",), ("linear", False), ("linear", True), ("rotate", "bfloat16"), ("chain",)]
COMPILED += [("attend", *PLAIN, "float32", "float32"), ("encode", "bfloat16", "int8")]


@pytest.mark.parametrize("name", COMPILED, ids=str)
def test_a_process_finds_what_another_one_compiled(name):
    """numba takes what a function closes over into its key: another function there has another key in each process."""
    cells = [cell.cell_contents for cell in native.maker(*name).__closure__]
    assert cells and all(isinstance(value, int | str) for value in cells)


@pytest.mark.parametrize("chunk", [1, 40])
def test_missing_blocks_are_skipped(chunk):
    """A table entry 0 inside the visible range: those positions do not take part."""
    step = make_step(make_spec(6, 2), [(200, chunk), (90, chunk)], 16)
    for plan in (step.plan.host, step.plan):
        tables = plan.groups[0].tables
        tables[0, 2], tables[0, 5], tables[1, 0] = 0, 0, 0
    agree(step)


def test_two_plans_and_two_groups_in_turn():
    kernel = CpuKernel()
    steps = [
        make_step(make_spec(4, 2), [(60 + i, 1), (50, 20)], 16, rule, seed=i) for i, rule in enumerate(RULES.values())
    ]
    want = [attend(ReferenceKernel(), step) for step in steps]
    for _ in range(2):
        for step, expected in zip(steps, want):
            torch.testing.assert_close(kernel.attend(step.q, step.storage, step.plan), expected, atol=1e-5, rtol=1e-5)
    other = replace(steps[0].storage, retention=Band(7))  # same plan, another rule
    got = kernel.attend(steps[0].q, other, steps[0].plan)
    torch.testing.assert_close(got, ReferenceKernel().attend(steps[0].q, other, steps[0].plan), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plane", ["k", "v"])
def test_nan_that_is_visible_shows(plane):
    step = make_step(make_spec(4, 2), [(50, 1), (40, 1)], 16)
    kernel = CpuKernel()
    kernel.store(step.k, step.v, step.storage, step.plan)
    getattr(step.storage, plane)["payload"][step.plan.host.groups[0].tables[0, 1], 3] = float("nan")
    out = kernel.attend(step.q, step.storage, step.plan)
    assert out[0].isnan().any(-1).all() and not out[1].isnan().any()


def test_large_scores():
    step = make_step(make_spec(4, 2), [(300, 1), (50, 30)], 16)
    step.q *= 100.0
    agree(step)


def test_unsupported():
    kernel, codecs = CpuKernel(), (NoCodec(), NoCodec())
    assert kernel.unsupported(make_spec(), codecs, ModelRetention(), "cpu", 16) == []
    masked, coded = Band(kernel_mask=False), NoCodec()
    coded.plain = False
    for layer, pair, rule, device, word in (
        (make_spec(), codecs, Band(), "cuda:0", "cuda:0"),
        (make_spec(), (NoCodec(), coded), Band(), "cpu", "codec"),
        (make_spec(), codecs, masked, "cpu", "mask"),
        (make_spec(dtype="float16"), codecs, Band(), "cpu", "float16"),
        (make_spec(k_dim=12), codecs, Band(), "cpu", "12"),
    ):
        (reason,) = kernel.unsupported(layer, pair, rule, device, 16)
        assert word in reason
