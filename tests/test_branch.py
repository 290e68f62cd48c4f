"""Requests that continue from a running one."""

from __future__ import annotations

import pytest
from strategies import make_engine
from test_engine import ask, tokens
from test_rollback import KINDS, alone, engine, finish, model_of, same, step, until

from kvframe.errors import PromptTooLongError, RequestError
from kvframe.types import SamplingParams


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize("rows", [16, 1], ids=["room", "no row"])
def test_a_branch_equals_a_fresh_request(arch, kind, rows):
    e = engine(arch, kind, max_requests=rows)
    first = ask(tokens(21, 3), id="a", max_new_tokens=25)
    e.add(first)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8, seed=4, logprobs=1)
    until(e, "a", 9)
    sequence = e.intake.living("a", 0)
    prompt, computed = sequence.tokens.tolist() + [5, 6, 7], sequence.computed
    assert e.branch("a", [5, 6, 7], params, new_id="b") == "b"
    same_as_first = e.branch("a", ())
    e.cache.check()
    done = finish(e)
    same(done["a", 0], alone(first, arch))
    branch = done["b", 0]
    assert branch.prompt_tokens == prompt
    same(branch, alone(ask(prompt, max_new_tokens=12, temperature=0.8, seed=4, logprobs=1), arch))
    same(done[same_as_first, 0], alone(ask(prompt[:-3], max_new_tokens=25), arch))
    if rows > 1:
        assert branch.cached_tokens == computed, "what the sample had computed is shared"
    assert 0 <= branch.ttft_s < 0.5, "its time begins where it is made"


def test_branches_of_branches_and_samples():
    e = engine(kind="paged-4")
    e.add(ask(tokens(11), id="a", max_new_tokens=6, n=2, temperature=1.0, seed=1))
    until(e, "a", 4)
    tree = {name: e.intake.living("a", i).tokens.tolist() + [9] for i, name in enumerate("xy")}
    for i, name in enumerate("xy"):
        e.branch("a", [9], SamplingParams(max_new_tokens=9, ignore_eos=True, n=2), new_id=name, sample=i)
    until(e, "x", 2)
    tree["z"] = e.intake.living("x", 0).tokens.tolist() + [8] * 20
    e.branch("x", [8] * 20, SamplingParams(max_new_tokens=9, ignore_eos=True), new_id="z")
    done = finish(e)
    for name, prompt in tree.items():
        same(done[name, 0], alone(ask(prompt, max_new_tokens=9)))
    assert done["x", 1].output_tokens == done["x", 0].output_tokens, "greedy"


def test_a_branch_of_one_who_still_computes_its_prompt():
    prompt = tokens(64, 1)
    for kind, computed in (("index-4", 64 + 1 + 5), ("paged-4", 8 + 56 + 56 + 1 + 5)):
        e = engine(kind=kind, chunk=8)
        e.add(ask(prompt, id="a", max_new_tokens=1))
        step(e)
        e.branch("a", [7], SamplingParams(max_new_tokens=6, ignore_eos=True), new_id="b")
        done = finish(e)
        same(done["b", 0], alone(ask([*prompt, 7])))
        assert e.meter.computed == computed, "waiting for the index is better, forking is better than nothing"


def test_a_branch_under_pressure():
    e = make_engine(model_of("llama"), "paged-16", short=True)
    prompts = {"a": tokens(30)}
    e.add(ask(prompts["a"], id="a", max_new_tokens=40))
    until(e, "a", 5)
    for i in range(4):
        prompts[f"b{i}"] = e.intake.living("a", 0).tokens.tolist() + tokens(20, i)
        e.branch("a", tokens(20, i), SamplingParams(max_new_tokens=20, ignore_eos=True), new_id=f"b{i}")
        step(e)
    done = finish(e)
    assert sum(output.preemptions for output in done.values()) > 0
    for name, prompt in prompts.items():
        same(done[name, 0], alone(ask(prompt, max_new_tokens=40 if name == "a" else 20)))


def test_a_branch_is_refused_like_any_request():
    e = engine()
    e.add(ask(tokens(9), id="a"))
    until(e, "a", 2)
    with pytest.raises(RequestError, match="request 'b' is not running"):
        e.branch("b", [5])
    with pytest.raises(RequestError, match="'a' is already running"):
        e.branch("a", [5], new_id="a")
    with pytest.raises(RequestError, match="token id 256 is not in the vocabulary"):
        e.branch("a", [256])
    with pytest.raises(RequestError, match="is not one row of token ids"):
        e.branch("a", "text")
    with pytest.raises(PromptTooLongError, match="has a prompt of 101 tokens"):
        e.branch("a", [5] * 90)
    assert e.branch("a", [5], SamplingParams(max_new_tokens=0), new_id="none") == "none"
    done = finish(e)
    assert sorted(done) == [("a", 0), ("none", 0)] and done["none", 0].finish_reason == "length"
