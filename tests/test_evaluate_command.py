"""`kvframe evaluate` as a command, and the adapter for lm-eval."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from test_evaluate import SHORT, SMALL, install_halves, log_softmax, run

from kvframe.cli import main
from kvframe.errors import ConfigError, MissingPackageError
from kvframe.evaluation import harness
from kvframe.evaluation.teacher import Limits
from kvframe.hf import random_model
from kvframe.lineup import lineup, running
from kvframe.testing import teacher_logits
from kvframe.text import TextCodec


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "float32")


# -- lm-eval -------------------------------------------------------------------------------------------------


class Task:
    """What the harness asks, as it asks it."""

    def __init__(self, *args):
        self.args = args


def test_the_harness_gets_the_numbers_of_ref(model):
    (candidate,) = lineup(["radix engine.max_len=40"], SMALL)
    with running(candidate, model, warm=False) as engine:
        lm = harness.wrap(harness.Scorer(engine, Limits(7, 16, 4)), type("LM", (), {}))
        asked = [("a cache is ", "a place"), ("a cache", " is fast"), ("", "words"), ("x" * 60, "yes")]
        scored = lm.loglikelihood([Task(*pair) for pair in asked])
        (rolled,) = lm.loglikelihood_rolling([Task("some words of a text that is longer than forty bytes are")])
        written = lm.generate_until(
            [Task("abc", {"until": ["zz"], "max_gen_toks": 5}), Task("x" * 99, {"max_gen_toks": 9})]
        )
        assert len(written) == 2
    for (context, continuation), (value, greedy) in zip(asked, scored):
        ids = np.array(list((context + continuation).encode()) if context else [model.bos_id, *b"words"])[-40:]
        c = len(continuation) + len(context) - len(context.rstrip())
        log_q = log_softmax(teacher_logits(model.module, ids))[:-1]
        assert value == pytest.approx(log_q[range(-c, 0), ids[-c:]].sum(), abs=1e-3)
        assert greedy == bool((log_q[-c:].argmax(-1) == ids[-c:]).all())
    ids = [model.bos_id, *b"some words of a text that is longer than forty bytes are"]
    first, last = np.array(ids[:40]), np.array(ids[-40:])  # the last piece reaches back, its first 23 tokens are known
    wanted = log_softmax(teacher_logits(model.module, first))[range(39), first[1:]].sum()
    wanted += log_softmax(teacher_logits(model.module, last))[:-1][range(40 - len(ids), 0), last[40 - len(ids) :]].sum()
    assert rolled == pytest.approx(wanted, abs=1e-3)


class Pairs:
    """A tokenizer of pairs: 'ab' is one token, and so is a letter alone. No special tokens; '~' is nothing."""

    def encode(self, text, add_special_tokens=True):
        words = re.findall("..?", text.replace("~", ""))
        return [ord(word[0]) + (100 * (ord(word[1]) - 96) if len(word) > 1 else 0) for word in words]


def test_a_seam_within_a_token_leaves_the_continuation_what_differs(model):
    (candidate,) = lineup(["paged engine.max_len=6"], SMALL)
    with running(candidate, model, warm=False) as engine:
        scorer = harness.Scorer(engine, Limits(7, 16, 4))
        scorer.codec = TextCodec(Pairs())
        a, ab, cd, ef, c = ord("a"), ord("a") + 200, ord("c") + 400, ord("e") + 600, ord("c")
        pair = lambda *texts: (lambda tokens, n: (tokens.tolist(), n))(*scorer._pair(*texts))
        start = model.bos_id
        assert pair("ab", "cdef") == ([ab, cd, ef], 2)
        assert pair("abc", "d") == ([ab, cd], 1), "abc and abcd have two tokens each"
        assert pair("abc", "def") == ([ab, cd, ef], 1), "as long as something is left, the context's length decides"
        assert pair("a", "b") == ([start, ab], 1), "nothing is before it"
        assert pair("~", "a") == ([start, a], 1) and pair("", "a") == ([start, a], 1) and pair("", "") == ([start], 0)
        assert pair("ababab", "ababab") == ([ab] * 6, 3) and pair("abababab", "abababab") == ([ab] * 6, 4)
        assert pair("ab", "ab" * 9) == ([ab] * 6, 5), "the first of them have nothing to be predicted from"
        with pytest.raises(ConfigError, match="leaves the continuation '~' no token of its own behind 'abc'"):
            scorer._pair("abc", "~")
        assert pair("abc", "") == ([ab, c], 0)


def test_the_harness_finds_nothing_that_it_computed_before(model):
    (candidate,) = lineup(["radix"], SMALL)
    with running(candidate, model, warm=False) as engine:
        scorer = harness.Scorer(engine, Limits(64, 64, 4))
        asked = [("x" * 40, "yes"), ("x" * 40, "no")]
        first, again = ([value for value, _ in scorer.loglikelihood(asked)] for _ in range(2))
        assert first == pytest.approx(again, abs=1e-5) and engine.cache.stats().hit_tokens == 0
        scorer.generate([("x" * 40, {"max_gen_toks": 2})] * 2)
        assert engine.cache.stats().hit_tokens == 0
        forward = model.forward
        engine.model.forward = lambda *args: forward(*args) * float("nan")
        try:
            ((value, greedy),) = scorer.loglikelihood([("a", "\0")])
        finally:
            del engine.model.forward
        assert np.isnan(value) and not greedy, "the index of the first NaN is no answer"


def test_the_harness_is_asked_for_when_it_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPackageError, match="pip install lm-eval"):
        run(None, "[paged]", "lm_eval=[arc_easy]")


# -- the command ---------------------------------------------------------------------------------------------


def test_the_command_writes_rows_and_a_picture(install, tmp_path, monkeypatch, capsys):
    install_halves(install)
    monkeypatch.chdir(tmp_path)
    caches = "caches=[paged,halves,'cache=radix cache/codec=halves']"
    assert main(["evaluate", *SMALL, *SHORT, caches, "greedy_tokens=8", "out=eval.json", "plot=kl.png"]) == 0
    found = json.loads(Path("eval.json").read_text())
    assert [row["cache"] for row in found["rows"]] == ["paged", "halves", "cache=radix cache/codec=halves"]
    assert {"cache", "perplexity", "kl_mean", "kl_p99", "top1", "bytes_per_token"} <= set(found["rows"][0])
    assert found["config"]["max_tokens"] == 48 and found["versions"]["torch"] and found["model"]["dtype"] == "float32"
    assert found["rows"][1]["kl_mean"] == pytest.approx(found["rows"][2]["kl_mean"], rel=1e-6)
    assert Path("kl.png").read_bytes()[:4] == b"\x89PNG"
    out = capsys.readouterr().out
    assert "paged (reference)" in out and "KL mean" in out and "*" in out
    assert main(["evaluate", *SMALL, *SHORT, caches, "out=eval.csv", "max_tokens=9"]) == 0
    rows = list(csv.DictReader(Path("eval.csv").open()))
    assert [row["cache"] for row in rows] == [row["cache"] for row in found["rows"]] and float(rows[1]["kl_mean"]) > 0


def test_tables_of_six_caches_fit_into_100_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    caches = ["paged", "int8", "radix", "cache=radix cache/codec=int4 cache.codec.group=32 cache.layout.block_size=32"]
    caches += ["paged cache/retention=sliding_window cache.retention.window=32 cache.retention.sinks=4", "contiguous"]
    more = ["max_tokens=48", "decode_tokens=4", "warm=true", "greedy_tokens=3", "needle={lengths:[150],depths:[0.5]}"]
    assert main(["evaluate", *SMALL, *SHORT[:1], *more, f"caches={caches}"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100 and "…" not in out
    assert out.count("paged (reference)") == 2 and "tails in it" in out and "KL warm" in out
    assert all(word in out for name in caches for word in name.split())


def test_presets_that_cannot_be_built_are_left_out_and_told(model, install, monkeypatch):
    install("odd", files={"cache/odd.yaml": "# Odd.\ndefaults:\n  - paged\nnum_blocks: 0\n"})
    monkeypatch.setattr("kvframe.lineup.groups", lambda: {"cache": ["odd", "paged"]})
    found = run(model, "null")
    assert [row["cache"] for row in found.rows] == ["paged"] and "cache.num_blocks=0" in found.skipped["odd"]
    with pytest.raises(ConfigError, match="'odd': cache.num_blocks=0"):
        run(model, "[paged,odd]")


WRONG = {
    "caches=[]": "names no cache", "caches=[pagd]": "preset 'pagd', which does not exist",
    "text=nowhere.txt": "text=nowhere.txt cannot be read: No such file", "text=one.txt": "has 1 token",
    "max_tokens=1": "max_tokens=1 cannot be used\n  valid: an integer >= 2", "chunk=0": "chunk=0 cannot be used",
    "max_tokens=300": "300 tokens are more than the 256 that the cache 'paged'", "warm=1": "warm=1 cannot be used",
    "needle={lengths:[257],depths:[0.5]}": "needle.lengths: 257 tokens", "needle.depths=[2]": "needle.depths=\\[2\\]",
    "needle={lengths:[20],depths:[0.5]}": "needle.lengths has 20: ", "out=eval.txt": "has the ending '.txt'",
    "texts=0": "texts=0 cannot", "greedy_tokens=-1": "greedy_tokens=-1 cannot", "lm_eval=3": "lm_eval=3 cannot",
    "text=latin.txt": "is not UTF-8",
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_mistakes_are_told_before_the_work(override, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("x")
    Path("latin.txt").write_bytes(b"caf\xe9")
    defaults = [o for o in SHORT if o.partition("=")[0] != override.partition("=")[0]]
    defaults = ["needle.lengths=[200]" if o == "needle=null" and "depths" in override else o for o in defaults]
    caches = [] if override.startswith("caches") else ["caches=[paged]"]
    assert main(["evaluate", *SMALL, *defaults, *caches, override]) == 2
    error = capsys.readouterr().err
    assert re.search(WRONG[override], error) and "Traceback" not in error
