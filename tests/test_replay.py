"""A replayed forward is the model's own, number by number; what cannot be proved is left to the modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kvframe.config import build_engine, compose
from kvframe.hf import HFModel, random_model
from kvframe.hf.replay import replayed as replaying
from kvframe.hf.replay.program import Name, Recording, unified
from kvframe.hf.replay.replayed import Replayed, StandIn
from kvframe.hf.replay.tape import CannotReplay, recording
from kvframe.kernels.cpu_chain import Chain
from kvframe.testing.models import ARCHS, tiny_model
from kvframe.testing.oracle import check_greedy
from kvframe.types import Request, SamplingParams

OWN = ["model=random", "cache=paged", "cache.memory=4MiB", "engine.clock=virtual", "engine.max_step_tokens=24"]
SIZES = ((1, 1), (2, 2), (4, 0), (7, 3), (32, 32), (1, 1))  # tokens, wanted logits


def wrapped(name: str, dtype=torch.float32) -> HFModel:
    return HFModel.from_module(tiny_model(name).to(dtype), verify=False)


def both(model: HFModel, tokens: int, wanted: int, start: int = 3):
    """Logits of the replayed forward and of the modules."""
    running = model.running
    if isinstance(model._run, Replayed):
        model._run.settle()
    running.cache, running.plan = StandIn(), object()
    given = model._sample_inputs(tokens, wanted, start)
    with torch.inference_mode():
        return model._run(**given)[0].clone(), model.module(**given)[0]


def chains(model: HFModel) -> list[Chain]:
    return [step.function for step in model._run.program.steps if isinstance(step.function, Chain)]


@pytest.mark.parametrize("name", ARCHS)
def test_every_model_is_replayed_number_by_number(name):
    model = wrapped(name)
    assert model.replay() is None and isinstance(model._run, Replayed)
    for tokens, wanted in SIZES:
        assert torch.equal(*both(model, tokens, wanted))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name, most", [("llama", 0), ("qwen3", 0), ("phi3", 0), ("gemma2", 2**-6), ("olmo2", 0)])
def test_chains_compute_what_the_modules_do(name, most, threads, monkeypatch):
    """In bf16; activations that a chain does not have are torch's. most: of the largest logit."""
    model = wrapped(name, torch.bfloat16)
    model.pack_weights()
    assert model.replay() is None and chains(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for tokens, wanted in SIZES:
        found, module = both(model, tokens, wanted)
        assert found.shape == module.shape
        if wanted:
            assert (found - module).abs().max() <= most * module.abs().max()


def test_a_chain_has_all_of_a_layer_but_attention():
    model = random_model("tiny", "bfloat16")
    model.pack_weights()
    model.replay()
    names = [getattr(step.function, "__name__", type(step.function).__name__) for step in model._run.program.steps]
    between = names[names.index("attend") + 1 :]
    assert between[:2] == ["Chain", "attend"]  # the output of one layer to q, k and v of the next: one call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_stay_the_same(dtype):
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    requests = [Request(prompt_tokens=list(range(3, 3 + n)), sampling=sampling) for n in (1, 17, 40)]
    tokens = []
    for replay in ("true", "false"):
        model = random_model("tiny", dtype)
        engine = build_engine(compose([*OWN, f"engine.replay={replay}"]), model)
        assert isinstance(model._run, Replayed) == (replay == "true")
        tokens.append([output.output_tokens for output in engine.generate(requests)])
    assert tokens[0] == tokens[1]


def test_greedy_tokens_are_those_of_ref():
    model = wrapped("qwen3")
    engine = build_engine(compose([*OWN, "cache=radix", "cache.layout.block_size=4"]), model)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    requests = [Request(prompt_tokens=list(range(3, 3 + n)), sampling=sampling) for n in (1, 9, 30)]
    for output in engine.generate(requests):
        check_greedy(model.module, output.prompt_tokens, output.output_tokens)


def test_long_steps_go_through_the_modules(monkeypatch):
    model = wrapped("llama")
    model.replay()
    model._run.settle()
    calls = []
    monkeypatch.setattr(model._run, "run", lambda **inputs: calls.append(inputs["input_ids"].shape[1]))
    model.running.cache, model.running.plan = StandIn(), object()
    for tokens in (32, 33):
        model._run(**model._sample_inputs(tokens, 1, 0))
    assert calls == [32]


def test_weights_that_changed_are_recorded_again():
    """Gemma stores its norms as w - 1; a recording knows the tensors, a chain their addresses."""
    for dtype in (torch.float32, torch.bfloat16):
        model = wrapped("gemma2", dtype)
        model.pack_weights()
        model.replay()
        for part in model.module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                setattr(part, name, nn.Parameter(weight.detach() * 1.25, requires_grad=False))
        model.weights_changed()
        found, module = both(model, 5, 5)
        assert (found - module).abs().max() <= (0 if dtype is torch.float32 else 2**-6) * module.abs().max()


class Strange(nn.Module):
    """The forward of a language model, with something in it."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.table = nn.Embedding(50, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, input_ids, position_ids, logits_to_keep, use_cache=False):
        x = self.table(input_ids) + position_ids[..., None]
        return (self.what(self, x)[:, logits_to_keep],)


def chunked(module, x):
    return x.cumsum(1) if x.shape[1] > 4 else x


STRANGE = {
    "a value decides": (lambda module, x: x * 2 if x.sum() > 0 else x, "depends on values"),
    "a value is read": (lambda module, x: x * x.max().item(), "depends on values"),
    "a list of values": (lambda module, x: x * max(x.flatten().tolist()), "looks at values"),
    "chance": (lambda module, x: F.dropout(x, 0.5, training=True), "depends on values"),
    "noise": (lambda module, x: x + torch.randn_like(x), "depends on values"),
    "a mask": (lambda module, x: x + x[x > 0].sum(), "depends on values"),
    "a buffer": (lambda module, x: x + module.count.add_(1), "changes a buffer"),
    "a length decides": (chunked, "for|call"),
    "arithmetic of lengths": (lambda module, x: x + torch.zeros(x.shape[1] ** 2 + 1).sum(), "is called with"),
}


def sample(tokens, wanted, start):
    at = torch.arange(tokens)
    return {"input_ids": at[None] + 1, "position_ids": at[None] + start, "logits_to_keep": torch.arange(wanted)}


class Idle:
    cache = plan = None


def settled(module, longest):
    found = replaying.replayed(module, Idle(), sample, longest)
    if found.settle() == 1:
        raise CannotReplay(found.why)
    return found


@pytest.mark.parametrize("name", STRANGE)
def test_what_cannot_be_proved_is_not_replayed(name):
    what, match = STRANGE[name]
    with pytest.raises(CannotReplay, match=match):
        settled(Strange(what).eval(), 16)


def test_a_length_that_decides_far_away_is_found_by_the_proof():
    """Both recordings are short, and the longest step is held against the module."""
    far = Strange(lambda module, x: x.cumsum(1) if x.shape[1] > 10 else x).eval()
    with pytest.raises(CannotReplay, match="of 16 tokens gives other logits"):
        settled(far, 16)
    assert settled(far, 8)
    for where in (lambda x: x.shape[1] == 2, lambda x: x.shape[1] > 10):
        first = Strange(lambda module, x: torch.cat([x[:, :1] * 2, x[:, 1:]], 1) if where(x) else x).eval()  # noqa: B023
        with pytest.raises(CannotReplay, match="gives other logits"):
            settled(first, 16)


def test_harmless_things_are_replayed():
    def harmless(module, x):
        x = F.dropout(x, 0.5, training=False)
        y = torch.zeros(x.shape)
        y[:] = x  # a write to what the forward made
        y.mul_(2)
        return y.view(x.shape[0], x.shape[1], 2, -1).flatten(2) + torch.arange(2 * x.shape[1])[: x.shape[1], None]

    module = Strange(harmless).eval()
    found = settled(module, 16)
    for tokens in (1, 3, 9, 16):
        given = sample(tokens, 1, 2)
        assert torch.equal(found(**given)[0], module(**given)[0])


def test_several_tokens_are_proved_when_they_come_again():
    """And where they are others than one, one token goes on being replayed."""
    module = Strange(lambda module, x: x.cumsum(1) if x.shape[1] > 7 else x * 2).eval()
    for longest in (7, 16):
        found, runs = replaying.replayed(module, Idle(), sample, longest), []
        found.run = lambda run=found.run, runs=runs, **given: runs.append(given["input_ids"].shape[1]) or run(**given)
        for tokens in (1, 4, 4, 4, 1, 4, 5, 1):
            given = sample(tokens, 1, 2)
            assert torch.equal(found(**given)[0], module(**given)[0])
        assert runs == ([1, 1, 4, 5, 1] if longest == 7 else [1, 1, 1])
        assert (found.why is None) == (longest == 7)


def test_modules_with_hooks_are_left_alone():
    model = wrapped("llama")
    seen = []
    model.module.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert "hooks" in model.replay()
    both(model, 2, 1)
    assert len(seen) == 2


def test_tokens_and_logits_are_told_apart():
    """T and K of the recordings stand in the program as such, and as their multiples."""
    recordings = []
    module = Strange(lambda module, x: x.repeat(2, 1, 1).view(2 * x.shape[1], -1)[None, : x.shape[1]]).eval()
    for tokens, wanted in replaying.RECORDED:
        given = sample(tokens, wanted, 0)
        with torch.inference_mode(), recording(module) as tape:
            out = module(**given)[0]
        recordings.append(Recording(tape.calls, given, {"T": tokens, "K": wanted}, out))
    program = unified(*recordings)
    written = [value for step in program.steps for value in step.args]
    assert Name("2 * T") in written
    assert "def run(input_ids, position_ids, logits_to_keep)" in program.source()[0]


class Writing(nn.Module):
    """Between two products: something that is written in place."""

    def __init__(self, own, write):
        super().__init__()
        self.own, self.write = own, write

    def forward(self, x):
        return self.own.down_proj(self.write(self.own.up_proj(x)))


WRITES = {
    "clamp": lambda x: x.clamp_(-1e-3, 1e-3),
    "scale": lambda x: x.mul_(1.0078),
    "part": lambda x: (x[..., :16].clamp_(-1e-3, 1e-3), x)[1],
    "copied": lambda x: (x.new_empty(x.shape).copy_(x) + x.new_zeros(x.shape)),
    "activation": lambda x: F.silu(x, inplace=True),
    "item": lambda x: (x.__setitem__((..., slice(0, 8)), 0.5), x)[1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_is_not_lost(name, dtype):
    module = tiny_model("llama").to(dtype)
    for layer in module.model.layers:
        layer.mlp = Writing(layer.mlp, WRITES[name])
    model = HFModel.from_module(module, verify=False)
    model.pack_weights()
    assert model.replay() is None
    assert dtype is torch.float32 or chains(model)
    for tokens, wanted in SIZES:
        found, module = both(model, tokens, wanted)
        assert found.shape == module.shape and (found - module).abs().sum() <= 1e-2 * module.abs().sum()
        assert dtype is torch.bfloat16 or torch.equal(found, module)


def test_packing_after_a_recording_and_compiling_after_it():
    model = wrapped("llama", torch.bfloat16)
    assert model.replay() is None and not chains(model)
    assert model.pack_weights() > 0 and chains(model)
    model.compile(backend="eager")
    compiled = model._run
    model.weights_changed()
    assert model._run is compiled


def step_of(model, tokens=3):
    engine = build_engine(compose([*OWN, "kernel=reference"]), model)
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return engine.generate([Request(prompt_tokens=[5, 6, 7, 8], sampling=sampling)])[0].output_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_that_were_changed_are_recorded_again(dtype):
    """Weights that moved, another dtype, modules and hooks of somebody else."""
    model = random_model("tiny", dtype)
    before, tokens = model.version, step_of(model)
    for weight in model.module.parameters():
        weight.data = weight.data.clone()
    assert step_of(model) == tokens and model.version == before + 1
    calls = []
    hook = model.module.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert step_of(model) == tokens and len(calls) >= 3 and model._run is model.module
    hook.remove()
    model.module.lm_head = nn.Sequential(model.module.lm_head)
    model.weights_changed()
    assert step_of(model) == tokens and isinstance(model._run, Replayed)


def test_an_interrupt_while_a_chain_is_prepared(monkeypatch):
    model = wrapped("llama", torch.bfloat16)
    model.pack_weights()
    model.replay()
    chain = chains(model)[0]
    wanted = both(model, 4, 4)[1]
    both(model, 2, 2)

    class Interrupt(BaseException):
        pass

    def interrupted(*_):
        raise Interrupt

    with monkeypatch.context() as patch:
        chain._shown.clear()
        patch.setattr(chain, "_show", interrupted)
        with pytest.raises(Interrupt):
            both(model, 4, 4)
    assert torch.equal(both(model, 4, 4)[0], wanted)


def test_attention_that_answers_something_else_is_an_error():
    model = wrapped("llama", torch.bfloat16)
    model.pack_weights()
    model.replay()

    class Wide(StandIn):
        def attend(self, layer, q, k, v, plan):
            return super().attend(layer, q, k, v, plan).float()

    model._run.settle()
    model.running.cache, model.running.plan = Wide(), object()
    with torch.inference_mode(), pytest.raises(ValueError, match="a chain wants bfloat16"):
        model._run(**model._sample_inputs(4, 1, 0))


def test_what_attention_got_is_its_own():
    """A cache may keep keys and values as they came."""
    model = random_model("tiny", "bfloat16")
    model.pack_weights()
    model.replay()
    kept = []

    class Keeping(StandIn):
        def attend(self, layer, q, k, v, plan):
            kept.append([(x, x.clone()) for x in (q, k, v)])
            return super().attend(layer, q, k, v, plan)

    model._run.settle()
    model.running.cache, model.running.plan = Keeping(), object()
    with torch.inference_mode():
        for start in (1, 5, 9):
            model._run(**model._sample_inputs(4, 1, start))
    assert chains(model) and len(kept) == 3 * len(model.layers)
    assert all(torch.equal(x, copy) for row in kept for x, copy in row)
    assert not torch.equal(kept[0][0][1], kept[len(model.layers)][0][1])
