"""Sampling against its definition, row by row; B rows, V vocabulary."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe import filters
from kvframe.errors import KVFrameError
from kvframe.filters import best, filter_, pick, top, trim_buckets_, trim_plain_, weights
from kvframe.sampling import BadLogitsError, SampleInput, resolve_seed, sample, uniforms
from kvframe.types import SamplingParams

NONE = np.zeros(0, np.int32)


def row(index=0, seed=0, tokens=NONE, **params) -> SampleInput:
    return SampleInput(SamplingParams(**params), np.asarray(tokens, np.int32), seed, index, name=f"r{seed}")


def draw_many(logits: list[float], n: int, **params) -> np.ndarray:
    """n draws from one distribution: draws number 0 .. n - 1 of seed 7."""
    shared = SamplingParams(**params)
    return sample(torch.tensor([logits]).expand(n, -1), [SampleInput(shared, NONE, 7, i) for i in range(n)]).tokens


def by_definition(logits: np.ndarray, r: SampleInput) -> int:
    """One row in plain Python, token by token, from the text at the top of sampling.py."""
    p, y = r.params, logits.astype(np.float32).copy()
    for token in set(r.tokens.tolist()):
        penalty = np.float32(p.repetition_penalty)
        y[token] = y[token] / penalty if y[token] > 0 else y[token] * penalty
    if p.temperature == 0:
        return min(range(len(y)), key=lambda i: (-y[i], i))
    z = (y - y.max()) / np.float32(max(p.temperature, 1e-10))
    bits = min(44, 62 - len(y).bit_length())
    w = [int(x) for x in torch.from_numpy(z).exp().double().numpy() * 2.0**bits]
    kept = sorted(range(len(y)), key=lambda i: (-z[i], i))
    if p.top_k:
        kept = kept[: p.top_k]
    if p.top_p < 1:
        need, mass, short = math.ceil(p.top_p * float(sum(w[i] for i in kept))), 0, []
        for i in kept:
            if mass >= max(need, 1):
                break
            short.append(i)
            mass += w[i]
        kept = short
    kept = sorted(i for i in kept if w[i] >= p.min_p * 2.0**bits)
    total = sum(w[i] for i in kept)
    target, mass = min(int(uniforms([r.seed], [r.index])[0] * float(total)), total - 1), 0
    for i in kept:
        mass += w[i]
        if mass > target:
            return i
    raise AssertionError("nothing kept")


params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 1e-4, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 3, 50, 200, 10**6]),
        "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    }
)


@st.composite
def batches(draw):
    """Logits [B, V] of several kinds (flat, peaked, full of ties, with -inf) and one input per row."""
    vocab = draw(st.sampled_from([1, 2, 33, 127, 128, 300, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits, rows = [], []
    for i in range(draw(st.integers(1, 6))):
        line = rng.standard_normal(vocab) * draw(st.sampled_from([0.01, 1, 5, 1000]))
        if draw(st.booleans()):
            line = np.round(line)  # ties
        if draw(st.booleans()) and vocab > 1:
            line[rng.integers(0, vocab, vocab // 2)] = -np.inf
            line[rng.integers(vocab)] = 1.0
        logits.append(line)
        rows.append(row(draw(st.integers(0, 99)), i, rng.integers(0, vocab, rng.integers(0, 9)), **draw(params)))
    return torch.tensor(np.array(logits), dtype=torch.float32), rows


@settings(max_examples=60, deadline=None)
@given(batches())
def test_every_row_follows_the_definition_and_ignores_its_neighbours(batch):
    logits, rows = batch
    before = logits.clone()
    together = sample(logits, rows).tokens.tolist()
    assert together == [by_definition(logits[i].numpy(), r) for i, r in enumerate(rows)]
    assert together == [sample(logits[i : i + 1], [r]).tokens[0] for i, r in enumerate(rows)]
    backwards = sample(logits.flip(0), rows[::-1]).tokens.tolist()
    assert together == backwards[::-1]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["flat", "wide", "bfloat16", "equal"])
def test_large_vocabulary_alone_mixed_and_in_chunks(kind, monkeypatch):
    vocab, generator = 9_001, torch.Generator().manual_seed(1)
    logits = torch.randn(8, vocab, generator=generator) * (0.3 if kind == "flat" else 3)
    logits = logits.bfloat16().float() if kind == "bfloat16" else logits * (kind != "equal")
    options = [{}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.9}, {"top_k": 2000}, {"min_p": 0.01}, {"top_p": 0.3}]
    rows = [row(i, i, temperature=1.0, **options[i % 6]) for i in range(7)] + [row()]
    mixed = sample(logits, rows).tokens.tolist()
    assert mixed == [sample(logits[i : i + 1], [r]).tokens[0] for i, r in enumerate(rows)]
    monkeypatch.setattr("kvframe.sampling.CPU_ELEMENTS", 3 * vocab)
    assert mixed == sample(logits, rows).tokens.tolist()
    monkeypatch.setattr(filters, "FEW", 1)  # everything through the whole vocabulary
    assert mixed == sample(logits, rows).tokens.tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 40, 700]), st.sampled_from([0.01, 2.0, 40.0]), st.booleans())
def test_buckets_equal_sort(seed, vocab, spread, ties):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(5, vocab, generator=generator) * spread
    z = z.round() if ties else z
    z -= z.amax(1, keepdim=True)
    knobs = torch.tensor([[0, 0.9, 0], [7, 1, 0], [50, 0.5, 0.1], [0, 1, 0], [10**6, 1e-6, 0]], dtype=torch.float64)
    w = weights(z, vocab)
    plain = filter_(w.clone(), z, knobs, trim_plain_)
    assert torch.equal(plain, filter_(w.clone(), z, knobs, trim_buckets_))
    assert (plain.amax(1) > 0).all() and torch.equal(plain[3], w[3])
    assert (plain[1] > 0).sum() <= 7 and (plain[4] > 0).sum() == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 31, 32, 128, 129, 5000]), st.integers(1, 200))
def test_best_and_top_take_the_lowest_id_of_ties(seed, vocab, k):
    y = torch.from_numpy(np.random.default_rng(seed).integers(-3, 3, (4, vocab))).float()
    y = torch.where(y == 0, torch.tensor([0.0, -0.0])[torch.arange(vocab) % 2], y)  # zeros of both signs are equal
    order = torch.sort(y, dim=1, descending=True, stable=True)[1]
    assert torch.equal(top(y, min(k, vocab)), order[:, : min(k, vocab)])
    assert torch.equal(best(y)[1], order[:, 0]) and torch.equal(best(y)[0], y.amax(1))


def test_frequencies_follow_the_probabilities():
    logits, n = [0.0, 1.0, 2.0, -1.0, 0.5], 20_000
    expected = torch.tensor(logits).div(0.8).softmax(0).numpy() * n
    seen = np.bincount(draw_many(logits, n, temperature=0.8), minlength=5)
    assert ((seen - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
    nucleus = np.bincount(draw_many(logits, n, temperature=0.8, top_p=0.8), minlength=5)
    expected = np.array([0, math.exp(1 / 0.8), math.exp(2 / 0.8), 0, 0])
    expected *= n / expected.sum()
    assert nucleus[[0, 3, 4]].sum() == 0 and np.abs(nucleus - expected).max() < 4 * math.sqrt(n / 4)


@pytest.mark.parametrize("across", ["index", "seed"])
def test_uniforms_are_uniform_and_independent(across):
    n = 200_000
    counter, fixed = np.arange(n).tolist(), [3] * n
    u = uniforms(fixed, counter) if across == "index" else uniforms(counter, fixed)
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == n
    bins = np.bincount((u * 100).astype(int), minlength=100)
    assert ((bins - n / 100) ** 2 / (n / 100)).sum() < 149  # chi-square, 99 degrees of freedom, p = 0.001
    pairs = np.bincount((u[:-1] * 10).astype(int) * 10 + (u[1:] * 10).astype(int), minlength=100)
    assert ((pairs - n / 100) ** 2 / (n / 100)).sum() < 149  # neighbours
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01
    assert uniforms([-1, 2**70 + 5], [0, 1]).tolist() == uniforms([2**64 - 1, 5], [0, 1]).tolist()


def test_seeds():
    assert resolve_seed(5) == 5 and resolve_seed(-1) == 2**64 - 1
    assert len({resolve_seed(5, i) for i in range(100)}) == 100
    assert resolve_seed(5, 3) == resolve_seed(5, 3) != resolve_seed(6, 3)
    assert resolve_seed(None) != resolve_seed(None)
    first = draw_many([0.0] * 50, 30, temperature=1.0)
    assert first.tolist() == draw_many([0.0] * 50, 30, temperature=1.0).tolist() and len(set(first.tolist())) > 10


def test_ties_take_the_lowest_id():
    logits = torch.zeros(3, 1000)
    logits[:, [17, 400, 999]] = 5.0
    rows = [row(), row(temperature=1.0, top_k=1), row(temperature=1.0, top_p=1e-12)]
    assert sample(logits, rows).tokens.tolist() == [17, 17, 17]


def test_edges_of_the_distribution():
    w = torch.tensor([[0, 5, 0, 3, 0]]).expand(3, -1)
    assert pick(w, torch.tensor([0.0, 5 / 8, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 3, 3]
    large = torch.full((1, 200_000), 2**44)
    assert pick(large, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [199_999]
    logits = torch.tensor([[-1e38, 3.0, 2.9999, 1e38]])
    for temperature in (1e-30, 1e-4, 1e4):
        assert sample(logits, [row(temperature=temperature)]).tokens.tolist() == [3]
    assert sample(torch.tensor([[7.0]]), [row(temperature=1.0, top_k=99, top_p=0.5)]).tokens.tolist() == [0]
    assert sample(torch.zeros(0, 5), []).tokens.shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bad_logits_name_the_request(value, temperature):
    logits = torch.randn(4, 300)
    logits[2, 171] = value
    with pytest.raises(KVFrameError, match=r"NaN or infinite logits for r22 \(row 2\)") as error:
        sample(logits, [row(seed=20 + i, temperature=temperature) for i in range(4)])
    assert isinstance(error.value, BadLogitsError) and error.value.rows == (2,)
    logits[2] = -math.inf
    with pytest.raises(BadLogitsError):
        sample(logits, [row(temperature=temperature) for _ in range(4)])


def test_repetition_penalty():
    logits = torch.tensor([[2.0, 1.9, -1.0], [-1.0, -1.1, -9.0], [2.0, 1.9, -1.0]])
    rows = [row(tokens=[0, 0, 2], repetition_penalty=1.2), row(tokens=[0], repetition_penalty=1.2), row(tokens=[0])]
    assert sample(logits, rows).tokens.tolist() == [1, 1, 0]
    rows = [row(repetition_penalty=2.0), row(tokens=[1] * 9, repetition_penalty=0.5), row()]  # no tokens; a bonus
    assert sample(logits, rows).tokens.tolist() == [0, 1, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    logits[0, [50, 60]] = 9.0  # the two best are equal
    rows = [row(logprobs=3, tokens=[50], repetition_penalty=5.0), row(), row(logprobs=0, temperature=5.0, top_k=3)]
    out = sample(logits, rows)
    raw = logits.log_softmax(1)
    assert out.logprobs[1] is None and out.logprobs[2]["top"] == {}
    for i in (0, 2):
        info = out.logprobs[i]
        assert info["token"] == out.tokens[i]
        assert info["logprob"] == pytest.approx(float(raw[i, out.tokens[i]]), abs=1e-5)
    assert out.tokens[0] == 60 and list(out.logprobs[0]["top"])[:2] == [50, 60]
    assert list(out.logprobs[0]["top"].values()) == pytest.approx(raw[0].topk(3)[0].tolist(), abs=1e-5)
    assert sample(logits, [row(), row(), row()]).logprobs is None
    assert len(sample(logits, [row(logprobs=999)] * 3).logprobs[0]["top"]) == 200


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_follows_the_same_definition():
    logits = torch.randn(6, 50_257, generator=torch.Generator().manual_seed(3)) * 3
    options = [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 500, "top_p": 0.9}, {"min_p": 0.1}]
    rows = [row(i, i, **{"temperature": 1.0, "logprobs": 2, **o}) for i, o in enumerate(options)]
    there = sample(logits.cuda(), rows)
    assert there.tokens.tolist() == sample(logits, rows).tokens.tolist()
    alone = [sample(logits[i : i + 1].cuda(), [r]).tokens[0] for i, r in enumerate(rows)]
    assert there.tokens.tolist() == alone
