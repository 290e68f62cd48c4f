"""fp32 copies of bf16 linear layers: the same numbers, and only where they help."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvframe.hf import linear


@pytest.fixture
def slow_bf16(monkeypatch):
    monkeypatch.setattr(linear, "native_bf16", lambda: False)


def model():
    torch.manual_seed(0)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
    tied = nn.Linear(32, 16, bias=False)
    tied.weight = second.weight
    return nn.Sequential(first, second, nn.Linear(16, 32, bias=False), tied).bfloat16()


@pytest.mark.parametrize("rows", [1, 5, 7])
def test_packed_layers_round_an_fp32_product_once(slow_bf16, rows):
    module = model()
    x = torch.randn(1, rows, 16).bfloat16()
    before = [part(y).clone() for part, y in ((module[0], x), (module[2], x))]
    assert linear.pack(module) == 4 * (16 * 32 * 3)  # the tied weight once
    for part, old in ((module[0], before[0]), (module[2], before[1])):
        bias = None if part.bias is None else part.bias.float()
        exact = nn.functional.linear(x.float(), part.weight.float(), bias)
        new = part(x)
        assert new.dtype is torch.bfloat16 and new.shape == old.shape
        torch.testing.assert_close(new.float(), exact, rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(new, old, rtol=2**-6, atol=1e-2)
    linear.unpack(module)
    assert torch.equal(module[0](x), before[0])


def test_fp32_models_and_fast_cpus_are_left_alone(slow_bf16, monkeypatch):
    assert linear.pack(model().float()) == 0
    monkeypatch.setattr(linear, "native_bf16", lambda: True)
    module = model()
    assert linear.pack(module) == 0 and "forward" not in module[0].__dict__


def test_copies_that_would_take_too_much_memory_are_not_made(slow_bf16, monkeypatch, caplog):
    monkeypatch.setattr("kvframe.memory.free_memory", lambda device: 1000)
    module = model()
    assert linear.pack(module) == 0 and "forward" not in module[0].__dict__
    assert "stay in bf16" in caplog.text
