"""The oracle can fail: what it must report, where it must stop claiming, and that kvframe never runs in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvframe.hf import seam, wrap
from kvframe.interfaces import Retention
from kvframe.testing import ARCHS, check_greedy, teacher_logits, tiny_model

torch.set_num_threads(1)
PROMPT = [5, 9, 100, 31, 77]


def greedy(module, prompt, n, retention=None):
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(teacher_logits(module, tokens, retention)[-1].argmax()))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Window(Retention):
    window: int | None = None

    def for_layer(self, layer):
        sizes = [w for w in (self.window, layer.window) if w is not None]
        return Window(min(sizes) if sizes else None)

    def visible(self, q_pos, k_pos):
        seen = k_pos <= q_pos
        return seen if self.window is None else seen & (q_pos - k_pos < self.window)

    def dead(self, start, stop, num_computed):
        return np.zeros(stop - start, dtype=bool)


@pytest.mark.parametrize("arch", ARCHS)
def test_right_output_passes(arch):
    module = tiny_model(arch)
    output = greedy(module, PROMPT, 12)
    assert check_greedy(module, PROMPT, output) == 12, "tiny models are spread so that ties are rare"
    assert len(set(output)) > 1


@pytest.mark.parametrize("step", [0, 5, 11])
def test_a_wrong_token_is_reported(step):
    module = tiny_model("llama")
    output = greedy(module, PROMPT, 12)
    wrong = [*output[:step], (output[step] + 1) % 256, *output[step + 1 :]]
    with pytest.raises(AssertionError, match=rf"output token {step} \(position {5 + step}\) is {wrong[step]} .*says"):
        check_greedy(module, PROMPT, wrong)


def test_a_tie_ends_the_claim():
    module = tiny_model("llama")
    output = greedy(module, PROMPT, 8)
    logits = teacher_logits(module, PROMPT + output[:-1])[len(PROMPT) - 1 :]
    gaps = logits.topk(2).values.diff(dim=-1).abs().squeeze(-1)
    wide = float(gaps.max()) + 1
    assert check_greedy(module, PROMPT, [0] * 8, tie=wide) == 0
    smallest = int(gaps.argmin())
    wrong = [*output[:smallest], *[0] * (8 - smallest)]
    assert check_greedy(module, PROMPT, wrong, tie=float(gaps.min()) + 1e-6) == smallest


def test_equal_logits_are_a_tie():
    module = tiny_model("llama")
    weight = module.lm_head.weight
    best = greedy(module, PROMPT, 1)[0]
    twin = 200 if best != 200 else 201
    weight.data[twin] = weight.data[best]
    assert check_greedy(module, PROMPT, [twin]) == 0


def test_nothing_to_check():
    assert check_greedy(tiny_model("llama"), PROMPT, []) == 0
    with pytest.raises(AssertionError, match="at least one prompt token"):
        check_greedy(tiny_model("llama"), [], [3])


def test_kvframe_never_runs_in_the_oracle():
    module = tiny_model("gpt_oss")
    before = teacher_logits(module, PROMPT)
    model = wrap(module)

    class Trap:
        def attend(self, *args):
            raise RuntimeError("the oracle went through kvframe")

    model.bind(Trap())
    assert torch.equal(teacher_logits(module, PROMPT), before)
    assert torch.equal(teacher_logits(module, PROMPT, Window()), before), "retention `model` is the model itself"
    assert {c._attn_implementation for c in seam.configs(module)} == {seam.NAME}, "set back"


@pytest.mark.parametrize("arch", ARCHS)
def test_retention_of_the_model_is_the_models_own_mask(arch):
    module = tiny_model(arch)
    wrap(module)
    tokens = np.random.default_rng(0).integers(3, 256, 40)
    torch.testing.assert_close(
        teacher_logits(module, tokens, Window()), teacher_logits(module, tokens), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_oss"])
def test_a_retention_changes_what_is_right(arch):
    """Under a window of 3, token 0 cannot reach the last query through two layers; without it, it can."""
    module = tiny_model(arch)
    layers = len(wrap(module).layers)
    tokens = np.random.default_rng(0).integers(3, 256, 40)
    other = tokens.copy()
    other[0] += 1
    near = layers * 2  # a window of 3 carries two positions per layer
    a, b = (teacher_logits(module, t, Window(3)) for t in (tokens, other))
    torch.testing.assert_close(a[near + 1 :], b[near + 1 :], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(a[near], b[near], atol=1e-5)
    a, b = (teacher_logits(module, t) for t in (tokens, other))
    assert arch == "gpt_oss" or not torch.allclose(a[-1], b[-1], atol=1e-5)
