"""Decode steps in buckets: what a CUDA graph would start again is called again here, on the same static memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvframe import graphs as graphing
from kvframe.config import build_engine, compose
from kvframe.graphs import BATCHES, Graphs, Static, batch_bucket, doubled
from kvframe.hf import random_model
from kvframe.types import GroupPlan, Request, SamplingParams, StepPlan

OWN = ["model=random", "cache.memory=4MiB", "kernel=reference", "engine.clock=virtual", "engine.max_step_tokens=24"]
OWN += ["engine.max_len=64"]


def again(device):
    """Stands in for `CudaCapture`: the same memory in and out, and the work is done when it is replayed."""

    def capture(run):
        for _ in range(2):
            run()
        result = torch.full_like(run(), float("nan"))
        return (lambda: result.copy_(run())), result

    return capture


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(graphing, "TIMES", 1)


def engine_of(model, *overrides, monkeypatch=None):
    """With graphs where `monkeypatch` is given, whatever the kernel says of itself."""
    engine = build_engine(compose([*OWN, *overrides]), model)
    if monkeypatch is not None:
        engine.graphs = model.graphs(engine.cache, 64, capture=again)
    return engine


def tokens(engine, lengths=(1, 17, 40, 5, 9), new=6):
    requests = [
        Request(prompt_tokens=list(range(3, 3 + n)), sampling=SamplingParams(max_new_tokens=new + i, ignore_eos=True))
        for i, n in enumerate(lengths)
    ]
    return [output.output_tokens for output in engine.generate(requests)]


@pytest.mark.parametrize("cache", ["contiguous", "paged", "radix", "sliding_window", "int8"])
def test_tokens_are_those_without_graphs(cache, monkeypatch):
    model = random_model("tiny", "float32")
    engine = engine_of(model, f"cache={cache}", monkeypatch=monkeypatch)
    monkeypatch.setattr(graphing, "CONTEXT", 16)  # several buckets of context, too
    assert tokens(engine) == tokens(engine_of(model, f"cache={cache}"))
    engine.cache.check()
    requests = {key[0] for key in engine.graphs._made}
    assert {1, 2} < requests <= {1, 2, 4, 8} and len({key[1] for key in engine.graphs._made}) > 1


def test_a_request_does_not_depend_on_who_fills_its_bucket(monkeypatch):
    model = random_model("tiny", "float32")
    lengths = (4, 11, 30)
    alone = [tokens(engine_of(model, monkeypatch=monkeypatch), (n,), 6 + i)[0] for i, n in enumerate(lengths)]
    assert tokens(engine_of(model, monkeypatch=monkeypatch), lengths) == alone


def test_rows_of_padding_are_numbers(monkeypatch):
    """Whoever looks at a whole batch of activations must not find NaN there."""
    model = random_model("tiny", "float32")
    engine = engine_of(model, monkeypatch=monkeypatch)
    tokens(engine, (3, 4, 5))
    assert any(key[0] == 4 for key in engine.graphs._made)
    assert all(logits.isfinite().all() for _, _, logits in engine.graphs._made.values())


def test_a_bucket_is_captured_when_it_comes_again(monkeypatch):
    monkeypatch.setattr(graphing, "TIMES", 4)
    model = random_model("tiny", "float32")
    engine = engine_of(model, monkeypatch=monkeypatch)
    tokens(engine, (3,), 4)
    assert not len(engine.graphs)
    tokens(engine, (3,), 4)
    assert len(engine.graphs) == 1


def test_what_cannot_be_captured_is_run_as_it_is(monkeypatch, caplog):
    def refusing(device):
        def capture(run):
            raise RuntimeError("called a synchronizing operation")

        return capture

    model = random_model("tiny", "float32")
    engine = engine_of(model)
    engine.graphs = model.graphs(engine.cache, 64, capture=refusing)
    assert tokens(engine) == tokens(engine_of(model))
    assert not len(engine.graphs) and "synchronizing" in engine.graphs.why
    assert len([record for record in caplog.records if "no CUDA graphs" in record.message]) == 1


def test_engines_that_share_a_model_see_its_new_weights(monkeypatch):
    model = random_model("tiny", "float32")
    one, other = (engine_of(model, monkeypatch=monkeypatch) for _ in range(2))
    before = tokens(one), tokens(other)
    for weight in model.module.parameters():
        weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    one.invalidate()
    assert tokens(one) == tokens(engine_of(model)) != before[0]
    made = dict(other.graphs._made)
    assert tokens(other) == tokens(one)
    assert not set(map(id, made.values())) & set(map(id, other.graphs._made.values()))


def test_a_step_is_taken_again_in_the_same_memory():
    """New tokens, places and lengths in the memory of the step before, and nobody where nobody is."""
    static = Static(4, 1024, (2,), torch.device("cpu"))
    ids, slots, tables = static.ids, static.plan.groups[0].slots, static.plan.groups[0].tables

    def plan(requests, first):
        at = np.arange(requests)
        group = GroupPlan(at + first, np.full((requests, 1), first, np.int32), (at + first + 1).astype(np.int32))
        return StepPlan(at + first, np.arange(requests + 1), (group,), at.astype(np.int32), ((),), 1, 9)

    static.fill(np.array([7, 8, 9]), plan(3, 5))
    assert ids.tolist() == [7, 8, 9, 0] and slots.tolist() == [5, 6, 7, 0]
    assert tables.tolist() == [[5, 0], [5, 0], [5, 0], [0, 0]]
    static.fill(np.array([1]), plan(1, 3))
    assert ids.tolist() == [1, 0, 0, 0] and slots.tolist() == [3, 0, 0, 0]
    assert tables.tolist() == [[3, 0], [0, 0], [0, 0], [0, 0]]
    assert static.plan.groups[0].context_lens.tolist() == [4, 0, 0, 0]
    assert static.plan.host.groups[0].context_lens.tolist() == [4, 0, 0, 0]
    assert static.plan.query_starts.tolist() == [0, 1, 2, 3, 4] and static.keep.tolist() == [0, 1, 2, 3]
    for tensor in (ids, slots, tables, static.plan.positions):
        assert tensor.data_ptr() % 16 == 0


def test_logits_stay_when_the_next_step_runs(monkeypatch):
    model = random_model("tiny", "float32")
    engine, seen = engine_of(model, monkeypatch=monkeypatch), []
    forward = engine.graphs.forward
    monkeypatch.setattr(engine.graphs, "forward", lambda *args: seen.append(forward(*args)) or seen[-1])
    tokens(engine, (3,))
    assert len(seen) == 5 and all(row.isfinite().all() for row in seen) and not torch.equal(seen[0], seen[1])


def test_steps_that_are_not_pure_decoding_go_the_other_way():
    plan = StepPlan(None, None, (), None, (), 1, 9)
    assert Graphs.take(plan, np.array([0]))
    assert not Graphs.take(plan, np.array([], dtype=np.int64))
    assert not Graphs.take(StepPlan(None, None, (), None, (), 2, 9), np.array([0]))


def test_buckets():
    assert [batch_bucket(n) for n in (1, 3, 5, 9, 17, 256, 257)] == [1, 4, 8, 16, 24, 256, 512]
    assert all(batch_bucket(n) == n for n in BATCHES)
    assert [doubled(n, 1024) for n in (1, 1024, 1025, 5000)] == [1024, 1024, 2048, 8192]


def test_who_may_be_captured():
    """Open groups, second queries and kernels that read the plan on the host may not."""
    model = random_model("tiny", "float32")
    assert not engine_of(model).cache.graphs
    engine = engine_of(model)
    for layer in engine.cache.storage.layers:
        layer.kernel = type("Graphed", (type(layer.kernel),), {"graphs": lambda self, storage: True})()
    assert engine.cache.graphs
    engine.cache.storage.layers[0].sink_queries = True
    assert not engine.cache.graphs
