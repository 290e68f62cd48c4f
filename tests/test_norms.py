"""Norms in one pass: found by what they do, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvframe.hf import norms, packing, random_model
from kvframe.kernels.cpu_norm import norm, norm_plain


def weights(n: int) -> torch.Tensor:
    return (torch.randn(n, generator=torch.Generator().manual_seed(1)) * 0.3 + 1).bfloat16()


@pytest.mark.parametrize("rows", [0, 1, 7, 70])
@pytest.mark.parametrize("n", [8, 24, 64, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_kernel_says_what_torch_says(rows, n, offset):
    x = torch.randn(2, rows, n, generator=torch.Generator().manual_seed(rows)).bfloat16()
    found, wanted = norm(x, weights(n), 1e-5, offset), norm_plain(x, weights(n), 1e-5, offset)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
    assert not rows or (found == wanted).float().mean() > 0.98, "sums in another order round few numbers differently"
    again = norm(x[:, ::2], weights(n), 1e-5, offset)  # rows that do not lie side by side
    assert torch.equal(again, found[:, ::2])


def test_nan_stays_in_its_row():
    x = torch.randn(1, 3, 16).bfloat16()
    x[0, 1, 5] = float("nan")
    found = norm(x, weights(16), 1e-6, 0.0)
    assert found[0, 1].isnan().all() and not found[0, [0, 2]].isnan().any()


class Norm(nn.Module):
    def __init__(self, n=16, eps=1e-5, formula=norm_plain, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(weights(n))
        self.eps, self.formula, self.offset = eps, formula, offset

    def forward(self, x):
        return self.formula(x, self.weight, self.eps, self.offset)


def layer_norm(x, weight, eps, offset):
    return nn.functional.layer_norm(x, (len(weight),), weight, eps=eps)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_a_norm_is_known_by_what_it_does(eps, offset):
    assert norms.form_of(Norm(eps=eps, offset=offset)) == (eps, offset)


def test_what_is_no_such_norm_is_left_alone():
    assert norms.form_of(Norm(formula=layer_norm)) is None
    assert norms.form_of(Norm(formula=lambda x, w, eps, offset: norm_plain(x, w, 1e-3, 0.0))) is None, "another eps"
    assert norms.form_of(Norm(n=12)) is None, "no multiple of 8"
    assert norms.form_of(Norm().float()) is None
    assert norms.form_of(nn.Linear(16, 16).bfloat16()) is None


def test_a_model_has_them_and_gives_them_back():
    model = random_model("tiny", "bfloat16")
    layers = model.module.config.num_hidden_layers
    model.pack_weights()
    found = [part for part in model.module.modules() if getattr(vars(part).get("forward"), "is_norm", False)]
    assert len(found) == 2 * layers + 1
    with packing.unpacked(model.module):
        assert not any("forward" in vars(part) for part in model.module.modules())
    assert all("forward" in vars(part) for part in found)
