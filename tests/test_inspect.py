"""`kvframe inspect`: the record of a run says what really happened, and the page needs nothing but itself."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from kvframe import Request, SamplingParams, build, compose
from kvframe.cli import main
from kvframe.inspection import Recorder
from kvframe.inspection.page import page
from kvframe.inspection.text import lines, tree_lines

TINY = ["model=random", "model.shape=tiny", "engine.max_len=96", "engine.max_requests=4", "kernel=reference"]
SMALL = [*TINY, "cache.layout.block_size=4"]
SHARED = np.arange(20, 42)  # 22 tokens: a common beginning


def record(overrides, requests, new=6):
    """The steps, and the engine."""
    engine = build(compose(overrides))
    recorder = Recorder(engine)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    asked = [Request(prompt_tokens=tokens, sampling=params, id=f"r{i}") for i, tokens in enumerate(requests)]
    steps = [recorder.step(events) for events in engine.steps(asked)]
    return [step for step in steps if step is not None], engine


@pytest.fixture(scope="module")
def shared():
    """Three prompts with a common beginning of 22 tokens, in a radix cache."""
    prompts = [np.append(SHARED, [50 + i, 60, 61]) for i in range(3)]
    return record([*SMALL, "cache=radix", "cache.num_blocks=40", "engine.prefill_chunk=32"], prompts)


def test_a_step_tells_what_was_computed_read_and_written(shared):
    steps, engine = shared
    assert sum(step["tokens"] for step in steps) == engine.meter.computed
    for step in steps:
        assert step["tokens"] == sum(request["new"] for request in step["requests"])
        for request in step["requests"]:
            (group,) = request["groups"]
            end = request["start"] + request["new"]
            assert group["read"] == [[0, end]], "full attention reads everything"
            assert sum(n for _, _, n in group["wrote"]) == request["new"]
            block, slot, _ = group["wrote"][0]
            assert group["table"][request["start"] // 4] == block and request["start"] % 4 == slot
            assert group["read_bytes"] == end * sum(engine.cache.token_bytes)


def test_hits_copies_and_sharing_are_seen(shared):
    steps, _ = shared
    admitted = [one for step in steps for one in step["admitted"]]
    assert [one["hit"] for one in admitted] == [0, 22, 22]  # the others waited for what the first one computes
    second = next(step for step in steps if len(step["admitted"]) == 2)
    assert [copy["slots"] for copy in second["copies"]] == [2, 2]  # 22 = 5 blocks of 4, and 2 slots of the sixth
    r1 = next(request for request in second["requests"] if request["id"] == "r1")["groups"][0]
    assert all("x3" in mark and "'" in mark for mark in r1["marks"][:5])
    assert second["pools"][0]["shared"] == 5 == second["pools"][0]["states"].count("s")
    assert {one for step in steps for one in step["finished"]} == {"r0", "r1", "r2"}


def test_the_index_is_shown_as_it_is(shared):
    steps, engine = shared
    tree = steps[-1]["tree"]
    held = {i for node in tree for i in node["blocks"][0] if i}
    assert held == set(engine.cache.index.published(0).tolist())
    top, rest = tree[0], [node for node in tree if node["parent"] == 0]
    assert top["parent"] is None and top["tokens"] == SHARED[:20].tolist()  # what was hit in whole blocks
    assert [node["tokens"] for node in rest] == [SHARED[20:].tolist()]
    assert sum(node["parent"] == tree.index(rest[0]) for node in tree) == 3
    shown = list(tree_lines(tree, lambda ids: " ".join(map(str, ids))))
    assert len(shown) == len(tree) and shown[0].startswith("0-19 ") and shown[1].startswith("  20-21")


def test_a_window_drops_what_it_will_not_read():
    overrides = [*SMALL, "cache=sliding_window", "cache.num_blocks=30", "cache.retention.window=8"]
    overrides += ["cache.retention.sinks=2", "engine.prefill_chunk=8"]
    steps, _ = record(overrides, [np.arange(30)], new=4)
    dropped = [one for step in steps for one in step["dropped"]]
    assert dropped and {one["id"] for one in dropped} == {"r0"}
    last = steps[-1]["requests"][0]
    (group,) = last["groups"]
    end = last["start"] + 1
    assert group["read"] == [[0, 2], [end - 8, end]]
    gone = [i for i, mark in enumerate(group["marks"]) if mark == "-"]
    assert gone and all(4 * i >= 2 and 4 * i + 4 <= end - 8 for i in gone)
    assert any(line.strip().startswith("dropped") for step in steps for line in lines(step))


def test_evictions_and_preemptions_are_seen():
    small = [*SMALL, "cache=radix", "cache.num_blocks=14", "engine.max_len=56", "engine.max_requests=2"]
    steps, engine = record(small, [np.arange(i, i + 24) for i in (0, 50, 100, 150)], new=12)
    evicted = [i for step in steps for one in step["evicted"] for i in one["blocks"]]
    assert evicted and len(evicted) == engine.cache.stats().evictions
    assert len([name for step in steps for name in step["preempted"]]) == engine.meter.preemptions


def test_a_page_holds_all_steps_and_fetches_nothing(shared):
    steps, _ = shared
    nasty = {"id": "r0", "sample": 0, "prompt": "</script><b>", "text": "a", "finish_reason": "length"}
    text = page({"cache": "cache=<x>", "model": "tiny", "steps": steps, "requests": [nasty]}, str)
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', text, re.DOTALL)[1])
    assert len(data["steps"]) == len(steps) and data["requests"][0]["prompt"] == "</script><b>"
    assert "<title>cache=&lt;x&gt; at work</title>" in text
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text.replace(json.dumps(data), ""))


def test_the_command_prints_steps_and_writes_page_and_record(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["inspect", *SMALL, "cache=radix", "cache.num_blocks=60", "sampling.max_new_tokens=2"]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_tokens": [1, 2, 3, 4, 5, 6, 7]}\n{"prompt_tokens": [1, 2, 3, 4, 5, 9]}\n')
    assert main([*command, f"prompts={prompts}", "steps=1", "out=a.html"]) == 0
    shown, said = capsys.readouterr()
    assert "step 0: 7 tokens" in shown and "step 1:" not in shown and "block 1 whole, block 2 slots 0-2" in shown
    assert "more steps" in said and "<title>" in (tmp_path / "a.html").read_text()
    assert main([*command, f"prompts={prompts}", "out=a.json"]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["steps"][0]["tokens"] == 7 and found["steps"][1]["admitted"][0]["hit"] == 4


@pytest.mark.parametrize("wrong", ["steps=-1", "steps=many", "out=a.txt"])
def test_odd_values_are_refused(wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *SMALL, "prompt=x", wrong]) == 2
    error = capsys.readouterr().err
    assert wrong.split("=")[1] in error and "valid" in error
