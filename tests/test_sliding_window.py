"""Retention `sliding_window`: the rule, tokens against REF under its mask, and StreamingLLM's positions.

Shape legend: L tokens of a request, T tokens of a step, Hq/Hkv heads, D size.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.sliding_window import SlidingWindow
from strategies import make_engine

from kvframe.config import build_cache, compose
from kvframe.errors import ConfigError, IncompatibleCacheError
from kvframe.groups import layer_groups
from kvframe.interfaces import CacheContext
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.memory import live_blocks
from kvframe.storage import choose
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.types import LayerSpec, Request, Rotary, SamplingParams

torch.set_num_threads(1)
RULE = ["cache/retention=sliding_window"]
KERNELS = {"reference": ReferenceKernel, "cpu": CpuKernel}


def overrides(window, sinks, positions="absolute"):
    return [*RULE, f"cache.retention.window={window}", f"cache.retention.sinks={sinks}",
            f"cache.retention.positions={positions}"]  # fmt: skip


def spec(window=None, index=0, **more) -> LayerSpec:
    return LayerSpec(index, 4, 2, 8, 8, 8**-0.5, window=window, **more)


# -- the rule ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window, sinks", [(1, 0), (1, 2), (4, 0), (4, 2), (3, 9)])
def test_dead_is_what_no_later_query_sees(window, sinks):
    rule, n = SlidingWindow(window, sinks), 24
    q, k = np.arange(n)[:, None], np.arange(n)[None]
    seen = rule.visible(q, k)
    for i, j in itertools.product(range(n), range(n)):
        assert seen[i, j] == (j <= i and (i - j < window or j < sinks))
    before = np.zeros(n, dtype=bool)
    for computed in range(n - 1):  # beyond the last query everything is dead as far as this grid knows
        dead = rule.dead(0, n, computed)
        assert (dead[:computed] == ~seen[computed:, :computed].any(axis=0)).all() and not dead[computed:].any()
        assert (rule.dead(3, 7, computed) == dead[3:7]).all() and not (before & ~dead).any()
        before = dead


def test_layers_with_a_window_of_their_own_get_no_sinks():
    rule = SlidingWindow(512, 4)
    assert rule.for_layer(spec()) is rule
    assert rule.for_layer(spec(128)) == SlidingWindow(128, 0) and rule.for_layer(spec(4096)) == SlidingWindow(512, 0)
    groups, group_of = layer_groups(rule, [spec(128, 0), spec(None, 1), spec(4096, 2), spec(128, 3)])
    assert [g.name for g in groups] == ["window128", "window512+4", "window512"]
    assert group_of == {0: 0, 1: 1, 2: 2, 3: 0}
    assert rule.forgets and not rule.exact and rule.kernel_mask
    assert SlidingWindow(8, 0, "cache") == SlidingWindow(8, 0), (
        "without sinks there is nothing to look at from elsewhere"
    )
    assert SlidingWindow(8, 1, "cache") != SlidingWindow(8, 1)


def test_preset_has_all_five_parts():
    cache = build_cache(compose(["cache=sliding_window"]), CacheContext(layers=(spec(),)))
    assert cache.block_size == 16 and cache.group_names == ["window1024+4"] and not cache.exact


@pytest.mark.parametrize("key, value, valid", [
    ("window", 0, ">= 1"), ("window", "true", ">= 1"), ("window", 2.5, ">= 1"), ("sinks", -1, ">= 0"),
    ("sinks", "false", ">= 0"), ("sinks", "null", ">= 0"), ("positions", "rolling", "absolute, cache"),
])  # fmt: skip
def test_wrong_values_name_key_and_fix(key, value, valid):
    with pytest.raises(ConfigError) as error:
        build_cache(compose([*RULE, f"cache.retention.{key}={value}"]), CacheContext(layers=(spec(),)))
    for word in (f"cache.retention.{key}=", valid, "fix: cache.retention."):
        assert word in str(error.value)


@pytest.mark.parametrize("window, sinks, size, chunk", [
    (16, 0, 16, 1), (16, 4, 16, 1), (20, 17, 16, 5), (5, 3, 1, 7), (40, 4, 16, 32), (3, 4, 64, 3),
])  # fmt: skip
def test_memory_is_window_sinks_and_a_chunk(window, sinks, size, chunk):
    """Sink blocks stay, others die; the plan's worst case is what a request really takes."""
    context = CacheContext(layers=(spec(),), max_len=300, max_requests=2, max_step_tokens=chunk)
    cfg = compose(["cache=paged", *overrides(window, sinks), f"cache.layout.block_size={size}", "cache.num_blocks=300"])
    cache = build_cache(cfg, context)
    request = SimpleNamespace(id="r", salt="", keep=None, tokens=np.arange(300, dtype=np.int32))
    most = 0
    for first in range(1, min(size, chunk) + 1):  # chunks begin anywhere between block edges
        assert cache.admit(request) == 0
        n, done = first, 0
        while done < 300:
            assert cache.grow(request, n)
            most = max(most, cache.pools[0].live)
            cache.commit(request, n)
            done += n
            n = min(chunk, 300 - done)
        cache.check()
        table, kept = cache.tables.view(cache.tables["r"], 0), -(-sinks // size)
        assert (table[:kept] != 0).all() and (table[kept : (300 - window) // size] == 0).all()
        cache.release(request)
    assert most == live_blocks(cache.rules[0], 300, chunk, size)
    assert most <= -(-sinks // size) + -(-(window - 1 + chunk + size - 1) // size)


# -- tokens --------------------------------------------------------------------------------------------------

TOKEN_ARCHS = ("llama", "qwen3", "gemma3", "gpt_oss", "gpt2", "deepseek_v3")
WINDOW, SINKS, NEW = 12, 3, 6
LENGTHS = (1, 2, 3, 4, 11, 12, 13, 15, 16, 17, 18, 31, 32, 33, 44)


@functools.cache
def model_of(arch: str, **options):
    return wrap(tiny_model(arch, **options))


@functools.cache
def compared(arch, sinks, prompt, output) -> int:
    return check_greedy(model_of(arch).module, prompt, output, retention=SlidingWindow(WINDOW, sinks))


def requests(lengths=LENGTHS, new=NEW):
    draws = np.random.default_rng(7)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return [Request(prompt_tokens=draws.integers(3, 250, n).tolist(), sampling=params) for n in lengths]


# Every run has another pair of layout, sinks, chunk and kernel; over the archs each pair is met. The grid is nightly.
CONDITIONS = list(itertools.product(("contiguous", "paged-1", "paged-16"), (0, SINKS), (1, 7, 512), KERNELS))
GRID = [
    pytest.param(arch, *condition, marks=() if i % 9 == (4 * a + i // 9) % 9 else pytest.mark.nightly)
    for a, arch in enumerate(TOKEN_ARCHS)
    for i, condition in enumerate(CONDITIONS)
]


@pytest.mark.parametrize("arch, strategy, sinks, chunk, kernel", GRID)
def test_greedy_tokens_equal_masked_ref(arch, strategy, sinks, chunk, kernel):
    kernels = (KERNELS[kernel](),)
    engine = make_engine(model_of(arch), strategy, False, chunk, overrides(WINDOW, sinks), kernels=kernels)
    outputs = run_checked(engine, requests())
    checked = sum(compared(arch, sinks, tuple(o.prompt_tokens), tuple(o.output_tokens)) for o in outputs)
    assert checked >= 0.9 * NEW * len(LENGTHS)


def test_a_window_changes_tokens():
    """Else the tests above would say nothing."""
    outputs = [
        make_engine(model_of("llama"), "paged-16", overrides=rule).generate(requests((44, 50)))
        for rule in ([], overrides(WINDOW, 0), overrides(WINDOW, SINKS))
    ]
    assert len({tuple(o.output_tokens) for run in outputs for o in run}) == 6


# -- positions=cache: attention against StreamingLLM written down plainly ----------------------------------------

FREQ = (10_000.0 ** (-np.arange(4) / 4)).astype(np.float32)
ROTARIES = {
    "halves": Rotary(tuple(FREQ.tolist())),
    "interleaved": Rotary(tuple(FREQ.tolist()), interleaved=True),
    "end": Rotary(tuple(FREQ[:2].tolist()), start=4),
    "partial": Rotary(tuple(FREQ[:2].tolist()), interleaved=True),
    "nope": Rotary(),
}


def rotate(x, p, rotary):
    """`x [L, H, 8]` at positions `p [L]`, by complex numbers and in float64."""
    n, D = len(rotary.inv_freq), x.shape[-1]
    dims = np.arange(rotary.start, rotary.start + 2 * n)
    a, b = (dims[0::2], dims[1::2]) if rotary.interleaved else (dims[:n], dims[n:])
    z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * np.asarray(p)[:, None, None] * np.array(rotary.inv_freq))
    out = x.copy()
    out[..., a], out[..., b] = z.real, z.imag
    assert out.shape[-1] == D
    return out


def streaming(q, k, v, p, rotary, window, sinks):
    """One query `q [Hq, 8]` that is not rotated, over keys `k [L, Hkv, 8]` as they are stored: rotated at 0..L-1."""
    kept = [j for j in range(p + 1) if p - j < window or j < sinks]
    bare = rotate(k[kept], -np.array(kept), rotary)
    keys = rotate(bare, np.arange(len(kept)), rotary)  # sinks at 0..sinks-1, the window after them
    query = rotate(q[None], [len(kept) - 1], rotary)[0]
    keys, values = (np.repeat(x, len(q) // k.shape[1], axis=1) for x in (keys, v[kept]))  # [kept, Hq, 8]
    scores = np.einsum("hd,lhd->hl", query, keys) * 8**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hl,lhd->hd", weights / weights.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name, window, sinks, steps", [
    ("halves", 9, 3, [30, 1, 1, 5, 1, 20]), ("halves", 20, 1, [1] * 40), ("interleaved", 4, 4, [17, 17, 2, 1]),
    ("end", 12, 5, [7] * 6), ("partial", 1, 2, [5, 1, 30, 1]), ("nope", 9, 3, [30, 1, 1, 5, 20]),
    ("halves", 260, 4, [300, 1, 250, 1, 1]), ("halves", 3, 40, [50, 1, 1]), ("interleaved", 300, 270, [600, 1, 1]),
])  # fmt: skip
def test_attention_equals_streaming_llm(kernel, name, window, sinks, steps):
    rotary, L = ROTARIES[name], sum(steps)
    context = CacheContext(
        layers=(spec(rotary=rotary),), max_len=1024, max_requests=2, max_step_tokens=1024, kernels=(KERNELS[kernel](),)
    )
    cache = build_cache(compose(["cache=paged", *overrides(window, sinks, "cache"), "cache.num_blocks=200"]), context)
    cache.storage.poison(0, np.arange(201))
    draws = np.random.default_rng(0)
    texts = []
    for first in (0, 11):  # the second request is 11 tokens ahead
        q, k, v = (draws.normal(size=(first + L, h, 8)) for h in (4, 2, 2))
        p = np.arange(first + L)
        texts.append((q, rotate(q, p, rotary), rotate(k, p, rotary), v))
    rows = [SimpleNamespace(id=str(r), salt="", keep=None, tokens=np.arange(len(t[0]))) for r, t in enumerate(texts)]
    assert [cache.admit(row) for row in rows] == [0, 0]
    done, worst = [0, 0], 0.0
    for n in [(0, 11), *((n, n) for n in steps)]:
        batch = [(row, m) for row, m in zip(rows, n) if m]
        assert all(cache.grow(row, m) for row, m in batch)
        plan = cache.plan(batch)
        spans = [(int(row.id), done[int(row.id)], done[int(row.id)] + m) for row, m in batch]
        q, k, v = (torch.cat([torch.from_numpy(texts[r][i][a:b]).float() for r, a, b in spans]) for i in (1, 2, 3))
        out, at = cache.attend(0, q, k, v, plan), 0
        for (r, a, b), (row, m) in zip(spans, batch):
            bare, _, k, v = texts[r]
            for p in range(a, b) if m < 60 else {a, (a + b) // 2, min(a + window + sinks, b - 1), b - 1}:
                wanted = streaming(bare[p], k[: p + 1], v[: p + 1], p, rotary, window, sinks)
                worst = max(worst, float(np.abs(out[at + p - a].numpy() - wanted).max()))
            at, done[r] = at + m, b
            cache.commit(row, m)
    assert worst < 1e-4


@pytest.mark.parametrize("extra", [{"softcap": 4.0}, {"sinks": True}, {"dtype": "bfloat16"}], ids=str)
def test_cpu_kernel_agrees_on_second_queries(extra):
    """Learned sinks, softcap and bf16: the two kernels on the same numbers."""
    draws, outs, tolerance = torch.Generator().manual_seed(0), [], 2e-2 if "dtype" in extra else 1e-5
    dtype = getattr(torch, extra.get("dtype", "float32"))
    qkv = [[torch.randn(n, h, 8, generator=draws).to(dtype) for h in (4, 2, 2)] for n in (50, 1, 40, 1)]
    learned = {0: torch.randn(4, generator=draws)} if "sinks" in extra else None
    for kernel in KERNELS.values():
        layers = (replace(spec(rotary=ROTARIES["halves"]), **extra),)
        context = CacheContext(layers=layers, max_len=128, kernels=(kernel(),), learned_sinks=learned)
        cache = build_cache(compose(["cache=paged", *overrides(10, 3, "cache"), "cache.num_blocks=9"]), context)
        row = SimpleNamespace(id="r", salt="", keep=None, tokens=np.arange(92))
        cache.admit(row)
        for q, k, v in qkv:
            cache.grow(row, len(q))
            outs.append(cache.attend(0, q, k, v, cache.plan([(row, len(q))])).float())
            cache.commit(row, len(q))
    for want, got in zip(outs[:4], outs[4:]):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
def test_positions_are_the_same_until_something_is_forgotten(kernel):
    """Up to window + sinks tokens both kinds of positions give the same tokens; later they part."""
    lengths, new, same = (1, 5, 20), 36, WINDOW + SINKS
    runs = []
    for positions in ("absolute", "cache"):
        rule = overrides(WINDOW, SINKS, positions)
        engine = make_engine(model_of("llama"), "paged-16", overrides=rule, kernels=(KERNELS[kernel](),))
        runs.append(run_checked(engine, requests(lengths, new)))
    for n, a, b in zip(lengths, *runs):
        assert a.output_tokens[: max(same + 1 - n, 0)] == b.output_tokens[: max(same + 1 - n, 0)]
    assert any(a.output_tokens != b.output_tokens for a, b in zip(*runs))


def test_a_kernel_without_second_queries_is_passed_over():
    kernel, codecs = ReferenceKernel(), (NoCodec(), NoCodec())
    kernel.sink_queries = False
    assert choose((kernel,), spec(), codecs, SlidingWindow(8, 2), "cpu", 16) == (kernel, [])
    found, why = choose((kernel,), spec(), codecs, SlidingWindow(8, 2, "cache"), "cpu", 16)
    assert found is None and "second query" in why[0] and "cache.retention.positions=absolute" in why[0]


# -- texts without end -----------------------------------------------------------------------------------------

TRAINED = 40  # tokens that the tiny models here were made for


def endless(arch, rule, **options):
    model = model_of(arch, **{"n_positions" if arch == "gpt2" else "max_position_embeddings": TRAINED})
    options = {"max_len": 3 * TRAINED, "trained_len": model.max_len, "max_requests": 2, **options}
    return make_engine(model, "paged-16", chunk=8, overrides=rule, **options)


@pytest.mark.parametrize("arch, kernel", [("llama", "reference"), ("gemma3", "cpu"), ("deepseek_v3", "cpu")])
def test_three_times_the_trained_length(arch, kernel):
    engine = endless(arch, overrides(24, 4, "cache"), kernels=(KERNELS[kernel](),))
    assert engine.cache.unbounded and engine.limit == 3 * TRAINED
    outputs = run_checked(engine, requests((10, 70), 3 * TRAINED))
    assert [o.finish_reason for o in outputs] == ["length"] * 2, (
        "logits that are not finite end a request with an error"
    )
    assert all(len(o.prompt_tokens) + len(o.output_tokens) == 3 * TRAINED for o in outputs)
    for group in engine.cache.stats().groups:
        assert group.peak <= 2 * group.block_bytes * (1 + -(-(24 + 8 + 16) // 16)), "memory of two requests is bounded"


@pytest.mark.parametrize("arch, rule, fix", [
    ("llama", [], "cache/retention=sliding_window cache.retention.positions=cache"),
    ("llama", overrides(24, 4), "cache.retention.positions=cache"),
    ("llama", overrides(38, 4, "cache"), "a smaller cache.retention.window"),  # looks further than 40 tokens
    ("gpt2", overrides(24, 0), None),
])  # fmt: skip
def test_longer_than_trained_needs_a_limit(arch, rule, fix):
    with pytest.raises(ConfigError) as error:
        endless(arch, rule)
    assert "engine.max_len=120 is more than the 40 tokens" in str(error.value)
    assert str(error.value).endswith(f"null; for longer requests {fix}" if fix else "engine.max_len=40, or null")


def test_windows_alone_are_a_limit():
    assert endless("llama", overrides(24, 0)).cache.unbounded
    cache = endless("mistral", []).cache  # each layer has a window of the model's own
    assert cache.unbounded and cache.group_names == ["window8"]


def test_learned_positions_are_refused():
    with pytest.raises(IncompatibleCacheError, match="0-1: .*learned positions.*cache.retention.positions=absolute"):
        endless("gpt2", overrides(8, 2, "cache"))
