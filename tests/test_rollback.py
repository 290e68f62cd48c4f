"""Tokens that are taken back, and requests that continue from a running one."""

from __future__ import annotations

import functools

import pytest
from strategies import context_for, make_engine
from test_engine import ask, tokens
from test_prefix_hits import indexed

from kvframe.engine import Engine
from kvframe.errors import RequestError
from kvframe.testing import tiny_model, wrap
from kvframe.testing.harness import poison_free

KINDS = ["paged-1", "paged-16", "contiguous", "index-4"]


@functools.cache
def model_of(arch):
    return wrap(tiny_model(arch))


def engine(arch="llama", kind="paged-16", chunk=None, **options) -> Engine:
    name, _, size = kind.partition("-")
    if name == "index":
        context = context_for(model_of(arch), **{"max_requests": 16, **options})
        limits = {key: getattr(context, key) for key in ("max_len", "max_requests", "max_step_tokens")}
        cache = indexed(context, int(size), 400)
        return Engine(model_of(arch), cache, **limits, prefill_chunk=chunk, clock="virtual")
    own = [f"cache.layout.block_size={size}"] if size else []
    strategy = "paged-16" if name == "paged" else name
    return make_engine(model_of(arch), strategy, chunk=chunk, overrides=own, **options)


def step(e: Engine) -> list:
    """One step, with the books checked and poison where nobody should read."""
    events = e.step()
    e.cache.check()
    poison_free(e.cache)
    return events


def until(e: Engine, id: str, outputs: int, sample: int = 0) -> list:
    """Steps until a sample has put out this many tokens."""
    events = []
    for _ in range(500):
        if e.intake.living(id, sample).outputs >= outputs:
            return events
        events += step(e)
    raise AssertionError(f"{id} has not got {outputs} tokens in 500 steps")


def finish(e: Engine) -> dict:
    """(id, sample) -> output of everything that is left."""
    done = {}
    while e.has_work:
        done |= {(event.id, event.sample): event.output for event in step(e) if event.output is not None}
    assert e.cache.stats().total("reserved") == 0
    return done


def alone(request, arch="llama"):
    (output,) = engine(arch).generate([request])
    return output


def same(output, wanted) -> None:
    """The same tokens, text, end and log-probabilities."""
    assert (output.output_tokens, output.text) == (wanted.output_tokens, wanted.text)
    assert (output.finish_reason, output.prompt_tokens) == (wanted.finish_reason, wanted.prompt_tokens)
    assert len(output.logprobs or ()) == len(wanted.logprobs or ())
    for mine, yours in zip(output.logprobs or (), wanted.logprobs or ()):
        assert mine["token"] == yours["token"] and mine["logprob"] == pytest.approx(yours["logprob"], abs=1e-4)


# -- rollback ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3"])
def test_after_a_rollback_everything_is_as_if_it_had_not_been(arch, kind):
    """Again and again, from every kind of place, greedy and drawn, beside somebody else."""
    e = engine(arch, kind)
    requests = [
        ask(tokens(21, 3), id="greedy", max_new_tokens=30, logprobs=2),
        ask(tokens(13, 4), id="drawn", max_new_tokens=30, temperature=1.0, seed=7, logprobs=0),
    ]
    for request in requests:
        e.add(request)
    lost = 0
    for outputs, back in ((3, 1), (9, 9), (20, 5), (20, 17), (28, 12), (29, 0)):
        for name in ("greedy", "drawn"):
            until(e, name, outputs)
            sequence = e.intake.living(name, 0)
            before = sequence.tokens.tolist()
            length = sequence.n - back
            kept = e.rollback(name, back)
            assert sequence.tokens.tolist() == before[:length] and kept == sequence.computed < length
            lost += length - 1 - kept
            e.cache.check()
            poison_free(e.cache)
    done = finish(e)
    for request in requests:
        same(done[request.id, 0], alone(request, arch))
    assert (lost > 0) == (arch != "llama" and kind != "contiguous"), "a window may have dropped what comes into sight"


def test_a_rollback_keeps_what_it_can():
    e = engine()
    e.add(ask(tokens(20), id="a", max_new_tokens=30))
    until(e, "a", 20)
    computed = e.meter.computed
    assert e.rollback("a", 8) == 20 + 12 - 1
    until(e, "a", 20)
    assert e.meter.computed == computed + 8, "one for each token that comes again"


@pytest.mark.parametrize("cut", range(1, 9))
def test_who_is_rolled_back_and_ended_looks_as_if_it_had_ended_there(cut):
    request = ask(tokens(9), id="a", max_new_tokens=30, logprobs=1, stop=["never"])
    outputs = []
    for extra in (0, 6):
        e = engine()
        e.add(request)
        until(e, "a", cut + extra)
        e.rollback("a", extra)
        e.abort("a")
        (output,) = finish(e).values()
        outputs.append((output.to_dict(), {k: e.summary()[k] for k in ("output_tokens", "itl_s_p50", "itl_s_p99")}))
    assert outputs[0] == outputs[1]
    assert len(outputs[0][0]["output_tokens"]) == cut


def test_what_was_answered_less_the_void_events_is_the_text():
    e = engine()
    e.add(ask(tokens(9), id="a", max_new_tokens=40))
    events = until(e, "a", 22)
    e.rollback("a", 15)
    del events[-15:]
    while e.has_work:
        events += step(e)
    assert "".join(event.text for event in events) == events[-1].output.text
    assert [event.token for event in events] == events[-1].output.output_tokens


@pytest.mark.parametrize("back", range(1, 9))
def test_stop_strings_across_the_cut(back):
    """The text is cut within the stop string, before it and behind its beginning."""
    free = alone(ask(tokens(9), max_new_tokens=40))
    starts = [len("".join(parts)) for parts in _texts(free)]
    stop = free.text[starts[9] : starts[13]]
    assert free.text.find(stop) == starts[9] and len(stop) > 3
    request = ask(tokens(9), id="a", max_new_tokens=40, stop=[stop])
    e = engine()
    e.add(request)
    until(e, "a", 12)
    assert e.intake.living("a", 0).text._held, "the beginning of the stop string waits"
    e.rollback("a", back)
    (output,) = finish(e).values()
    same(output, alone(request))
    assert output.text == free.text[: starts[9]] and output.finish_reason == "stop"


def _texts(output) -> list[list[str]]:
    """Texts of the first i tokens, for every i."""
    codec = engine().intake.text
    return [[codec.decode(output.output_tokens[:i])] for i in range(len(output.output_tokens) + 1)]


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_rollback_under_preemption(arch):
    """Short of room: of running ones, of preempted ones that wait, and of ones that have not begun."""
    e = make_engine(model_of(arch), "paged-16", short=True)
    requests = [ask(tokens(10 + 3 * i, i), id=f"q{i}", max_new_tokens=24, logprobs=0) for i in range(10)]
    for request in requests:
        e.add(request)
    done, waiting, running = {}, 0, 0
    for i in range(2000):
        done |= {event.id: event.output for event in step(e) if event.output is not None}
        if not e.has_work:
            break
        living = [s for s in (*e.scheduler.waiting, *e.scheduler.running) if s.outputs]
        if i % 5 == 0 and i < 200 and living:
            sequence = living[i // 5 % len(living)]
            waits = sequence in e.scheduler.waiting
            kept = e.rollback(sequence.request_id, min(4, sequence.outputs))
            assert kept == 0 or not waits
            waiting, running = waiting + waits, running + (not waits)
    assert waiting > 2 and running > 2 and any(output.preemptions for output in done.values())
    for request in requests:
        same(done[request.id], alone(request, arch))


def test_one_sample_of_many():
    request = ask(tokens(9), id="a", n=3, temperature=1.0, seed=3, max_new_tokens=12)
    wanted = engine().generate([request])
    e = engine()
    e.add(request)
    assert e.rollback("a", 0, sample=2) == 0, "it has not begun"
    until(e, "a", 8)
    e.rollback("a", 8, sample=2)
    e.rollback("a", 3, sample=1)
    done = finish(e)
    for output in wanted:
        same(done["a", output.sample], output)


def test_events_of_a_step_that_failed_are_taken_back(monkeypatch):
    e = engine()
    for name in ("a", "b"):
        e.add(ask(tokens(9, 1), id=name))
    events, accept = [*step(e), *step(e)], e._accept
    with monkeypatch.context() as patch:
        patch.setattr(e, "_accept", lambda s, *rest: accept(s, *rest) if s.request_id == "a" else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            e.step()
    assert e.rollback("a", 2) == 0, "it was preempted"
    events = [event for event in events if event.id == "a"][:-1]
    while e.has_work:
        events += [event for event in step(e) if event.id == "a"]
    assert (
        [event.token for event in events] == events[-1].output.output_tokens == alone(ask(tokens(9, 1))).output_tokens
    )


def test_what_cannot_be_taken_back_is_named():
    e = engine()
    e.add(ask(tokens(9), id="a", n=2, temperature=1.0))
    until(e, "a", 3)
    for wrong in (4, -1, 1.0, True, "1", None):
        with pytest.raises(RequestError, match=r"tokens of request 'a' cannot be taken back\n  valid: 0 .. 3\n  fix"):
            e.rollback("a", wrong)
    with pytest.raises(RequestError, match=r"request 'b' is not running\n  valid: 'a'\n  fix"):
        e.rollback("b", 1)
    with pytest.raises(RequestError, match=r"request 'a' has no running sample 2\n  valid: 0, 1\n  fix"):
        e.rollback("a", 1, sample=2)
    assert e.intake.living("a", 0).outputs == 3
    finish(e)
    with pytest.raises(RequestError, match="request 'a' is not running"):
        e.rollback("a", 0)
