"""How queries turn with position, as the probe finds it on real calls: every architecture, dtype and rotary type."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from strategies import context_for, make_cache

from kvframe.errors import IncompatibleCacheError
from kvframe.hf import turning
from kvframe.testing import ARCHS, tiny_model, wrap
from kvframe.testing.models import COMMON, spread

torch.set_num_threads(1)

LOCAL, GLOBAL = 1e4, 1e6  # rope_theta of most models and of Gemma 3's sliding layers; of its full layers
THETAS = {arch: (LOCAL,) for arch in ARCHS} | dict.fromkeys(("gemma3", "gemma3n"), (LOCAL, GLOBAL)) | {"gpt2": ()}
START = {"deepseek_v3": 16}  # MLA: 16 numbers without position, then 8 that turn


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_probe_finds_the_rotation(arch, dtype):
    layers = wrap(tiny_model(arch).to(getattr(torch, dtype))).layers
    thetas = THETAS[arch]
    for i, layer in enumerate(layers):
        if not thetas:
            assert layer.rotary is None and "learned positions" in layer.no_rotary
            continue
        assert (layer.rotary.start, layer.rotary.interleaved) == (START.get(arch, 0), False)
        # the buffers themselves are rounded with the model
        np.testing.assert_allclose(layer.rotary.inv_freq, thetas[i % len(thetas)] ** (-np.arange(4) / 4), rtol=1e-2)


def built(config: str, model: str, **options):
    config = getattr(transformers, config)(**{**COMMON, **options})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = getattr(transformers, model)(config)
    spread(module)
    return module.eval()


MIX = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA4 = {"global_head_dim": 16, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 8}
TUNED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 256,
         "llama_4_scaling_beta": 0.1, "max_position_embeddings": 2048}  # fmt: skip
OTHERS = [  # config, model, options, and per layer (pairs, start, interleaved); None: not known
    ("PhiConfig", "PhiForCausalLM", {"partial_rotary_factor": 0.5}, [(2, 0, False)] * 2),
    ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"rotary_pct": 0.5}, [(2, 0, False)] * 2),
    ("GlmConfig", "GlmForCausalLM", {}, [(2, 0, True)] * 2),
    ("Cohere2Config", "Cohere2ForCausalLM", MIX, [(4, 0, True), (0, 0, False)]),
    ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, [(4, 0, False), (0, 0, False)]),
    ("Gemma4TextConfig", "Gemma4ForCausalLM", {**MIX, **GEMMA4}, [(4, 0, False), (8, 0, False)]),
    ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}, [None] * 2),
    ("Ministral3Config", "Ministral3ForCausalLM", {"rope_parameters": TUNED}, [None] * 2),  # far queries are longer
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config, model, options, want", OTHERS, ids=[o[0] for o in OTHERS])
def test_probe_finds_other_rotations(config, model, options, want, dtype):
    """Partial, interleaved, by layer type, none at all; tables and lengths that depend on position are refused."""
    if not hasattr(transformers, config):
        pytest.skip(f"this transformers has no {config}")
    layers = wrap(built(config, model, **options).to(getattr(torch, dtype))).layers
    assert [s.rotary and (len(s.rotary.inv_freq), s.rotary.start, s.rotary.interleaved) for s in layers] == want


SCALED = {
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "dynamic": {"factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 512, "short_factor": [1.0] * 4,
                 "long_factor": [2.0] * 4},
}  # fmt: skip


STREAMING = ["cache/retention=sliding_window", "cache.retention.window=8", "cache.retention.positions=cache"]


@pytest.mark.parametrize("kind", SCALED)
def test_kinds_of_frequencies(kind):
    model = wrap(tiny_model("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]}))
    if kind in ("dynamic", "longrope"):
        for layer in model.layers:
            assert layer.rotary is None and f"rotary type '{kind}'" in layer.no_rotary
        with pytest.raises(IncompatibleCacheError, match=rf"0-1: rotary type '{kind}'.*retention.positions=absolute"):
            make_cache("paged-16", context_for(model), overrides=STREAMING)
        return
    buffer = model.module.model.rotary_emb.inv_freq
    assert model.layers[0].rotary.inv_freq == tuple(buffer.tolist())
    # modules of static kinds go on beyond the model's own length as before it
    facts = SimpleNamespace(layers=model.layers, modules=[layer.self_attn for layer in model.module.model.layers])
    far = turning.find(model.module, facts, model._dry_at, 20 * model.max_len)
    assert [s.rotary for s in far] == [s.rotary for s in model.layers]


def test_a_failing_probe_leaves_the_model_as_it_was(monkeypatch):
    def fail(self, positions):
        raise ValueError("no such position")

    monkeypatch.setattr("kvframe.hf.model.HFModel._dry_at", fail)
    model = wrap(tiny_model("llama"))
    assert model.verified < 1e-4 and all("no such position" in s.no_rotary for s in model.layers)
