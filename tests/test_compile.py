"""torch.compile sees one graph, whatever the cache does beside it, and the tokens stay the same."""

from __future__ import annotations

import pytest

from kvframe.config import build_engine, compose
from kvframe.errors import UnsupportedModelError
from kvframe.hf import HFModel, random_model
from kvframe.testing.models import tiny_model
from kvframe.testing.oracle import check_greedy
from kvframe.types import Request, SamplingParams

OWN = ["model=random", "cache.memory=4MiB", "kernel=reference", "engine.clock=virtual", "engine.max_step_tokens=24"]


def tokens(model, *overrides):
    engine = build_engine(compose([*OWN, *overrides]), model)
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    requests = [Request(prompt_tokens=list(range(3, 3 + n)), sampling=sampling) for n in (1, 17, 40)]
    return [(output.prompt_tokens, output.output_tokens) for output in engine.generate(requests)]


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("llama", "gpt2")]


@pytest.mark.parametrize("name", ["gemma2", *NIGHTLY])
def test_the_forward_is_one_graph_and_gives_the_tokens_of_ref(name):
    model = HFModel.from_module(tiny_model(name))
    model.compile(backend="aot_eager", fullgraph=True)
    for prompt, output in tokens(model, "engine.compile=true", "cache=radix", "cache.layout.block_size=4"):
        check_greedy(model.module, prompt, output)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inductor_gives_the_same_tokens(dtype):
    plain, compiled = random_model("tiny", dtype), random_model("tiny", dtype)
    compiled.compile()
    pairs = list(zip(tokens(plain), tokens(compiled, "engine.compile=true")))
    if dtype == "float32":
        assert all(a == b for a, b in pairs)
    else:  # roundings differ
        assert all(len(a[1]) == len(b[1]) == 6 for a, b in pairs)


def test_a_module_that_runs_twice_is_refused():
    model = random_model("tiny", "float32")
    binding = next(vars(part)["_kvframe"] for part in model.module.modules() if "_kvframe" in vars(part))
    binding.layers.append(1)
    with pytest.raises(UnsupportedModelError, match="engine.compile=false"):
        model.compile()
