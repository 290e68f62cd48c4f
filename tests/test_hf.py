"""The seam to transformers: what the probe sees, what is refused, and that a flat forward is the model itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from kvframe.errors import ConfigError, MissingPackageError, UnsupportedModelError
from kvframe.hf import masks, random_model, seam, wrap
from kvframe.hf.hub import load, torch_device, torch_dtype
from kvframe.hf.verify import TinyCache
from kvframe.shapes import SHAPES
from kvframe.testing import ARCHS, REFUSED, teacher_logits, tiny_model

torch.set_num_threads(1)

WINDOWED = {"mistral": (8, 8), **dict.fromkeys(("gemma2", "gemma3", "gpt_oss", "gemma3n"), (8, None, 8, None))}
DIMS = {"deepseek_v3": (4, 4, 24, 16), "gpt2": (4, 4, 8, 8)}  # q_heads, kv_heads, k_dim, v_dim
SCALES = {"gemma2": 6**-0.5, "gemma3": 6**-0.5, "deepseek_v3": 24**-0.5, "gemma3n": 1.0}


@pytest.mark.parametrize("arch", ARCHS)
def test_probe_sees_the_facts(arch):
    model = wrap(tiny_model(arch))
    for layer, spec in enumerate(model.layers):
        assert spec.index == layer
        assert (spec.q_heads, spec.kv_heads, spec.k_dim, spec.v_dim) == DIMS.get(arch, (4, 2, 8, 8))
        assert spec.scale == pytest.approx(SCALES.get(arch, 8**-0.5))
        assert spec.softcap == (5.0 if arch == "gemma2" else None)
        assert spec.sinks == (arch == "gpt_oss") == (layer in model.learned_sinks)
        assert spec.kv_source == (layer - 2 if arch == "gemma3n" and layer >= 2 else None)
        assert spec.dtype == "float32"
    assert tuple(s.window for s in model.layers) == WINDOWED.get(arch, (None,) * len(model.layers))
    assert model.eos_ids == {2} and model.bos_id == 1 and model.max_len == 2048 and model.vocab_size == 256
    assert model.weight_bytes >= sum(p.nbytes for p in model.module.parameters())
    assert model.verified < 1e-4


FACTS = {
    "falcon": "FalconAttention.*never called",
    "bloom": "BloomAttention.*never called",
    "mpt": "MptAttention.*never called",
    "mamba": "MambaMixer.*convolution over 4 tokens",
    "lfm2": "Lfm2ShortConv.*convolution over 3 tokens",
    "qwen3_next": "Qwen3NextGatedDeltaNet.*convolution over 4 tokens",
}


@pytest.mark.parametrize("arch", REFUSED)
def test_refusals_name_the_fact(arch):
    module = tiny_model(arch)
    with pytest.raises(UnsupportedModelError, match=FACTS[arch]):
        wrap(module)
    assert {c._attn_implementation for c in seam.configs(module)} == {"eager"}, "a refused module is left as it was"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", [*ARCHS, *REFUSED])
def test_low_precision_decides_the_same(arch, dtype):
    module = tiny_model(arch, seed=3).to(dtype)
    if arch in REFUSED:
        with pytest.raises(UnsupportedModelError, match=FACTS[arch]):
            wrap(module)
    else:
        assert wrap(module).dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("arch", ARCHS)
def test_packed_flat_forward_is_eager_alone(arch):
    """Three requests share flat steps in chunks; each one's logits are those of the model alone."""
    module = tiny_model(arch)
    model = wrap(module)
    draws = np.random.default_rng(1)
    requests = [draws.integers(3, 256, size=n) for n in (23, 1, 17)]
    model.bind(TinyCache(model.layers, model.learned_sinks))
    found = {r: [] for r in range(3)}
    done = [0, 0, 0]
    for step in ((4, 1, 9), (1, 0, 7), (18, 0, 1)):
        tokens, positions, chunks, at = [], [], [], 0
        for r, n in enumerate(step):
            if n:
                tokens.append(requests[r][done[r] : done[r] + n])
                positions.append(np.arange(done[r], done[r] + n))
                chunks.append((r, at, at + n))
                at, done[r] = at + n, done[r] + n
        plan = SimpleNamespace(positions=torch.from_numpy(np.concatenate(positions)), chunks=chunks)
        logits = model.forward(np.concatenate(tokens), plan, np.arange(at))
        assert logits.shape == (at, 256) and logits.dtype == torch.float32
        for r, start, stop in chunks:
            found[r].append(logits[start:stop])
    for r, tokens in enumerate(requests):
        torch.testing.assert_close(torch.cat(found[r]), teacher_logits(module, tokens), atol=2e-4, rtol=2e-4)


def test_logits_at_picks_rows_in_any_order():
    module = tiny_model("gemma2")
    model = wrap(module)
    logits = []
    for at in ([0, 1, 2], [2, 0], []):
        model.bind(TinyCache(model.layers, {}))
        logits.append(model.forward(np.array([5, 6, 7], dtype=np.int32), _plan(3), np.array(at, dtype=np.int64)))
    torch.testing.assert_close(logits[0][[2, 0]], logits[1], atol=1e-5, rtol=1e-5)
    assert logits[2].shape == (0, 256)


def _plan(n):
    return SimpleNamespace(positions=torch.arange(n), chunks=[(0, 0, n)])


class Leaky(nn.Module):
    """A feed-forward layer that looks one row back, whoever's row that is."""

    def __init__(self, inner, strength):
        super().__init__()
        self.inner, self.strength = inner, strength

    def forward(self, x):
        return self.inner(x) + self.strength * torch.roll(x, 1, dims=1)


class Counting(nn.Module):
    """A feed-forward layer that knows how many tokens run in this step."""

    def __init__(self, inner, strength):
        super().__init__()
        self.inner, self.strength = inner, strength

    def forward(self, x):
        return self.inner(x) + self.strength * x.flip(-1) * x.shape[1]


@pytest.mark.parametrize(
    "plant,strength,dtype",
    [
        (Leaky, 0.01, torch.float32),
        (Leaky, 0.2, torch.bfloat16),
        (Leaky, 0.2, torch.float16),
        (Counting, 0.01, torch.float32),
    ],
)
def test_verification_catches_planted_state(plant, strength, dtype):
    module = tiny_model("llama").to(dtype)
    module.model.layers[1].mlp = plant(module.model.layers[1].mlp, strength)
    with pytest.raises(UnsupportedModelError, match="off by .* of their standard deviation"):
        wrap(module)
    assert wrap(module, verify=False).verified is None


@pytest.mark.parametrize(
    "field,value,arch",
    [("scale", 0.4, "llama"), ("window", 6, "mistral"), ("softcap", 6.0, "gemma2"), ("kv_heads", 1, "llama")],
)
def test_verification_catches_a_misread_layer(field, value, arch, monkeypatch):
    """Mutations of the probe: each wrong fact must show in the logits."""
    from kvframe.hf import model as model_file

    right = model_file.probe

    def wrong(module, dry):
        facts = right(module, dry)
        return type(facts)(tuple(replace(s, **{field: value}) for s in facts.layers), facts.modules, facts.sinks)

    monkeypatch.setattr(model_file, "probe", wrong)
    with pytest.raises(UnsupportedModelError, match="differs from transformers' eager|cannot run flat"):
        wrap(tiny_model(arch))


def test_missing_learned_sinks_are_caught(monkeypatch):
    from kvframe.hf import model as model_file

    right = model_file.probe
    monkeypatch.setattr(model_file, "probe", lambda *a: type(f := right(*a))(f.layers, f.modules, {}))
    with pytest.raises(UnsupportedModelError, match="differs from transformers' eager"):
        wrap(tiny_model("gpt_oss"))


def test_no_layer_at_all_is_refused():
    module = tiny_model("llama")
    for layer in module.model.layers:
        layer.self_attn.forward = lambda hidden_states=None, **_: (hidden_states, None)
        layer.self_attn.__class__ = nn.Identity
    with pytest.raises(UnsupportedModelError, match="no layer called"):
        wrap(module)


def test_a_module_that_runs_twice_is_two_layers():
    """Loops over layers: each call has keys and values of its own, also behind a forward that stopped between them."""
    module = tiny_model("llama", num_hidden_layers=3)
    module.model.layers[2].self_attn = module.model.layers[0].self_attn
    model = wrap(module)
    assert [spec.index for spec in model.layers] == [0, 1, 2] and model.verified < 1e-4
    assert all(spec.kv_source is None for spec in model.layers)
    model.bind(None)
    with pytest.raises(AttributeError):
        model.forward(np.array([5, 6, 7]), _plan(3), np.array([2]))
    model.bind(TinyCache(model.layers, {}))
    tokens = np.array([5, 6, 7])
    torch.testing.assert_close(
        model.forward(tokens, _plan(3), np.arange(3)), teacher_logits(module, tokens), atol=1e-4, rtol=1e-4
    )


def test_mask_changed_by_the_model_is_refused():
    """ALiBi as some models do it: the bias travels inside the mask."""
    module = tiny_model("llama")
    attention = module.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *a, attention_mask=None, **k: forward(*a, attention_mask=attention_mask - 1.0, **k)
    with pytest.raises(UnsupportedModelError, match="layer 0 .*did not make"):
        wrap(module)


def test_position_bias_is_refused():
    module = tiny_model("llama")
    attention = module.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *a, **k: forward(*a, position_bias=torch.zeros(4, 4), **k)
    with pytest.raises(UnsupportedModelError, match="layer 1 .*position_bias"):
        wrap(module)


def _causal(b, h, q, k):
    return k <= q


@pytest.mark.parametrize(
    "rule,fits,window,chunk",
    [
        (_causal, True, None, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 8), True, 8, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 4096), True, 4096, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), True, 1, None),
        (lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), True, None, 8),
        (lambda b, h, q, k: (k <= q) & (k // 7 == q // 7), True, None, 7),
        (lambda b, h, q, k: (k <= q) & (k // 8192 == q // 8192), True, None, 8192),
        (lambda b, h, q, k: (k <= q) & (k // 40_000 == q // 40_000), True, None, 40_000),
        (lambda b, h, q, k: (k <= q) & ((k + 1) // 8 == (q + 1) // 8), False, None, None),
        (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k // 8 == q // 8)), True, 8, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 4) & (k // 8 == q // 8), False, None, None),
        (lambda b, h, q, k: (k <= q) & ((k > q - 8) | (k < 4)), False, None, None),
        (lambda b, h, q, k: abs(q - k) <= 8, False, None, None),
        (lambda b, h, q, k: q >= 0, False, None, None),
        (lambda b, h, q, k: (k <= q) & (k != 2), False, None, None),
        # positions looked up in the batch: text goes on as text, and what goes on as an image does not fit
        (lambda b, h, q, k: (k <= q) | (torch.zeros(1, 4, dtype=torch.bool)[b, k]), True, None, None),
        (lambda b, h, q, k: (k <= q) | (torch.ones(1, 4, dtype=torch.bool)[b, k]), False, None, None),
        (lambda b, h, q, k: torch.ones(4)[k] @ q, False, None, None),
    ],
)
def test_mask_rules(rule, fits, window, chunk):
    found = masks.fit(rule)
    assert (not found.what, found.window, found.chunk) == (fits, window, chunk), found.what


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_that_depends_on_the_batch_limits_max_len(kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = wrap(tiny_model("llama", rope_parameters=rope))
    assert model.max_len == 64
    assert kind in model.notes[0] and "64" in model.notes[0] and "2048" in model.notes[0]


def test_several_eos_ids_and_configs_are_united():
    module = tiny_model("llama", eos_token_id=[2, 7])
    module.generation_config.eos_token_id = 9
    assert wrap(module).eos_ids == {2, 7, 9}


def test_model_without_logits_to_keep():
    module = tiny_model("llama")
    inner = module.forward

    def forward(input_ids=None, position_ids=None, use_cache=None):
        return inner(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    module.forward = forward
    model = wrap(module)
    model.bind(TinyCache(model.layers, {}))
    tokens = np.array([5, 6, 7])
    logits = model.forward(tokens, _plan(3), np.array([2, 0]))
    torch.testing.assert_close(logits, teacher_logits(tiny_model("llama"), tokens)[[2, 0]], atol=1e-4, rtol=1e-4)


def test_two_models_do_not_share_a_cache():
    one, two = wrap(tiny_model("llama")), wrap(tiny_model("llama", seed=1))
    one.bind("first")
    assert two.running.cache is None and one.running.cache == "first"


@pytest.mark.parametrize("shape", ["tiny", "gpt_oss_tiny"])
def test_random_models_repeat_by_seed(shape):
    a, b, c = (random_model(shape, dtype="float32", device="cpu", seed=s) for s in (3, 3, 4))
    same = [torch.equal(x, y) for x, y in zip(a.module.state_dict().values(), b.module.state_dict().values())]
    assert all(same) and a.tokenizer is None and a.dtype == "float32"
    logits = [teacher_logits(m.module, range(5, 30)) for m in (a, c)]
    assert not torch.equal(*logits) and torch.isfinite(logits[0]).all() and logits[0].std() > 0.3


def test_every_shape_is_a_config():
    for shape in SHAPES.values():
        config = shape.config()
        assert config.num_attention_heads and config.vocab_size, shape


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda: random_model("tinny"), ["tinny", "smollm2_135m", "llama3_8b"]),
        (lambda: load("./no/such/folder"), ["./no/such/folder", "smollm2"]),
        (lambda: load(""), ["no such folder"]),
        (lambda: load("tiny", dtype="float8"), ["float8", "bfloat16"]),
        (lambda: load("tiny", device="gpu"), ["gpu", "cuda"]),
        (lambda: load("tiny", quantize="3bit"), ["3bit", "8bit", "4bit"]),
        (lambda: torch_device("cuda:99"), ["cuda:99", "cpu"]),
    ],
)
def test_wrong_values_name_the_valid_ones(call, words):
    with pytest.raises(ConfigError) as error:
        call()
    for word in words:
        assert word in str(error.value)


def test_load_from_a_folder(tmp_path):
    module = tiny_model("qwen3")
    module.save_pretrained(tmp_path)
    model = load(str(tmp_path), dtype="float32", device="cpu")
    assert model.tokenizer is None and "no tokenizer" in model.notes[0]
    torch.testing.assert_close(teacher_logits(model.module, [5, 6, 7]), teacher_logits(module, [5, 6, 7]))
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match="without config.json"):
        load(str(tmp_path))


def test_quantize_without_the_package(monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "bitsandbytes" else real(n, *a))
    with pytest.raises(MissingPackageError, match="pip install bitsandbytes"):
        load("some/model", quantize="4bit")


def test_default_dtype_is_bf16():
    assert torch_dtype(None) is torch.bfloat16
    assert random_model("tiny", device="cpu").dtype == "bfloat16"
