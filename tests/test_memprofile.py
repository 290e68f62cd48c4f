"""Where the memory goes: bytes from the tensors that exist, by their dtype."""

from __future__ import annotations

import json

import pytest
import torch

from kvframe import Request, SamplingParams, build, compose
from kvframe.cli import main
from kvframe.memprofile import activations, by_dtype, profile

TINY = ["model=random", "model.shape=tiny", "engine.max_len=64", "engine.max_requests=2", "kernel=reference"]


def run(engine, prompt=24, new=3):
    tokens = list(range(3, 3 + prompt))
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    with activations(engine.model) as seen:
        engine.generate([Request(prompt_tokens=tokens, sampling=sampling)])
    return seen


@pytest.mark.parametrize(
    "overrides",
    [["cache=paged"], ["cache=int8"], ["cache=int4"], ["cache=paged", "model.dtype=bfloat16"]],
    ids=lambda overrides: " ".join(overrides),
)
def test_bytes_are_those_of_the_tensors(overrides):
    engine = build(compose([*TINY, *overrides, "cache.num_blocks=8"]))
    report, stats = profile(engine), engine.cache.stats()
    group = stats.groups[0]
    planes = (group.num_blocks + 1) * group.block_bytes  # the null block is allocated too
    assert sum(report["kv_allocated"].values()) == planes + group.tail_pool
    assert report["kv_pool"] == group.num_blocks * group.block_bytes + group.tail_pool
    wide = 2 if "bfloat16" in str(overrides) else 4
    numbers = {p.data_ptr(): p.numel() for p in engine.model.module.parameters()}
    assert report["weights"][engine.model.dtype] >= wide * sum(numbers.values())
    assert sum(report["weights"].values()) == engine.model.weight_bytes


def test_a_width_of_four_bytes_is_never_assumed():
    half, full = (
        profile(build(compose([*TINY, "cache=paged", "cache.num_blocks=8", f"model.dtype={dtype}"])))
        for dtype in ("bfloat16", "float32")
    )
    assert 2 * half["kv_allocated"]["bfloat16"] == full["kv_allocated"]["float32"]


def test_activations_grow_with_the_step_and_leave_the_model_as_it_was():
    engine = build(compose([*TINY, "cache=paged", "cache.num_blocks=8"]))
    short, long = run(engine, prompt=8), run(engine, prompt=48)
    assert (short.tokens, long.tokens) == (8, 48)
    # the residual stream of all tokens, and the wider inner vectors of an MLP, exist at once
    assert long.peak > 4 * short.peak > 0
    assert "forward" not in vars(engine.model)


def test_memory_that_is_shared_counts_once():
    tensor = torch.zeros(100)
    assert by_dtype([tensor, tensor[:10], tensor.view(10, 10), torch.zeros(4, dtype=torch.int8)]) == {
        "float32": 400,
        "int8": 4,
    }


def test_generate_reports_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["generate", *TINY, "cache=paged", "cache.num_blocks=8", "prompt=hello", "sampling.max_new_tokens=2"]
    assert main([*command, "out=a.json", "profile=true"]) == 0
    said = capsys.readouterr().err
    assert "weights" in said and "KV allocated" in said and "activations, peak" in said
    memory = json.loads((tmp_path / "a.json").read_text())["summary"]["memory"]
    assert memory["activations_peak"] > 0 and memory["total"] > sum(memory["weights"].values())
    assert main([*command, "out=b.json"]) == 0
    assert json.loads((tmp_path / "b.json").read_text())["summary"]["memory"]["activations_peak"] is None
