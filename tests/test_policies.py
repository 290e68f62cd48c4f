"""Who is admitted next, and who waits for a prefix that somebody else is computing."""

from __future__ import annotations

import functools
import random

import pytest
from strategies import context_for, make_engine
from test_engine import ask, tokens
from test_prefix_hits import indexed

from kvframe.engine import Engine
from kvframe.errors import ConfigError
from kvframe.policies import LongestPrefix, make_policy
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked

POLICIES = ("fcfs", "prefix")


@functools.cache
def llama():
    return wrap(tiny_model("llama"))


def sharing(policy="fcfs", size=4, blocks=400, chunk=None, **options) -> Engine:
    """An engine whose cache finds prefixes."""
    context = context_for(llama(), **{"max_requests": 16, **options})
    limits = {name: getattr(context, name) for name in ("max_len", "max_requests", "max_step_tokens")}
    cache = indexed(context, size, blocks)
    return Engine(llama(), cache, **limits, prefill_chunk=chunk, policy=policy, clock="virtual")


def finish(e: Engine, steps: int = 500) -> dict:
    """Outputs by id, with the books checked after every step."""
    done = {}
    for _ in range(steps):
        done |= {event.output.id: event.output for event in e.step() if event.output is not None}
        e.cache.check()
        if not e.has_work:
            return done
    raise AssertionError(f"{len(e.scheduler.waiting)} wait and {len(e.scheduler.running)} run after {steps} steps")


def started(e: Engine) -> list[str]:
    """Ids in the order in which they are admitted; grows while the engine works."""
    order, start = [], e.scheduler._start

    def watched(sequence):
        fits = start(sequence)
        order.extend([sequence.request_id] * fits)
        return fits

    e.scheduler._start = watched
    return order


def test_a_policy_that_does_not_exist():
    with pytest.raises(ConfigError, match="engine.policy='lifo' does not exist\n  valid: fcfs, prefix\n  fix: .*fcfs"):
        sharing("lifo")
    assert isinstance(make_policy("prefix"), LongestPrefix)


# -- a shared prefix is computed once ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
def test_what_a_batch_shares_is_computed_once(policy, chunk):
    shared = tokens(32, 1)
    requests = [ask(shared + [i + 3] + tokens(4, i), id=f"q{i}", max_new_tokens=5) for i in range(8)]
    e = sharing(policy, chunk=chunk)
    for output in run_checked(e, requests):
        assert check_greedy(llama().module, output.prompt_tokens, output.output_tokens) > 0
    assert e.summary()["computed_tokens"] == 32 + 8 * 5 + 8 * 4
    plain = make_engine(llama(), "paged-16", chunk=chunk)
    run_checked(plain, requests)
    assert plain.summary()["computed_tokens"] == 8 * (32 + 5) + 8 * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_prefixes_of_prefixes(policy):
    """A chain: each shares more with the next one than with the others."""
    text = tokens(80, 1)
    e = sharing(policy, chunk=8)
    outputs = run_checked(e, [ask(text[:n] + [251 + n % 4], max_new_tokens=1) for n in (16, 32, 48, 64, 80)])
    assert e.summary()["computed_tokens"] == 80 + 5, outputs


def test_others_go_ahead_of_one_who_waits_and_it_comes_next():
    e = sharing(max_requests=3, chunk=8)
    order = started(e)
    prompt = tokens(64, 1)
    for name, own in (("first", prompt + [3]), ("waits", prompt + [4]), ("other", tokens(6, 2)), ("late", [9])):
        e.add(ask(own, id=name, max_new_tokens=3))
    e.step()
    assert order == ["first", "other", "late"]
    outputs = finish(e)
    assert order == ["first", "other", "late", "waits"] and outputs["waits"].cached_tokens == 64


def test_one_who_waits_is_as_soon_as_if_it_had_computed_itself():
    prompt = tokens(64, 1)
    requests = [ask(prompt + [i + 3], id=str(i), max_new_tokens=3) for i in range(4)]
    waits = sharing(max_step_tokens=16).generate(requests)
    alone = make_engine(llama(), "paged-16", max_step_tokens=16).generate(requests)
    assert all(a.ttft_s <= b.ttft_s for a, b in zip(waits, alone)) and waits[-1].ttft_s < alone[-1].ttft_s / 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fate", ["abort", "preempt", "forward"])
def test_who_waits_goes_on_when_the_other_does_not(monkeypatch, policy, fate):
    e = sharing(policy, chunk=8)
    prompt = tokens(64, 1)
    e.add(ask(prompt + [3], id="first"))
    for i in range(3):
        e.add(ask(prompt + [4 + i], id=f"waits{i}"))
    e.step()
    e.step()
    first, waiting = e.scheduler.running[0], list(e.scheduler.waiting)
    assert len(waiting) == 3 and all(e.cache.peek(s) == (16, 48) for s in waiting)
    if fate == "abort":
        e.abort("first")
    elif fate == "preempt":
        e.scheduler._preempt(first)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(e.model, "forward", lambda *a: (_ for _ in ()).throw(RuntimeError("once")))
            with pytest.raises(RuntimeError, match="once"):
                e.step()
    assert all(e.cache.peek(s) == (16, 0) for s in waiting), "who does not run computes nothing"
    outputs = finish(e)
    assert [outputs[f"waits{i}"].finish_reason for i in range(3)] == ["length"] * 3
    for output in outputs.values():
        check_greedy(llama().module, output.prompt_tokens, output.output_tokens)
    ended = fate == "abort"
    assert e.summary()["computed_tokens"] == 64 + (3 if ended else 4) + (3 if ended else 4) * 5, "still only once"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_short_of_room_everybody_ends(policy, seed):
    draw = random.Random(seed)
    e = sharing(policy, blocks=30, chunk=8, max_requests=6)
    prompts = [tokens(draw.choice([16, 32, 48]), draw.randint(1, 2)) + tokens(draw.randint(1, 9), i) for i in range(14)]
    outputs = run_checked(e, [ask(p, max_new_tokens=20, arrival=draw.random() / 5) for p in prompts])
    assert e.summary()["preemptions"] > 0
    for output in outputs:
        assert check_greedy(llama().module, output.prompt_tokens, output.output_tokens) > 0


@pytest.mark.parametrize("room", [16, 2])
def test_samples_that_could_not_fork_find_the_prompt(room):
    e = sharing(max_requests=room)
    request = ask(tokens(33, 1), n=4, temperature=1.0, seed=5, max_new_tokens=4)
    outputs = run_checked(e, [request])
    computed = 33 + 4 * 3 + {16: 0, 2: 2}[room]  # of the others the last token of the prompt
    assert e.summary()["computed_tokens"] == computed
    wide = run_checked(sharing(), [request])
    assert [o.output_tokens for o in outputs] == [o.output_tokens for o in wide]


# -- order ---------------------------------------------------------------------------------------------------


def test_the_longest_prefix_goes_first_and_ties_go_by_arrival():
    known = tokens(40, 1)
    orders = {}
    for policy in POLICIES:
        e = sharing(policy, max_requests=1)
        e.generate([ask(known)])
        orders[policy] = started(e)
        lengths = {"none": 0, "short": 8, "long": 40, "long too": 40, "half": 20}
        e.generate([ask(known[:n] + tokens(4, n), id=name) for name, n in lengths.items()])
    assert orders["fcfs"] == ["none", "short", "long", "long too", "half"]
    assert orders["prefix"] == ["long", "long too", "half", "short", "none"]


def test_who_has_not_arrived_is_not_chosen():
    known = tokens(40, 1)
    e = sharing("prefix", max_requests=1)
    e.generate([ask(known)])
    order = started(e)
    e.generate([ask(known + [3], id="later", arrival=0.02), ask([5], id="now"), ask([6], id="too")])
    assert order == ["now", "later", "too"]
