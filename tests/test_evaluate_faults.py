"""What becomes of an evaluation when something is wrong: logits that are no numbers, caches that lie, Ctrl-C."""

from __future__ import annotations

import csv
import json
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_evaluate import SHORT, SMALL, run

from kvframe.cli import main
from kvframe.commands.evaluate import draw, quality_table
from kvframe.config import compose
from kvframe.errors import CapacityError, PluginError
from kvframe.evaluation import runs
from kvframe.evaluation.evaluate import evaluate
from kvframe.evaluation.measures import Divergence
from kvframe.hf import random_model
from kvframe.report import console, figure_class

NAN = float("nan")
BLIND = """
    from kvframe_plugins.radix import RadixIndex

    class Saltless:
        salt = ""
        def __init__(self, request):
            self.request = request
        def __getattr__(self, name):
            return getattr(self.request, name)

    class Blind(RadixIndex):
        def match(self, request, limit):
            return super().match(Saltless(request), limit)
        def insert(self, request, blocks, length):
            return super().insert(Saltless(request), blocks, length)
    """


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "float32")


# -- numbers that are none -----------------------------------------------------------------------------------


def measured(p, q):
    found = Divergence.empty(len(p) + 1)  # the last position is not measured
    found.add(0, torch.tensor(p), torch.tensor(q), np.zeros(len(p), np.int64))
    return found.summary()


def test_nan_is_told_and_never_an_agreement():
    fine, broken = [0.0, 1.0, 2.0], [0.0, NAN, 2.0]
    assert measured([fine, fine], [fine, fine])["top1"] == 1.0
    for p, q in (([fine, broken], [fine, broken]), ([fine, fine], [fine, broken]), ([fine, broken], [fine, fine])):
        found = measured(p, q)
        assert found["top1"] == 0.5 and (found["positions"], found["nan_positions"]) == (2, 1)
        assert all(np.isnan(found[key]) for key in ("kl_mean", "kl_p99", "kl_max"))
        assert np.isnan(found["perplexity"]) == (q[1] is broken)
    assert measured([fine], [[-1e5, 1e5, 0.0]])["perplexity"] == float("inf")
    assert measured([], [])["perplexity"] is None


def row(name, kl, exact=False, **more):
    found = {"cache": name, "exact": exact, "reference": exact, "perplexity": kl, "kl_mean": kl, "kl_p99": kl}
    found |= {"top1": 0.5, "greedy_divergence": None, "greedy_tokens": 0, "needle_found": None, "needle_logprob": kl}
    return {**found, "bytes_per_token": 3.0, "positions": 7, **more}


def shown(capsys, rows):
    facts = {"model": {"name": "m", "dtype": "float32"}, "tokens": 8, "texts": 1, "reference": "good"}
    found = SimpleNamespace(rows=rows, noise_kl_mean=None, **facts)
    console().print(quality_table(found))
    out = capsys.readouterr().out
    return found, {line.split()[0]: line for line in out.splitlines() if line.strip()}


def test_nan_is_shown_and_never_the_best(capsys, tmp_path):
    rows = [row("good", 0.0, exact=True), row("bad", NAN), row("far", float("inf")), row("near", 0.25)]
    found, lines = shown(capsys, rows)
    assert lines["bad"].count("nan") == 4 and "*" not in lines["bad"]
    assert lines["near"].count("*") >= 3 and "2.50e-01*" in lines["near"]
    assert lines["far"].count("inf") == 4
    figure = draw(found, figure_class())
    figure.savefig(tmp_path / "kl.png")
    assert {text.get_text() for text in figure.axes[0].texts} == {"good", "near"}


def test_greedy_texts_that_never_differ_are_the_best(capsys):
    at = lambda name, n: row(name, 0.1, greedy_tokens=9, greedy_divergence=n)
    _, lines = shown(capsys, [row("good", 0.0, exact=True, greedy_tokens=9), at("a", 3), at("b", None)])
    assert "never*" in lines["b"] and "*" not in lines["a"] and "never " in lines["good"]


def test_a_model_that_answers_no_numbers_is_told(model, monkeypatch):
    forward = model.forward

    def broken(tokens, plan, wanted):
        logits = forward(tokens, plan, wanted).clone()
        logits[torch.as_tensor(plan.positions)[torch.as_tensor(wanted)] == 20] = NAN
        return logits

    monkeypatch.setattr(model, "forward", broken)
    found = run(model, "[paged,radix]", "greedy_tokens=4")
    assert all(np.isnan(row["kl_mean"]) and row["top1"] == 46 / 47 and row["nan_positions"] == 1 for row in found.rows)
    assert any("paged: logits of 1 of 47 positions" in note for note in found.notes)


# -- caches that lie -----------------------------------------------------------------------------------------


def test_a_cache_that_answers_tokens_of_other_salts_is_named(model, install, tmp_path):
    files = {"cache/index/blind.yaml": "# Blind.\n_target_: kv_blind_module.Blind\n"}
    files["cache/blind.yaml"] = "# Blind.\ndefaults:\n  - radix\n  - override index: blind\n"
    install("blind", BLIND, files)
    (tmp_path / "twice.txt").write_text("the same text of sixty-four bytes " * 8)
    more = [f"text={tmp_path / 'twice.txt'}", "max_tokens=34", "texts=2", "engine.max_requests=1"]
    with pytest.raises(PluginError, match="'blind': the cache kvframe.cache.BlockKVCache says that it has .* 'text 1'"):
        run(model, "[paged,blind]", *more)
    found = run(model, "[paged,radix]", *more)
    assert found.complete and not found.missing


def test_presets_that_fail_at_their_work_are_told_and_the_others_go_on(model, monkeypatch):
    monkeypatch.setattr("kvframe.lineup.groups", lambda: {"cache": ["paged", "radix", "contiguous"]})
    greedy = runs.greedy

    def failing(engine, *rest):
        if engine.cache.index.keeps:
            raise CapacityError("no room")
        return greedy(engine, *rest)

    monkeypatch.setattr(runs, "greedy", failing)
    found = run(model, "null")
    assert [row["cache"] for row in found.rows] == ["paged", "contiguous"] and "no room" in found.skipped["radix"]
    assert found.complete and not found.missing
    with pytest.raises(CapacityError, match="'radix': no room"):
        run(model, "[paged,radix]")


# -- progress ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caches", ["[paged,radix]", "[radix,int8]"])
def test_the_bar_ends_at_its_end(model, caches):
    bars = []

    @contextmanager
    def progress(title, total):
        bars.append([total, 0, []])

        def advance(n):
            bars[-1][1] += n
            bars[-1][2].append(bars[-1][1])

        yield advance

    needle = "needle={lengths:[150],depths:[0.5]}"
    overrides = [*SMALL, *SHORT, f"caches={caches}", "warm=true", "texts=2", "greedy_tokens=5", "noise=true", needle]
    found = evaluate(compose(overrides, "evaluate"), overrides, model=model, progress=progress)
    ((total, done, steps),) = bars
    assert done == total and steps == sorted(steps) and max(row["warm_hit_tokens"] for row in found.rows) >= 32


def test_what_there_is_less_of_than_asked_for_is_told(model, tmp_path):
    (tmp_path / "short.txt").write_text("x" * 100)
    found = run(model, "[paged]", f"text={tmp_path / 'short.txt'}", "texts=3", "greedy_tokens=300")
    assert found.texts == 2 and found.rows[0]["greedy_tokens"] == 256 - 24
    assert "enough for 2" in found.notes[0] and "greedy_tokens=300: 232 are generated" in found.notes[1]


# -- Ctrl-C --------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(monkeypatch, tmp_path):
    """SIGINT comes in the middle of the third cache."""
    monkeypatch.chdir(tmp_path)
    forced, seen = runs.forced, []

    def interrupting(engine, *rest, **more):
        seen.append(engine)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)
        return forced(engine, *rest, **more)

    monkeypatch.setattr(runs, "forced", interrupting)


STOPPED = ["evaluate", *SMALL, *SHORT, "caches=[int8,paged,fp8]", "max_tokens=24"]  # paged is the first to run


def test_ctrl_c_loses_no_row_that_is_complete(stopped, capsys):
    assert main([*STOPPED, "out=e.json", "plot=e.png"]) == 130
    found = json.loads(Path("e.json").read_text())
    assert found["complete"] is False and found["missing"] == ["fp8"]
    assert [row["cache"] for row in found["rows"]] == ["int8", "paged"] and found["rows"][0]["kl_mean"] > 0
    out, err = capsys.readouterr()
    assert "paged (reference)" in out and "int8" in out and "fp8" not in out
    assert "not complete: fp8 missing" in err and "written: e.json, not complete" in err
    assert "not drawn: plot=e.png" in err and err.endswith("interrupted\n") and "Traceback" not in err
    assert sorted(path.name for path in Path().iterdir()) == ["e.json"]


def test_ctrl_c_and_csv(stopped):
    assert main([*STOPPED, "out=e.csv"]) == 130
    rows = list(csv.DictReader(Path("e.csv").open()))
    found = [(row["cache"], row["complete"]) for row in rows]
    assert found == [("int8", "True"), ("paged", "True"), ("fp8", "False")]
    assert rows[0]["kl_mean"] and not rows[2]["kl_mean"]


def test_ctrl_c_before_the_first_row_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "forced", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert main([*STOPPED, "out=e.json"]) == 130
    out, err = capsys.readouterr()
    assert out == "" and err == "interrupted\n" and list(tmp_path.iterdir()) == []
