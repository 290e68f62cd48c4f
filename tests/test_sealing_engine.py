"""Engines whose codec seals groups of tokens: the same tokens and logits whatever happens to a request on its way."""

from __future__ import annotations

import functools

import pytest
from strategies import make_engine
from test_engine import ask, tokens
from test_rollback import finish, same, step, until

from kvframe.testing import tiny_model, wrap
from kvframe.testing.harness import run_checked

INT4 = ["cache/codec=int4", "cache.codec.group=4"]
WINDOW = ["cache/retention=sliding_window", "cache.retention.window=9"]


@functools.cache
def model_of(arch):
    return wrap(tiny_model(arch))


def engine(arch="llama", *, chunk=None, index="radix", size=8, more=(), **options):
    """An engine whose codec seals groups of 4 tokens."""
    own = ["cache.memory=1MiB", f"cache/index={index}", *INT4, f"cache.layout.block_size={size}", *more]
    return make_engine(model_of(arch), "paged-16", chunk=chunk, overrides=own, **{"max_requests": 8, **options})


def alike(output, wanted) -> None:
    """The same tokens. Sums of a model in batches of other shapes differ in the last bits, which now and then moves a
    scale by one float16 step, or a number of a later layer to the next code: log-probabilities are nearly the same."""
    assert output.output_tokens == wanted.output_tokens
    for mine, yours in zip(output.logprobs, wanted.logprobs):
        assert mine["logprob"] == pytest.approx(yours["logprob"], abs=5e-3)


@pytest.mark.parametrize("arch, more", [("llama", ()), ("gemma3n", ()), ("gemma2", ()),
    ("llama", (*WINDOW, "cache.retention.positions=cache"))], ids=str)  # fmt: skip
def test_tokens_and_logits_whatever_the_chunks_the_batch_and_the_hits(arch, more):
    requests = [ask(tokens(n, n % 3), id=f"q{n}", max_new_tokens=5, logprobs=1) for n in (40, 3, 17)]
    wanted = [run_checked(engine(arch, index="none", more=more), [request])[0] for request in requests]
    for chunk in (1, 7, 32, 512) if arch == "llama" and not more else (7, 512):
        e = engine(arch, chunk=chunk, more=more)
        for _ in range(2):
            for output, alone in zip(run_checked(e, requests), wanted):
                same(output, alone)
                assert output.cached_tokens % 4 == 0
        assert output.cached_tokens >= 8, "the last one is found again"


def test_under_pressure_samples_and_rollback_are_as_if_nothing_had_been():
    e = make_engine(model_of("llama"), "paged-16", short=True, overrides=["cache/index=radix", *INT4])
    requests = [ask(tokens(10 + 3 * i, i), id=f"q{i}", max_new_tokens=20, logprobs=0) for i in range(8)]
    requests.append(ask(tokens(13), id="many", max_new_tokens=9, n=3, temperature=1.0, seed=3, logprobs=0))
    for request in requests:
        e.add(request)
    for name, outputs, back in (("q0", 3, 1), ("q0", 12, 9), ("q1", 7, 2)):
        until(e, name, outputs)
        e.rollback(name, back)
    done = finish(e)
    assert sum(output.preemptions for output in done.values()) > 0
    for request in requests:
        for output in engine(index="none").generate([request]):
            alike(done[request.id, output.sample], output)


def test_branches():
    e = engine(index="none")
    e.add(ask(tokens(21), id="a", max_new_tokens=20))
    until(e, "a", 6)
    prompt = e.intake.living("a", 0).tokens.tolist() + [5, 6]
    e.branch("a", [5, 6], new_id="b")
    step(e)
    e.abort("a")
    same(finish(e)["b", 0], engine(index="none").generate([ask(prompt, max_new_tokens=20)])[0])
