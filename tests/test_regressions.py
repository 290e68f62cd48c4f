"""Faults that a hostile review found; each test failed before its kind of fault was mended."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from strategies import make_engine
from test_cache import control
from test_engine import ask, engine, tokens

from kvframe.cache import BlockKVCache
from kvframe.errors import ConfigError, RequestError
from kvframe.interfaces import CacheContext, Retention
from kvframe.memory import held_blocks, live_blocks
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.testing.walked import Walked
from kvframe.testing.walker import Walker
from kvframe.types import LayerSpec, Request, SamplingParams


def test_many_samples_of_no_tokens_end():
    outputs = engine().generate([ask(tokens(3), n=3, max_new_tokens=0)])
    assert [(o.sample, o.finish_reason) for o in outputs] == [(0, "length"), (1, "length"), (2, "length")]


def test_sample_names_never_collide_with_ids_of_users():
    outputs = run_checked(engine(), [ask(tokens(9), id="a#1"), ask(tokens(8), id="a", n=2, temperature=1.0, seed=1)])
    assert [(o.id, o.sample) for o in outputs] == [("a#1", 0), ("a", 0), ("a", 1)]


def test_names_that_the_engine_gives_leave_those_of_users_alone():
    outputs = engine().generate([ask(tokens(3)), ask(tokens(4), id="r0"), ask(tokens(5), id="")])
    assert [o.finish_reason for o in outputs] == ["length"] * 3 and [o.id for o in outputs] == ["r1", "r0", ""]


def test_max_len_is_held_to_the_model():
    model = wrap(tiny_model("llama"))
    model.max_len = 64
    with pytest.raises(ConfigError, match=r"engine.max_len=96 is more than the 64 tokens"):
        make_engine(model, "paged-16")


def test_two_wrappers_of_one_module_do_not_take_it_from_each_other():
    module = tiny_model("llama")
    first, second = wrap(module), wrap(module)
    request = ask(tokens(20))
    for model, strategy in ((first, "paged-16"), (second, "contiguous"), (first, "paged-1")):
        (output,) = make_engine(model, strategy).generate([request])
        assert check_greedy(module, output.prompt_tokens, output.output_tokens) > 0


@pytest.mark.parametrize("where", ["forward", "commit", "sample", "plan"])
def test_a_step_that_fails_can_be_tried_again(monkeypatch, where):
    wanted = [o.output_tokens for o in engine().generate([ask(tokens(20, i)) for i in range(3)])]
    e = engine()
    for i in range(3):
        e.add(ask(tokens(20, i), id=str(i)))
    e.step()
    e.step()
    owner, name = {
        "forward": (e.model, "forward"),
        "plan": (e.cache, "plan"),
        "commit": (e.cache, "commit"),
        "sample": (e, "_accept"),
    }[where]
    calls = []

    def fails(*args):
        calls.append(args)
        if len(calls) == 2 or where in ("forward", "plan"):
            raise RuntimeError("once")
        return good(*args)

    good = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(RuntimeError, match="once"):
            e.step()
    e.cache.check()
    done = {}
    for _ in range(100):
        for event in e.step():
            if event.output:
                done[event.output.id] = event.output.output_tokens
        e.cache.check()
        if not e.has_work:
            break
    if where == "sample":  # the token of the first sequence was taken, its event was not lost
        assert sorted(done) == ["0", "1", "2"]
    assert [done[str(i)] for i in range(3)] == wanted


def test_a_watcher_that_fails_does_not_stop_the_engine(caplog):
    class Hooks:
        def kvframe_on_step(self, **facts):
            raise ValueError("broken plugin")

        kvframe_on_finish = kvframe_on_step

    e = engine()
    e.telling.hooks = Hooks()
    assert len(e.generate([ask(tokens(5))])[0].output_tokens) == 6
    assert "a plugin failed in kvframe_on_step" in caplog.text


BAD_PROMPTS = {
    "ragged": [[1, 2], [3]], "none": [None], "text": "abc", "huge": [2**63], "two rows": [[1, 2], [3, 4]],
    "floats": [1.7, 2.2], "words": ["5", "6"], "bools": [True, False], "negative": [-1],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_malformed_prompt_is_refused_and_the_others_go_on(name):
    bad = Request(prompt_tokens=BAD_PROMPTS[name], id="bad", sampling=SamplingParams(max_new_tokens=2, ignore_eos=True))
    outputs = engine().generate([bad, ask(tokens(4), id="good")])
    assert [o.finish_reason for o in outputs] == ["refused", "length"]


@pytest.mark.parametrize(
    "field, value", [("max_new_tokens", 4.5), ("n", 2.0), ("logprobs", 1.5), ("seed", "x"), ("top_k", True)]
)
def test_sampling_values_of_the_wrong_kind_are_named(field, value):
    with pytest.raises(RequestError, match=f"sampling.{field}"):
        SamplingParams(**{field: value})


def test_numpy_and_torch_values_are_welcome():
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int64(5), ignore_eos=True)
    for prompt in (np.array([3, 4], np.int16), torch.tensor([3, 4]), (3, 4)):
        assert len(engine().generate([Request(prompt_tokens=prompt, sampling=params)])[0].output_tokens) == 3
    with pytest.raises(RequestError, match="arrival"):
        Request(prompt="a", arrival=float("inf"))


def test_generate_while_the_engine_works_says_so():
    e = engine()
    e.add(ask(tokens(5)))
    with pytest.raises(RequestError, match="still at work"):
        e.generate([ask(tokens(5))])
    while e.has_work:
        e.step()
    assert len(e.generate([ask(tokens(5))])) == 1


def test_figures_are_those_of_the_last_run():
    e = engine()
    e.generate([ask(tokens(60, i), n=2, temperature=1.0) for i in range(4)])
    big = e.summary()
    e.generate([ask(tokens(3))])
    small = e.summary()
    assert small["kv_bytes_peak"] < big["kv_bytes_peak"] and small["copies"] == 0 < big["copies"]


# -- the control plane ---------------------------------------------------------------------------------------


def walk(cache, request, n):
    assert cache.grow(request, n)
    cache.plan([(request, n)])
    cache.commit(request, n)
    cache.check()


def test_truncate_settles_over_all_groups():
    cache = control(["cache=paged", "cache.layout.block_size=4"], windows=(None, 6, 13))
    request = Walked("a", np.zeros(30, np.int32))
    cache.admit(request)
    for _ in range(18):
        walk(cache, request, 1)
    kept = cache.truncate(request, 15)
    cache.check()
    assert kept in (0, 15)
    walk(cache, request, 1)


def test_truncate_never_leaves_the_next_token_in_the_null_block():
    cache = control(["cache=paged", "cache.layout.block_size=4"], windows=(1,))
    request = Walked("a", np.zeros(30, np.int32))
    cache.admit(request)
    for _ in range(9):
        walk(cache, request, 1)
    cache.truncate(request, 6)
    cache.check()
    walk(cache, request, 1)


@pytest.mark.parametrize("rule", ["chunked", "window and sinks", "every fourth block"])
def test_capacity_is_right_for_rules_that_are_not_windows(rule):
    retention = {"chunked": Chunked(24), "window and sinks": Streams(), "every fourth block": Holes()}[rule]
    for blocks in (2, 3, 4, 6):
        base = control(["cache=paged", "cache.layout.block_size=8", f"cache.num_blocks={blocks}"], windows=(None,))
        parts = base.parts
        cache = BlockKVCache(
            base.context, parts.layout, parts.index, parts.eviction, retention, parts.codec, num_blocks=blocks
        )
        request = Walked("a", np.zeros(96, np.int32))
        cache.admit(request)
        reached = 0
        while reached < 96 and cache.grow(request, 1):
            cache.plan([(request, 1)])
            cache.commit(request, 1)
            cache.check()
            reached += 1
        assert reached == cache.capacity(), (rule, blocks)
        if rule != "chunked":
            cache.reset()
            Walker(cache, seed=blocks).walk(300)


class Mask(Retention):
    kernel_mask = False

    def for_layer(self, layer):
        return self


class Chunked(Mask):
    """Positions see their own chunk only (Llama 4)."""

    def __init__(self, size):
        self.size = size

    def visible(self, q_pos, k_pos):
        return (k_pos <= q_pos) & (k_pos // self.size == q_pos // self.size)

    def dead(self, start, stop, num_computed):
        return np.arange(start, stop) // self.size < num_computed // self.size


class Streams(Mask):
    """Two sinks and the last ten, told as a mask."""

    def visible(self, q_pos, k_pos):
        return (k_pos <= q_pos) & ((q_pos - k_pos < 10) | (k_pos < 2))

    def dead(self, start, stop, num_computed):
        p = np.arange(start, stop)
        return (p >= 2) & (p <= num_computed - 10)


class Holes(Mask):
    """The last sixteen and every fourth run of eight."""

    def visible(self, q_pos, k_pos):
        return (k_pos <= q_pos) & ((q_pos - k_pos < 16) | (k_pos // 8 % 4 == 0))

    def dead(self, start, stop, num_computed):
        p = np.arange(start, stop)
        return (p // 8 % 4 != 0) & (p <= num_computed - 16)


@functools.cache
def window_rule(window):
    from kvframe_plugins.model_retention import ModelRetention

    return ModelRetention(window)


@pytest.mark.parametrize(
    "window, chunk, size", [(1, 1, 4), (10, 1, 16), (10, 16, 16), (7, 5, 3), (64, 8, 16), (100, 200, 16)]
)
def test_held_blocks_is_what_the_definition_says(window, chunk, size):
    rule, length = window_rule(window), 130
    for end, held in enumerate(held_blocks(rule, length, chunk, size), start=1):
        computed = max(end - chunk, 0)
        whole = computed // size
        dead = int(rule.dead(0, whole * size, computed).reshape(whole, size).all(axis=1).sum())
        assert held == -(-end // size) - dead
    assert live_blocks(rule, length, chunk, size) == held_blocks(rule, length, chunk, size).max()


def test_planes_have_the_dtype_of_the_layer():
    from kvframe.kernels.reference import ReferenceKernel

    base = control(["cache=paged", "cache.num_blocks=2"], windows=(None,))
    layers = (LayerSpec(0, 4, 2, 8, 8, 1.0, dtype="bfloat16"), LayerSpec(1, 4, 2, 8, 8, 1.0, dtype="float32"))
    context = CacheContext(layers, max_len=96, kernels=(ReferenceKernel(),))
    parts = base.parts
    cache = BlockKVCache(context, parts.layout, parts.index, parts.eviction, parts.retention, parts.codec, num_blocks=2)
    assert [layer.k["payload"].dtype for layer in cache.storage.layers] == [torch.bfloat16, torch.float32]
    assert cache.storage.nbytes() == 3 * cache.block_bytes[0]


def test_changed_weights_are_seen(monkeypatch):
    from kvframe.hf import linear

    monkeypatch.setattr(linear, "native_bf16", lambda: False)
    e = make_engine(wrap(tiny_model("llama").bfloat16()), "paged-16", dtype="bfloat16")
    assert e.packed_bytes > 0
    request = ask(tokens(20))
    before = e.generate([request])[0].output_tokens
    with torch.no_grad():
        e.model.module.lm_head.weight.copy_(e.model.module.lm_head.weight.flip(0))
    e.invalidate()
    assert e.generate([request])[0].output_tokens != before


def test_weights_that_cannot_fit_are_refused_before_they_are_made():
    from kvframe.errors import CapacityError
    from kvframe.hf import random_model

    with pytest.raises(CapacityError, match=r"GiB of weights; .* GiB are free"):
        random_model("llama3_70b", dtype="float32", device="cpu")


def test_a_kernel_that_cannot_serve_names_layers_once_and_a_fix():
    from kvframe.errors import IncompatibleCacheError
    from kvframe.kernels.cpu import CpuKernel

    base = control(["cache=paged", "cache.num_blocks=2"], windows=(None,))
    layers = tuple(LayerSpec(i, 4, 2, 8, 8, 1.0, dtype="float16") for i in range(6))
    parts = base.parts
    with pytest.raises(IncompatibleCacheError) as error:
        BlockKVCache(
            CacheContext(layers, max_len=96, kernels=(CpuKernel(),)),
            parts.layout,
            parts.index,
            parts.eviction,
            parts.retention,
            parts.codec,
            num_blocks=2,
        )
    assert len(error.value.reasons) == 1
    assert error.value.reasons[0].startswith("layers 0-5: ") and error.value.reasons[0].endswith("kernel=auto")


@pytest.mark.parametrize("composition", ["paged-16 none model", "paged-1 radix model"])
def test_new_weights_reach_what_runs_and_what_branches_from_it(composition):
    module = tiny_model("llama", seed=3)
    made = make_engine(wrap(module), composition, overrides=["cache.memory=4MiB"], max_requests=4)
    prompt = np.random.default_rng(0).integers(3, 250, 40).tolist()
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    made.add(Request(prompt_tokens=prompt, sampling=sampling, id="a"))
    while len(made.intake.living("a", 0).tokens) < 45:
        made.step()
    before = made.intake.living("a", 0).tokens.tolist()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    made.invalidate()
    made.branch("a", [7, 8], sampling, new_id="b")
    done = {}
    while made.has_work:
        done |= {event.id: event.output for event in made.step() if event.output is not None}
        made.cache.check()
    assert check_greedy(module, before, (prompt + done["a"].output_tokens)[len(before) :]) > 3
    assert check_greedy(module, [*before, 7, 8], done["b"].output_tokens) > 3


def test_what_a_request_finds_of_its_own_after_a_preemption_is_no_hit():
    made = make_engine(wrap(tiny_model("llama")), "paged-1 radix model", chunk=16, overrides=["cache.memory=4MiB"])
    made.add(Request(prompt_tokens=list(range(3, 63)), sampling=SamplingParams(max_new_tokens=2), id="a"))
    made.step()
    made.scheduler.recompute(list(made.scheduler.running))
    outputs = []
    while made.has_work:
        outputs += [event.output for event in made.step() if event.output is not None]
    assert outputs[0].preemptions == 1 and outputs[0].cached_tokens == 0


def test_what_is_no_number_does_not_reach_others_through_the_index():
    module = tiny_model("llama")
    module.get_input_embeddings().weight.data[77] = float("nan")
    made = make_engine(wrap(module), "paged-16 radix model", overrides=["cache.memory=4MiB"], max_requests=4)
    shared = [(i * 7) % 60 + 3 for i in range(48)]
    assert made.generate([ask([*shared, 77, 3])])[0].finish_reason == "error"
    assert made.generate([ask([*shared, 5, 6])])[0].finish_reason != "error"
