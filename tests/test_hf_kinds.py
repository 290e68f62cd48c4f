"""Models that are different: chunks, loops over layers, positions that do not begin at 0, and a cache that is asked.

Shape legend: T tokens of a step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.sliding_window import SlidingWindow
from strategies import make_engine

from kvframe.errors import UnsupportedModelError
from kvframe.groups import layer_groups
from kvframe.hf import positions, wrap
from kvframe.hf.past import Past
from kvframe.hf.verify import TinyCache
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.memory import live_blocks
from kvframe.testing import check_greedy, teacher_logits, tiny_model
from kvframe.testing.harness import run_checked
from kvframe.types import LayerSpec, Request, SamplingParams

torch.set_num_threads(1)


def spec(index=0, **more) -> LayerSpec:
    return LayerSpec(index, 4, 2, 8, 8, 8**-0.5, **more)


# -- chunks --------------------------------------------------------------------------------------------------

RULES = {
    "chunk4": ModelRetention().for_layer(spec(chunk=4)),
    "window3chunk4": SlidingWindow(3, 2).for_layer(spec(chunk=4)),
    "window9chunk4": SlidingWindow(9, 0).for_layer(spec(chunk=4)),
    "window2chunk4": SlidingWindow(9, 5).for_layer(spec(chunk=4, window=2)),
}


@pytest.mark.parametrize("name", RULES)
def test_a_query_sees_its_own_chunk_and_the_rest_is_dead(name):
    rule, n, window = RULES[name], 24, int(name[6]) if "window" in name else 24
    seen = rule.visible(np.arange(n)[:, None], np.arange(n)[None])
    for q, k in itertools.product(range(n), range(n)):
        assert seen[q, k] == (k <= q and q // 4 == k // 4 and q - k < window)
    before = np.zeros(n, dtype=bool)
    for computed in range(n):
        dead = rule.dead(0, n, computed)
        assert (dead[:computed] == ~seen[computed:, :computed].any(axis=0)).all() and not dead[computed:].any()
        assert (rule.dead(3, 7, computed) == dead[3:7]).all() and not (before & ~dead).any()
        before = dead
    assert rule.name == name and rule.forgets and not rule.kernel_mask and rule.sinks == 0
    assert live_blocks(rule, 64, 1, 4) == 1


def test_chunks_are_a_layer_group_of_their_own():
    layers = [spec(0, chunk=8), spec(1), spec(2, chunk=8), spec(3, window=8), spec(4, chunk=16)]
    rules, group_of = layer_groups(ModelRetention(), layers)
    assert [rule.name for rule in rules] == ["chunk8", "full", "window8", "chunk16"]
    assert group_of == {0: 0, 1: 1, 2: 0, 3: 2, 4: 3}


def test_the_probe_sees_chunks():
    model = wrap(tiny_model("llama4"))
    assert [s.chunk for s in model.layers] == [8, 8, 8, None] and not any(s.window for s in model.layers)
    assert model.verified < 1e-4


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("strategy", ["contiguous", "paged-1", "paged-16"])
def test_llama4_gives_the_tokens_of_ref(strategy, short):
    """Chunks of 8, and queries of the full layer that grow with their position, from 16 on."""
    model, draws = wrap(tiny_model("llama4")), np.random.default_rng(0)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    engine = make_engine(model, strategy, short, 7, kernels=(CpuKernel(), ReferenceKernel()))
    kernels = [layer.kernel.name for layer in engine.cache.storage.layers]
    assert kernels == ["reference"] * 3 + ["cpu"]
    lengths = (1, 7, 8, 9, 30, 63, 17)
    requests = [Request(prompt_tokens=draws.integers(3, 250, n).tolist(), sampling=params) for n in lengths]
    outputs = run_checked(engine, requests)
    checked = sum(check_greedy(model.module, o.prompt_tokens, o.output_tokens) for o in outputs)
    assert checked >= 0.8 * 6 * len(lengths)
    if strategy == "paged-1":
        peak = {group.name: group.peak / group.block_bytes for group in engine.cache.stats().groups}
        assert peak["chunk8"] < peak["full"]


# -- positions -----------------------------------------------------------------------------------------------


def roberta(**options):
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=66, is_decoder=True, **options,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return transformers.RobertaForCausalLM(config).eval()


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_positions_begin_where_the_model_lets_them(padding):
    model = wrap(roberta(pad_token_id=padding))
    assert model.first_position == padding + 1 and model.max_len == 66 - padding - 1
    assert wrap(tiny_model("gpt2")).first_position == 0
    tokens = np.arange(10, 10 + model.max_len)
    model.bind(TinyCache(model.layers, {}))
    plan = SimpleNamespace(positions=torch.arange(len(tokens)), chunks=[(0, 0, len(tokens))])
    found = model.forward(tokens, plan, np.arange(len(tokens)))
    torch.testing.assert_close(found, teacher_logits(model.module, tokens), atol=1e-4, rtol=1e-4)


def test_unknown_positions_are_refused():
    module = tiny_model("llama")
    forward = module.model.forward

    def shifted(position_ids=None, inputs_embeds=None, input_ids=None, **more):
        at = torch.arange(input_ids.shape[1])[None] * 3 if position_ids is None else position_ids
        return forward(input_ids=input_ids, position_ids=at, **more)

    module.model.forward = shifted
    with pytest.raises(UnsupportedModelError, match="positions of its own: .* not those at 0, 1, ... or 1, 2, ..."):
        wrap(module)


class Swallows:
    """A forward that takes any arguments and hands only some on."""

    def __init__(self, forward, *dropped):
        self.forward, self.dropped = forward, dropped

    def __call__(self, input_ids=None, **more):
        return self.forward(input_ids=input_ids, **{k: v for k, v in more.items() if k not in self.dropped})


def test_position_ids_may_be_one_of_any_arguments():
    module = tiny_model("llama")
    module.forward = Swallows(module.forward)
    assert positions.accepted(module) and wrap(module).verified < 1e-4
    module = tiny_model("llama")
    module.forward = Swallows(module.forward, "position_ids")
    with pytest.raises(UnsupportedModelError, match="takes no position_ids"):
        wrap(module)


# -- a cache that is asked -----------------------------------------------------------------------------------


def test_past_answers_so_that_rows_become_positions():
    at = torch.tensor([5, 6, 7, 40, 2])
    past = Past.of(at)
    assert not past.asked
    assert torch.equal(torch.arange(5) + past.get_seq_length(3), at) and past.asked
    assert past.update(1, 2, 0) == (1, 2) and past.get_mask_sizes(4, 0) == (4, 0)


def asking(answer):
    """A llama whose queries grow with the position, which it takes from the cache: as `answer(rows, cache)` says."""
    module = tiny_model("llama")
    forward = module.forward

    def ask(input_ids=None, cache=None, **more):
        rows = torch.arange(input_ids.shape[1])
        at = rows if cache is None else answer(rows, cache)
        hook = module.model.layers[1].self_attn.q_proj.register_forward_hook(
            lambda part, _, out: out * (1 + (at // 8)[None, :, None])
        )
        try:
            return forward(input_ids=input_ids, **more)
        finally:
            hook.remove()

    module.forward = ask
    return module


def test_models_that_ask_get_an_answer_for_each_row():
    module = asking(lambda rows, cache: rows + cache.get_seq_length())
    model = wrap(module)
    model.bind(TinyCache(model.layers, {}))
    a, b = np.arange(20, 60), np.arange(100, 130)
    found = []
    for start, stop in ((0, 25), (25, 30)):
        at = np.arange(start, stop)
        at = torch.from_numpy(np.concatenate([at, at]))
        plan = SimpleNamespace(positions=at, chunks=[(0, 0, stop - start), (1, stop - start, 2 * (stop - start))])
        found.append(model.forward(np.concatenate([a[start:stop], b[start:stop]]), plan, np.arange(len(at))))
    for i, tokens in enumerate((a, b)):
        rows = torch.cat([step.chunk(2)[i] for step in found])
        torch.testing.assert_close(rows, teacher_logits(module, tokens[:30]), atol=1e-4, rtol=1e-4)
    assert wrap(tiny_model("llama"))._past is None


def test_models_that_take_one_answer_for_all_rows_are_refused():
    module = asking(lambda rows, cache: rows + int(torch.as_tensor(cache.get_seq_length()).max()))
    with pytest.raises(UnsupportedModelError, match="asks its cache .* no answer for each row"):
        wrap(module)


def test_a_layer_that_reads_another_one_must_see_the_same(monkeypatch):
    from kvframe.hf import masks, probe

    rules = iter([masks.Fit(chunk=8)] * 3 + [masks.Fit(window=8)])
    right = probe._rule
    monkeypatch.setattr(probe, "_rule", lambda *a: replace(right(*a), window=None, chunk=next(rules).chunk))
    with pytest.raises(UnsupportedModelError, match=r"under another rule \(causal, not causal with chunks of 8\)"):
        wrap(tiny_model("gemma3n"))
