"""fp32 copies of bf16 linear layers: the same numbers, and only where they help."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvframe.hf import linear, products, random_model


@pytest.fixture
def slow_bf16(monkeypatch):
    monkeypatch.setattr(linear, "native_bf16", lambda: False)


def model():
    torch.manual_seed(0)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
    tied = nn.Linear(32, 16, bias=False)
    tied.weight = second.weight
    return nn.Sequential(first, second, nn.Linear(16, 32, bias=False), tied).bfloat16()


def exact(part, x):
    bias = None if part.bias is None else part.bias.float()
    return nn.functional.linear(x.float(), part.weight.float(), bias)


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 13, 33])
def test_packed_layers_round_an_fp32_product_once(slow_bf16, rows):
    module = model()
    x = torch.randn(1, rows, 16).bfloat16()
    before = [part(y).clone() for part, y in ((module[0], x), (module[2], x))]
    assert linear.pack(module) == 4 * (16 * 32 * 3)  # the tied weight once
    for part, old in ((module[0], before[0]), (module[2], before[1])):
        new = part(x)
        assert new.dtype is torch.bfloat16 and new.shape == old.shape
        torch.testing.assert_close(new.float(), exact(part, x), rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(new, old, rtol=2**-6, atol=1e-2)
    linear.unpack(module)
    assert torch.equal(module[0](x), before[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_that_multiply_one_tensor_are_one_product(slow_bf16, dtype, rows, bias):
    torch.manual_seed(0)
    module = nn.Module()
    module.q, module.k = nn.Linear(24, 40, bias=bias), nn.Linear(24, 9, bias=bias)
    module.v, module.o = nn.Linear(24, 9, bias=bias), nn.Linear(40, 24, bias=bias)
    module = module.to(dtype)

    def run(x):
        return module.q(x), module.k(x), module.v(x), module.o(x.repeat(1, 1, 2)[..., :40])

    x = torch.randn(2, rows, 24).to(dtype)
    sets = products.sets(module, lambda: run(x))
    assert sorted(map(len, sets)) == [1, 3]
    assert linear.pack(module, lambda: run(x)) == (24 * 58 + 24 * 40) * 4
    wide = x.repeat(1, 1, 2)[..., :40]
    for _ in range(2):
        for part, y, out in zip((module.q, module.k, module.v, module.o), (x, x, x, wide), run(x)):
            rtol, atol = (2**-7, 1e-3) if dtype is torch.bfloat16 else (1e-5, 1e-5)
            torch.testing.assert_close(out.float(), exact(part, y), rtol=rtol, atol=atol)
    # another order, another tensor, one of them alone
    y = torch.randn(2, rows, 24).to(dtype)
    torch.testing.assert_close(module.v(y).float(), exact(module.v, y), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(module.q(x).float(), exact(module.q, x), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(module.k(y).float(), exact(module.k, y), rtol=2**-7, atol=1e-3)


def test_a_layer_that_runs_twice_is_alone():
    module = nn.Module()
    module.a, module.b = nn.Linear(8, 8), nn.Linear(8, 8)
    x = torch.randn(1, 8)
    assert len(products.sets(module, lambda: (module.a(x), module.b(x), module.a(x)))) == 2


def test_weights_that_change_in_place_are_packed_again(slow_bf16):
    model = random_model("tiny", "bfloat16")
    assert model.pack_weights() > 0
    part = next(part for part in model.module.modules() if type(part) is nn.Linear)
    x = torch.randn(1, 40, part.in_features).bfloat16()
    part.weight.data.mul_(3)
    model.weights_changed()
    torch.testing.assert_close(part(x).float(), exact(part, x), rtol=2**-7, atol=1e-3)


def test_wrong_products_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(linear, "packed", lambda parts, dtype: lambda x: x[..., :1].expand(*x.shape[:-1], 32))
    module = model().float()
    assert linear.pack(module) == 0 and "forward" not in module[0].__dict__
    assert "other results" in caplog.text


def test_other_dtypes_are_left_alone():
    assert linear.pack(model().half()) == 0


def test_copies_that_would_take_too_much_memory_are_not_made(slow_bf16, monkeypatch, caplog):
    monkeypatch.setattr("kvframe.memory.free_memory", lambda device: 1000)
    module = model()
    assert linear.pack(module) == 0 and "forward" not in module[0].__dict__
    assert "stay as they are" in caplog.text


def test_a_bf16_model_computes_prompts_in_chunks_that_want_no_logits(slow_bf16):
    from kvframe.config import build_engine, compose
    from kvframe.types import Request, SamplingParams

    cfg = compose(["model=random", "model.dtype=bfloat16", "cache.memory=4MiB", "engine.max_step_tokens=7"])
    engine = build_engine(cfg, random_model("tiny", "bfloat16"))
    sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
    outputs = engine.generate([Request(prompt_tokens=list(range(3, 3 + n)), sampling=sampling) for n in (30, 9, 1)])
    assert engine.packed_bytes and [len(output.output_tokens) for output in outputs] == [3, 3, 3]
