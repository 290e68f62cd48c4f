"""Decode steps of whole engines with the `triton` kernel, in buckets as CUDA graphs have them. Run by
test_triton_interpreter.py; on a GPU the graphs are real."""

from __future__ import annotations

import pytest
import torch
from test_graphs import again, tokens

from kvframe import graphs as graphing
from kvframe.config import build_engine, compose
from kvframe.graphs import Graphs
from kvframe.hf import random_model

OWN = ["model=random", "cache.memory=4MiB", "engine.clock=virtual", "engine.max_step_tokens=24", "engine.max_len=64"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("cache", ["sliding_window", "int8", "int4"])
def test_tokens_are_those_of_the_reference_kernel(cache, monkeypatch):
    monkeypatch.setattr(graphing, "TIMES", 1)
    model = random_model("tiny", "float32", device=DEVICE)
    plain = build_engine(compose([*OWN, f"cache={cache}", "kernel=reference", "engine.cuda_graphs=false"]), model)
    engine = build_engine(compose([*OWN, f"cache={cache}", "kernel=triton"]), model)
    assert engine.cache.graphs
    if DEVICE == "cpu":
        engine.graphs = model.graphs(engine.cache, 64, capture=again)
    assert isinstance(engine.graphs, Graphs)
    lengths = (5, 17)
    assert tokens(engine, lengths, 3) == tokens(plain, lengths, 3)
    assert len(engine.graphs) > 0
    engine.cache.check()
