"""What a user expects of the engine: limits, refusals, samples, seeds, streaming, abort, time."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from strategies import STRATEGIES, make_engine

from kvframe.errors import ConfigError, PromptTooLongError, RequestError
from kvframe.testing import check_greedy, tiny_model, wrap
from kvframe.testing.harness import run_checked
from kvframe.types import Request, SamplingParams


@functools.cache
def llama():
    return wrap(tiny_model("llama"))


def ask(prompt, id=None, **sampling):
    sampling = {"max_new_tokens": 6, "ignore_eos": True, **sampling}
    arrival = sampling.pop("arrival", 0.0)
    key = "prompt" if isinstance(prompt, str) else "prompt_tokens"
    return Request(**{key: prompt}, id=id, arrival=arrival, sampling=SamplingParams(**sampling))


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def engine(strategy="paged-16", **options):
    return make_engine(llama(), strategy, **options)


# -- lengths -------------------------------------------------------------------------------------------------


def test_no_new_tokens_answers_an_empty_text_without_a_step():
    e = engine()
    (output,) = e.generate([ask(tokens(5), max_new_tokens=0)])
    assert (output.output_tokens, output.text, output.finish_reason) == ([], "", "length")
    assert e.summary()["steps"] == 0


def test_one_new_token():
    (output,) = run_checked(engine(), [ask(tokens(5), max_new_tokens=1)])
    assert len(output.output_tokens) == 1 and output.finish_reason == "length"
    assert output.ttft_s is not None and output.itl_s is None


def test_one_token_prompt():
    (output,) = run_checked(engine(), [ask([7])])
    assert check_greedy(llama().module, [7], output.output_tokens) > 0


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt_starts_from_bos(prompt):
    (output,) = engine().generate([ask(prompt)])
    assert output.prompt_tokens == [llama().bos_id]
    assert len(output.output_tokens) == 6


def test_empty_prompt_without_bos_is_refused(monkeypatch):
    monkeypatch.setattr(llama(), "bos_id", None)
    with pytest.raises(RequestError, match="no BOS token"):
        engine().add(ask(""))


def test_prompt_that_is_too_long_names_length_and_limit():
    with pytest.raises(PromptTooLongError, match=r"prompt of 96 tokens; prompt and output together are at most 96"):
        engine().add(ask(tokens(96)))


def test_prompt_as_long_as_the_limit_gets_one_token():
    for strategy in STRATEGIES:
        (output,) = run_checked(engine(strategy), [ask(tokens(95), max_new_tokens=5)])
        assert len(output.output_tokens) == 1 and output.finish_reason == "length"


def test_capacity_of_the_cache_is_a_limit_too():
    e = engine(overrides=["cache.num_blocks=3"])
    assert e.limit == 49, "48 are stored, and one more is answered"
    outputs = e.generate([ask(tokens(49), id="long"), ask(tokens(20), id="short"), ask(tokens(48), id="full")])
    assert [o.finish_reason for o in outputs] == ["refused", "length", "length"]
    assert "'long' has a prompt of 49 tokens; prompt and output together are at most 49" in outputs[0].error
    assert [len(o.output_tokens) for o in outputs] == [0, 6, 1]


def test_token_outside_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="token id 256 is not in the vocabulary"):
        engine().add(ask([1, 256]))


def test_request_needs_exactly_one_prompt():
    with pytest.raises(RequestError, match="exactly one"):
        Request(prompt="a", prompt_tokens=[1])
    with pytest.raises(RequestError, match="exactly one"):
        Request()


@pytest.mark.parametrize(
    "key, value", [("temperature", -1), ("top_p", 0), ("max_new_tokens", -1), ("n", 0), ("stop", [""])]
)
def test_impossible_sampling_values_are_named(key, value):
    with pytest.raises(RequestError, match=f"sampling.{key}"):
        SamplingParams(**{key: value})


def test_unknown_clock():
    from kvframe.clock import make_clock

    with pytest.raises(ConfigError, match="wall, virtual"):
        make_clock("sundial")


# -- ends ----------------------------------------------------------------------------------------------------


def test_eos_ends_and_ignore_eos_goes_on():
    prompt = tokens(9)
    (free,) = engine().generate([ask(prompt, max_new_tokens=8)])
    at = next(i for i, t in enumerate(free.output_tokens) if i and t not in free.output_tokens[:i])
    last = free.output_tokens[at]
    (stopped,) = run_checked(engine(), [ask(prompt, max_new_tokens=8, stop_token_ids=[last])])
    assert stopped.output_tokens == free.output_tokens[: at + 1] and stopped.finish_reason == "stop"
    e = engine()
    e.model = _with_eos(e.model, {last})
    (eos,) = e.generate([ask(prompt, max_new_tokens=8, ignore_eos=False)])
    assert eos.output_tokens == free.output_tokens[: at + 1] and eos.finish_reason == "stop"
    (on,) = e.generate([ask(prompt, max_new_tokens=8)])
    assert on.output_tokens == free.output_tokens


def _with_eos(model, ids):
    import copy

    other = copy.copy(model)
    other.eos_ids = frozenset(ids)
    return other


def test_stop_string_ends_the_text_before_it():
    prompt = tokens(9)
    (free,) = engine().generate([ask(prompt, max_new_tokens=12)])
    stop = free.text[3:5]
    at = free.text.find(stop)
    (stopped,) = run_checked(engine(), [ask(prompt, max_new_tokens=12, stop=[stop])])
    assert stopped.text == free.text[:at] and stopped.finish_reason == "stop"


def test_stream_deltas_add_up_to_the_text():
    e = engine()
    texts: dict[str, str] = {}
    done = {}
    for event in e.stream([ask(tokens(n, n), id=f"q{n}", max_new_tokens=9) for n in (3, 8, 20)]):
        texts[event.id] = texts.get(event.id, "") + event.text
        if event.output is not None:
            done[event.id] = event.output
    assert {name: output.text for name, output in done.items()} == texts and len(done) == 3


# -- samples and seeds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("room", [32, 2])
def test_samples_of_one_prompt_fork_and_equal_lone_requests(strategy, room):
    """n samples share the prompt's blocks; each continues as a request of its own with its seed would."""
    request = ask(tokens(21), n=4, temperature=1.0, seed=5, max_new_tokens=20)
    e = engine(strategy, max_requests=room)
    outputs = run_checked(e, [request, ask(tokens(33, 2))])
    assert [o.sample for o in outputs[:4]] == [0, 1, 2, 3]
    assert len({tuple(o.output_tokens) for o in outputs[:4]}) == 4, "four samples with one text"
    first = engine(strategy).generate([ask(tokens(21), n=1, temperature=1.0, seed=5, max_new_tokens=20)])[0]
    assert outputs[0].output_tokens == first.output_tokens
    if room == 32:
        assert e.summary()["computed_tokens"] == 21 + 33 + 4 * 19 + 5, "the prompt is computed once"
        assert (e.summary()["requests"], e.summary()["samples"], e.summary()["prompt_tokens"]) == (2, 5, 54)
        wanted = 0 if e.cache.block_size == 1 else 3
        assert e.cache.stats().copies >= wanted, "the open block must be copied before a sibling writes to it"


def test_samples_survive_pressure():
    e = make_engine(llama(), "paged-16", short=True)
    request = ask(tokens(40), n=6, temperature=0.0, max_new_tokens=40)
    outputs = run_checked(e, [request])
    assert e.summary()["preemptions"] > 0
    for output in outputs:
        assert check_greedy(llama().module, output.prompt_tokens, output.output_tokens) > 30


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_preemption():
    def request(i):
        return ask(tokens(12 + 3 * i, i), id=f"s{i}", temperature=0.9, top_p=0.9, seed=i, max_new_tokens=24)

    many = run_checked(make_engine(llama(), "paged-16", short=True), [request(i) for i in range(12)])
    assert sum(o.preemptions for o in many) > 0
    for i in (0, 5, 11):
        (alone,) = engine().generate([request(i)])
        assert alone.output_tokens == many[i].output_tokens


def test_requests_without_a_seed_differ_from_each_other_and_repeat_with_the_engine_seed():
    requests = [ask(tokens(5), temperature=1.0, max_new_tokens=12) for _ in range(3)]
    first, second = engine().generate(requests), engine().generate(requests)
    assert [o.output_tokens for o in first] == [o.output_tokens for o in second]
    assert len({tuple(o.output_tokens) for o in first}) == 3


def test_logprobs():
    (output,) = engine().generate([ask(tokens(5), logprobs=3)])
    assert len(output.logprobs) == 6
    for token, row in zip(output.output_tokens, output.logprobs):
        assert row["token"] == token and len(row["top"]) == 3
        assert row["logprob"] == pytest.approx(max(row["top"].values())), "greedy takes the best"


# -- time and order ------------------------------------------------------------------------------------------


def test_virtual_clock_admits_by_arrival_and_is_reproducible():
    requests = [ask(tokens(8, i), id=f"t{i}", arrival=0.5 * (3 - i)) for i in range(4)]
    runs = []
    for _ in range(2):
        outputs = engine().generate(requests)
        runs.append([(o.output_tokens, o.ttft_s, o.itl_s) for o in outputs])
    assert runs[0] == runs[1]
    assert all(0 <= ttft < 0.5 for _, ttft, _ in runs[0]), "each request starts when it arrives"


def test_abort_frees_and_the_others_go_on():
    e = engine()
    for i in range(3):
        e.add(ask(tokens(20, i), id=f"a{i}", max_new_tokens=30))
    for _ in range(5):
        e.step()
    e.abort("a1")
    e.abort("never heard of")
    outputs = []
    while e.has_work:
        outputs += [event.output for event in e.step() if event.output is not None]
        e.cache.check()
    reasons = {o.id: o.finish_reason for o in outputs}
    assert reasons == {"a0": "length", "a1": "abort", "a2": "length"}
    assert e.cache.stats().total("reserved") == 0


def test_whoever_stops_listening_leaves_an_engine_that_works():
    e = engine()
    for event in e.stream([ask(tokens(20), max_new_tokens=30)]):
        if event.token is not None:
            break
    assert not e.has_work and e.cache.stats().total("reserved") == 0
    assert len(e.generate([ask(tokens(20))])[0].output_tokens) == 6


def test_one_id_twice_is_an_error():
    with pytest.raises(RequestError, match="several requests have the id 'x'"):
        engine().generate([ask(tokens(4), id="x"), ask(tokens(5), id="x")])
    e = engine()
    e.add(ask(tokens(4), id="x"))
    with pytest.raises(RequestError, match="already running"):
        e.add(ask(tokens(4), id="x"))
    with pytest.raises(RequestError, match="'text' is not a Request"):
        engine().generate(["text"])


def test_output_that_is_cut_by_the_limit_is_said(caplog):
    (output,) = engine().generate([ask(tokens(90), max_new_tokens=50)])
    assert len(output.prompt_tokens) + len(output.output_tokens) == 96
    assert "ends after 6 of 50 new tokens" in caplog.text


def test_warming_up_leaves_no_trace():
    e = engine()
    e.warm()
    assert e.warmup_seconds > 0 and e.summary()["steps"] == 0 and e.cache.stats().total("peak") == 0
    assert (
        e.generate([ask(tokens(5), temperature=1.0)])[0].output_tokens
        == engine().generate([ask(tokens(5), temperature=1.0)])[0].output_tokens
    ), "seeds of requests that bring none do not depend on it"


def test_broken_logits_end_one_request_and_not_the_others(monkeypatch):
    e = engine()
    forward = e.model.forward

    def broken(tokens_, plan, at):
        logits = forward(tokens_, plan, at)
        if len(at) == 2:
            logits = logits * torch.tensor([[float("nan")], [1.0]])
        return logits

    monkeypatch.setattr(e.model, "forward", broken)
    outputs = e.generate([ask(tokens(4), id="bad"), ask(tokens(5), id="good")])
    assert [o.finish_reason for o in outputs] == ["error", "length"]
    assert "NaN" in outputs[0].error and len(outputs[1].output_tokens) == 6


def test_summary_adds_up():
    e = engine("contiguous")
    outputs = e.generate([ask(tokens(10, i)) for i in range(3)])
    summary = e.summary()
    assert summary["output_tokens"] == sum(len(o.output_tokens) for o in outputs) == 18
    assert summary["computed_tokens"] == 3 * (10 + 5) and summary["cached_tokens"] == 0
    block = e.cache.stats().groups[0].block_bytes
    assert summary["kv_bytes_reserved"] == summary["kv_bytes_peak"] == 3 * block
    assert 0 < summary["kv_bytes_used"] < summary["kv_bytes_reserved"]
    assert summary["utilization"] == pytest.approx(12.5 / 96, abs=1e-6), "mean of 10..15 tokens of 96 slots"


def test_engines_may_share_a_model():
    first, second = engine("paged-16"), engine("contiguous")
    requests = [ask(tokens(20, i)) for i in range(3)]
    alone = [o.output_tokens for o in first.generate(requests)]
    assert [o.output_tokens for o in second.generate(requests)] == alone
    assert [o.output_tokens for o in first.generate(requests)] == alone
    for i in range(3):
        first.add(ask(tokens(20, i)))
        second.add(ask(tokens(20, i)))
    found = {id(first): [], id(second): []}
    while first.has_work or second.has_work:
        for e in (first, second):
            found[id(e)] += [event.output.output_tokens for event in e.step() if event.output]
    assert found[id(first)] == found[id(second)] == alone


def test_watching_hooks_see_every_step_and_every_end():
    seen = {"steps": 0, "tokens": 0, "done": []}

    class Hooks:
        def kvframe_on_step(self, step, requests, tokens, seconds, stats):
            assert step == seen["steps"] and stats.total("reserved") > 0
            seen["steps"] += 1
            seen["tokens"] += tokens

        def kvframe_on_finish(self, output):
            seen["done"].append((output.id, output.finish_reason))

    e = engine()
    e.telling.hooks = Hooks()
    e.generate([ask(tokens(10), id="a"), ask(tokens(200), id="long")])
    assert seen["done"] == [("long", "refused"), ("a", "length")]
    assert (seen["steps"], seen["tokens"]) == (e.summary()["steps"], e.summary()["computed_tokens"]) == (6, 15)
