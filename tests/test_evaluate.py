"""`kvframe evaluate` against REF and plain numpy: exact caches cost nothing, lossy ones what they are seen to cost."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvframe.config import compose
from kvframe.evaluation import measures, needle, runs, texts
from kvframe.evaluation.evaluate import evaluate
from kvframe.evaluation.teacher import Limits, Text, teach
from kvframe.hf import random_model
from kvframe.lineup import lineup, running
from kvframe.testing import teacher_logits
from kvframe.text import TextCodec

SMALL = [
    "model=random",
    "model.shape=tiny",
    "model.dtype=float32",
    "cache.memory=16MiB",
    "engine.max_len=256",
    "kernel=reference",
]
SHORT = ["max_tokens=48", "chunk=7", "decode_tokens=5", "needle=null", "greedy_tokens=null"]
HALVES = """
    import torch
    from kvframe.interfaces import Codec
    from kvframe.types import PlaneSpec

    class Halves(Codec):
        exact = False
        def planes(self, dim):
            return {"payload": PlaneSpec((dim,), "float8_e4m3fn")}
        def encode(self, x):
            return {"payload": x.to(torch.float8_e4m3fn)}
        def decode(self, planes, dtype):
            return planes["payload"].to(dtype)
    """


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "float32")


def install_halves(install):
    """A codec that loses most bits, as somebody's package would bring it."""
    files = {"cache/codec/halves.yaml": "# 8 bits.\n_target_: kv_halves_module.Halves\n"}
    install(
        "halves",
        HALVES,
        {**files, "cache/halves.yaml": "# 8 bits.\ndefaults:\n  - paged\n  - override codec: halves\n"},
    )


def run(model, caches, *overrides):
    overrides = [*SMALL, *SHORT, f"caches={caches}", *overrides]
    return evaluate(compose(overrides, "evaluate"), overrides, model=model)


def pieces(model, longest=48, n=1, source="builtin"):
    return texts.split(texts.tokens_of(source, TextCodec(vocab_size=model.vocab_size), longest * n), longest, n)


def log_softmax(logits) -> np.ndarray:
    x = logits.numpy().astype(np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def expected(tokens, p, q) -> dict[str, float]:
    """The figures of one text from logits [L, V], in plain numpy."""
    log_p, log_q = log_softmax(p)[:-1], log_softmax(q)[:-1]
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    nll = -log_q[np.arange(len(kl)), tokens[1:]]
    figures = {"kl_mean": kl.mean(), "kl_p99": np.percentile(kl, 99), "kl_max": kl.max()}
    return {**figures, "perplexity": np.exp(nll.mean()), "top1": (log_p.argmax(-1) == log_q.argmax(-1)).mean()}


# -- teacher forcing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(7, 12, 8), Limits(64, 64, 2), Limits(1, 3, 8)])
def test_every_position_of_every_text_has_the_logits_of_ref(model, limits):
    (candidate,) = lineup(["paged cache.num_blocks=9"], SMALL)
    rows = [np.random.default_rng(n).integers(0, 256, n).astype(np.int32) for n in (33, 1, 50, 16, 40)]
    asked = [Text(tokens, salt=str(i), decode=4, first=3 * i, number=i) for i, tokens in enumerate(rows)]
    got = {i: [] for i in range(len(rows))}
    with running(candidate, model, warm=False) as engine:
        for text, start, n, logits in teach(model, engine.cache, asked, limits):
            assert len(logits) == max(min(n, start + n - text.first), 0)
            got[text.number].append(logits)
            engine.cache.check()
        assert engine.cache.stats().total("reserved") == 0
    for i, tokens in enumerate(rows):
        torch.testing.assert_close(torch.cat(got[i]), teacher_logits(model.module, tokens)[3 * i :], atol=1e-4, rtol=0)


def test_exact_caches_cost_nothing_and_perplexity_is_that_of_ref(model, tmp_path):
    text = tmp_path / "twice.txt"  # the second text is the first again: a prefix index could answer it
    text.write_text("".join(f"{i} times {i} is {i * i}. " for i in range(9))[:48] * 2)
    found = run(
        model, "[paged,radix,contiguous,'paged cache.layout.block_size=1']", f"text={text}", "texts=2", "warm=true"
    )
    assert (found.reference, found.added, found.texts, found.tokens) == ("paged", False, 2, 96)
    assert [row["reference"] for row in found.rows] == [True, False, False, False]
    (tokens, again) = pieces(model, n=2, source=str(text))
    logits = teacher_logits(model.module, tokens)
    assert (tokens == again).all()
    for row in found.rows:
        assert row["exact"] and row["kl_max"] < 1e-9 and row["top1"] == 1.0 and row["positions"] == 94
        assert row["perplexity"] == pytest.approx(expected(tokens, logits, logits)["perplexity"], rel=1e-5)
        warm = row["warm_hit_tokens"], row["warm_kl_mean"]
        assert warm == (0, None) if row["cache"] != "radix" else warm[0] >= 16 and warm[1] < 1e-9


class Rounding:
    """All a cache does for one text in one step, in plain torch, with keys and values in 8 bits."""

    def __init__(self, layers):
        self.layers = layers

    def attend(self, layer, q, k, v, plan):
        spec = self.layers[layer]
        k, v = (x.to(torch.float8_e4m3fn).float().repeat_interleave(spec.q_heads // spec.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
        scores = scores.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), float("-inf"))
        return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def test_a_lossy_codec_costs_what_plain_torch_says(model, install):
    install_halves(install)
    found = run(model, "[halves,paged]")
    (tokens,) = pieces(model)
    model.bind(Rounding(model.layers))
    q = model.forward(tokens, SimpleNamespace(positions=torch.arange(len(tokens))), np.arange(len(tokens)))
    wanted = expected(tokens, teacher_logits(model.module, tokens), q)
    lossy, exact = found.rows
    assert (lossy["exact"], exact["reference"], found.reference) == (False, True, "paged")
    assert {key: lossy[key] for key in wanted} == pytest.approx(wanted, rel=1e-3) and wanted["kl_mean"] > 1e-5
    assert lossy["bytes_ratio"] == 0.25 and exact["bytes_ratio"] == 1
    assert lossy["bytes_per_token"] == sum((la.k_dim + la.v_dim) * la.kv_heads for la in model.layers)
    assert exact["kv_bytes_peak"] == 48 * exact["bytes_per_token"]


def test_a_window_costs_what_ref_under_its_mask_says(model):
    found = run(model, "['sliding_window cache.retention.window=8 cache.retention.sinks=2']")
    first, row = found.rows
    assert (
        found.added and first["reference"] and found.reference == "paged" and "paged is the reference" in found.notes[0]
    )
    (candidate,) = lineup([row["cache"]], SMALL)
    with running(candidate, model, warm=False) as engine:
        rule = engine.cache.parts.retention
    (tokens,) = pieces(model)
    wanted = expected(tokens, teacher_logits(model.module, tokens), teacher_logits(model.module, tokens, rule))
    assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=1e-3) and row["kl_mean"] > 1e-5


def test_logits_that_do_not_fit_into_memory_lie_in_a_file(model, monkeypatch):
    before = run(model, "[paged,'sliding_window cache.retention.window=8']").rows[1]
    monkeypatch.setattr(measures, "HELD", 0)
    monkeypatch.setattr(measures, "ROWS", 3)
    after = run(model, "[paged,'sliding_window cache.retention.window=8']").rows[1]
    assert {k: before[k] for k in ("kl_mean", "kl_p99", "perplexity")} == pytest.approx(
        {k: after[k] for k in ("kl_mean", "kl_p99", "perplexity")}
    )


def test_the_noise_of_the_model_itself_is_told(model):
    overrides = [*SMALL, *SHORT, "caches=[paged]", "model.dtype=bfloat16", "noise=true", "max_tokens=24"]
    found = evaluate(compose(overrides, "evaluate"), overrides)
    (tokens,) = pieces(model, 24)
    (row,) = found.rows
    assert row["noise_kl_mean"] == found.noise_kl_mean and 1e-8 < found.noise_kl_mean < 0.01 and row["kl_mean"] == 0
    exact = run(model, "[paged]", "noise=true")
    assert exact.noise_kl_mean is None and "float32 already" in exact.notes[0]


def test_kl_knows_impossible_tokens_and_numbers_that_are_none():
    inf, nan = float("inf"), float("nan")
    p = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, -inf], [0.0, 1.0, nan]])
    q = torch.tensor([[0.0, 0.0, -inf], [0.0, -inf, 0.0], [0.0, 1.0, 2.0]])
    same, impossible, none = measures.kl(p, q.double().log_softmax(-1)).tolist()
    assert same == 0 and impossible == inf and none != none


# -- greedy, needles -----------------------------------------------------------------------------------------


def test_greedy_texts_differ_where_they_differ_first(model):
    found = run(model, "[paged,radix,'sliding_window cache.retention.window=4']", "greedy_tokens=16", "texts=2")
    assert [row["greedy_divergence"] for row in found.rows[:2]] == [None, None]
    assert 0 <= found.rows[2]["greedy_divergence"] < 16
    assert runs.first_difference([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 4]]) == 2
    assert runs.first_difference([[1, 2]], [[1, 2]]) is None and runs.first_difference([[1, 2]], [[1]]) == 1


def test_a_haystack_has_its_fact_at_its_depth_and_its_answer_is_scored(model):
    codec = TextCodec(vocab_size=model.vocab_size)
    filler = np.full(10, ord("."), np.int32)
    found = needle.cells([150, 200], [0, 0.5, 1], filler, codec)
    assert [(cell.length, cell.depth) for cell in found] == [(n, d) for n in (150, 200) for d in (0, 0.5, 1)]
    for cell in found:
        text = codec.tokenizer.decode(cell.tokens)
        answer = text[-cell.answer :].strip()
        assert len(cell.tokens) == cell.length and text.count(answer) == 2 and text.endswith(f"is {answer}")
        before, after = text.split(" The secret number")[0], text.split(f"is {answer}. ")[1].split("\n")[0]
        assert set(before + after) == {"."}
        assert cell.depth == pytest.approx((len(before) - 1) / (len(before) + len(after) - 1), abs=0.02)
    cell, logits = found[0], torch.zeros(found[0].answer, 256)
    assert cell.score(logits)["logprob"] == pytest.approx(-np.log(256))
    logits[range(cell.answer), cell.tokens[-cell.answer :].tolist()] = 5.0
    assert cell.score(logits)["found"] and cell.score(-logits)["rank"] == 255


def test_needles_are_asked_through_the_cache(model):
    (row,) = run(model, "[radix]", "needle={lengths:[150,170],depths:[0.5]}").rows
    codec = TextCodec(vocab_size=model.vocab_size)
    tokens = texts.tokens_of("builtin", codec, 48)
    for cell, got in zip(needle.cells([150, 170], [0.5], tokens, codec), row["needle"]):
        wanted = cell.score(teacher_logits(model.module, cell.tokens)[-cell.answer - 1 : -1])
        assert got == pytest.approx(wanted, abs=1e-4)
    assert row["needle_found"] == 0.0 and row["needle_logprob"] == pytest.approx(
        np.mean([got["logprob"] for got in row["needle"]])
    )


def test_a_needle_is_found_by_a_model_that_answers_right(model, monkeypatch):
    """Two haystacks, one after the other; the answer to the second has one token that is not the best."""
    codec, forward, seen = TextCodec(vocab_size=model.vocab_size), model.forward, []
    cells = needle.cells([150], [0.1, 0.9], texts.tokens_of("builtin", codec, 48), codec)

    def knowing(tokens, plan, wanted):
        logits = forward(tokens, plan, wanted).clone()
        for position, token in zip(plan.positions.tolist(), tokens.tolist()):
            seen[position:] = [token]
        (cell, *_) = [i for i, cell in enumerate(cells) if cell.tokens[: len(seen)].tolist() == seen] or [None]
        if cell is not None:  # not one of the texts
            at = plan.positions[torch.as_tensor(wanted)]
            answers = torch.as_tensor(cells[cell].tokens[1:].astype(np.int64))[at]
            logits[torch.arange(len(at)), answers] = 60.0
            wrong = (at == 148) & (cell == 1)
            logits[wrong, 7] = 61.0
        return logits

    monkeypatch.setattr(model, "forward", knowing)
    (row,) = run(model, "[paged]", "needle={lengths:[150],depths:[0.1,0.9]}", "engine.max_requests=1").rows
    first, second = row["needle"]
    assert (first["found"], first["rank"], second["found"], second["rank"]) == (True, 0, False, 1)
    assert first["logprob"] == pytest.approx(0, abs=1e-3) and row["needle_found"] == 0.5
    assert second["logprob"] == pytest.approx(np.log(1 / (1 + np.e)) / cells[1].answer, abs=1e-3)
