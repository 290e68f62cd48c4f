"""Decode steps that are started behind the one before them: nobody can tell, whatever happens between steps."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from test_graphs import again

from kvframe import graphs as graphing
from kvframe.config import build_engine, compose
from kvframe.errors import KVFrameError
from kvframe.flight import Flight
from kvframe.hf import random_model
from kvframe.inspection.recorder import Recorder
from kvframe.moving import LatePlan, Together, moved
from kvframe.types import Request, SamplingParams

OWN = ["model=random", "kernel=reference", "engine.clock=virtual", "engine.max_step_tokens=24", "engine.max_len=64"]
CACHES = {
    "contiguous": ["cache=contiguous", "cache.memory=4MiB"],
    "paged": ["cache=paged", "cache.memory=4MiB"],
    "radix": ["cache=radix", "cache.memory=4MiB", "cache.layout.block_size=4"],
    "window": ["cache=sliding_window", "cache.memory=4MiB", "cache.layout.block_size=4", "cache.retention.window=9"],
    "int4": ["cache=int4", "cache.memory=4MiB", "cache.codec.group=8"],
    "small": ["cache=paged", "cache.layout.block_size=4", "cache.num_blocks=14"],
}


@pytest.fixture(scope="module")
def model():
    return random_model("tiny", "float32")


def engine_of(model, cache, ahead=True, *more):
    engine = build_engine(compose([*OWN, *CACHES[cache], *more]), model)
    engine.ahead = ahead
    return engine


@pytest.fixture
def flights(monkeypatch):
    """What became of the steps that were started ahead: how many rows each had, and how many were kept."""
    seen, keep = [], Flight.keep

    def watch(flight, running):
        before = len(flight.batch)
        kept = keep(flight, running)
        seen.append((before, len(flight.batch)))
        return kept

    monkeypatch.setattr(Flight, "keep", watch)
    return seen


def request(length, new=6, id=None, **sampling):
    prompt = [3 + (7 * i) % 50 for i in range(length)]
    return Request(prompt_tokens=prompt, sampling=SamplingParams(max_new_tokens=new, **sampling), id=id)


def outputs(engine, requests) -> list:
    found = []
    for events in engine.steps(requests):
        engine.cache.check()
        found += [event.output for event in events if event.output is not None]
    key = lambda output: (output.id, output.sample)
    near = lambda found: found and [round(row["logprob"], 4) for row in found]  # whoever else is in the batch
    return [(o.id, o.sample, o.output_tokens, o.finish_reason, near(o.logprobs)) for o in sorted(found, key=key)]


@pytest.mark.parametrize("cache", CACHES)
def test_outputs_are_the_same(model, flights, cache):
    requests = [
        request(n, 5 + n % 4, f"r{n}", ignore_eos=True, seed=n, temperature=n % 3, **{"n": 1 + n % 2})
        for n in (1, 17, 9, 5)
    ]
    requests.append(request(12, 8, "stops", stop_token_ids=tuple(range(0, 256, 3)), logprobs=1))
    requests.append(request(7, 8, "penal", ignore_eos=True, repetition_penalty=1.5))
    assert outputs(engine_of(model, cache), requests) == outputs(engine_of(model, cache, ahead=False), requests)
    assert len(flights) > 3 and all(kept <= rows for rows, kept in flights)
    assert any(kept < rows for rows, kept in flights), "somebody ended before its limit"


def test_an_end_by_length_is_foreseen(model, flights):
    engine = engine_of(model, "paged")
    engine.generate([request(5, 4, ignore_eos=True), request(6, 8, ignore_eos=True)])
    assert flights == [(2, 2)] * 3 + [(1, 1)] * 4  # all steps but that of the prompts
    assert engine.cache.stats().total("reserved") == 0


@pytest.mark.parametrize("change", ["branch", "rollback", "abort", "abort all", "invalidate", "add"])
def test_requests_may_change_while_a_step_runs(model, flights, change):
    found = []
    for ahead in (True, False):
        engine, events = engine_of(model, "radix", ahead), []
        for id in "ab":
            engine.add(request(6 + (id == "b"), 12, id, ignore_eos=True))
        for _ in range(4):
            events += engine.step()
        assert (engine._flight is not None) == ahead
        match change:
            case "branch":
                engine.branch("a", [9, 8, 7], SamplingParams(max_new_tokens=5, ignore_eos=True), "c")
            case "rollback":
                engine.rollback("a", 2)
            case "abort":
                engine.abort("a")
            case "abort all":
                engine.abort("a")
                engine.abort("b")
                engine.add(request(9, 5, "c", ignore_eos=True))
            case "invalidate":
                engine.invalidate()
            case "add":
                engine.add(request(3, 5, "c", ignore_eos=True))
        del flights[:]
        events += engine.step()
        engine.cache.check()
        if ahead:
            kept = {"branch": 2, "rollback": 1, "abort": 1, "invalidate": 0, "add": 2}
            assert flights == ([] if change == "abort all" else [(2, kept[change])])
        while engine.has_work:
            events += engine.step()
            engine.cache.check()
        found.append({e.output.id: e.output.output_tokens for e in events if e.output is not None})
    assert found[0] == found[1]


def test_a_branch_that_has_to_wait_still_changes_whom_it_branches_from(model):
    """The next step has no tokens left for it, and their block is shared while a step writes to it."""
    found = []
    for ahead in (True, False):
        engine, events = engine_of(model, "paged", ahead, "engine.max_step_tokens=2"), []
        for id in "ab":
            engine.add(request(2, 12, id, ignore_eos=True))
        for _ in range(5):
            events += engine.step()
        engine.branch("a", [9, 8, 7], SamplingParams(max_new_tokens=5, ignore_eos=True), "c")
        while engine.has_work:
            events += engine.step()
            engine.cache.check()
        found.append({e.output.id: e.output.output_tokens for e in events if e.output is not None})
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", ["radix", "window", "int4"])
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_branches_do_not_share_what_was_grown_ahead(model, cache, steps):
    """At a boundary of a block the parent holds one more than it has computed: that is its own."""
    engine, events = engine_of(model, cache), []
    engine.add(request(6, 14, "a", ignore_eos=True))
    for _ in range(steps):
        events += engine.step()
    sampling = SamplingParams(max_new_tokens=6, ignore_eos=True)
    more = [[9, 8, 7], [20, 30, 40], [5]]
    names = [engine.branch("a", tokens, sampling) for tokens in more]
    while engine.has_work:
        events += engine.step()
        engine.cache.check()
    done = {e.output.id: e.output for e in events if e.output is not None}
    for name in names:
        asked = Request(prompt_tokens=done[name].prompt_tokens, sampling=sampling)
        (alone,) = engine_of(model, cache, False).generate([asked])
        assert done[name].output_tokens == alone.output_tokens


def test_seconds_are_those_of_the_engine(model):
    """Not of who pauses between two steps, and not of a clock that was set back."""
    engine, now, seconds = engine_of(model, "paged"), [0.0], []
    forward, tell = model.forward, engine.telling.tell

    def slow(*args):
        now[0] += 1.0
        return forward(*args)

    engine.clock.now = lambda: now[0]
    engine.telling.tell = lambda hook, **facts: seconds.append(facts.get("seconds")) or tell(hook, **facts)
    model.forward = slow
    try:
        for _ in range(2):
            engine.add(request(4, 5, ignore_eos=True))
            while engine.has_work:
                engine.step()
                now[0] += 100.0
            now[0] = 0.0
    finally:
        del model.forward
    # the first step starts the second one too; the last one starts nobody
    assert [s for s in seconds if s is not None] == [2.0, 1.0, 1.0, 1.0, 0.0] * 2
    assert engine._flight is None


def test_a_recorder_sees_the_plan_of_each_step(model):
    engine = engine_of(model, "paged")
    recorder = Recorder(engine)
    engine.add(request(6, 4, ignore_eos=True))
    assert [recorder.step(engine.step())["tokens"] for _ in range(4)] == [6, 1, 1, 1]


def test_who_waits_is_asked(model, flights):
    """Who can be admitted is, at the next step; for whom there is no room does not stop the others."""
    engine = engine_of(model, "small", True)  # 56 slots
    engine.add(request(20, 30, "a", ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add(request(5, 3, "b", ignore_eos=True))
    engine.step()
    assert len(engine.scheduler.running) == 1 and engine._flight is None
    engine.step()
    assert len(engine.scheduler.running) == 2
    while len(engine.scheduler.running) > 1:
        engine.step()
    engine.add(request(40, 2, "c", ignore_eos=True))
    del flights[:]
    for _ in range(10):
        engine.step()
    assert [s.name for s in engine.scheduler.waiting] == ["c"] and len(flights) >= 8
    engine.abort("a")
    engine.step()
    assert [s.name for s in engine.scheduler.running] == ["c"]


def test_bad_logits_end_whom_they_belong_to(model, monkeypatch):
    """The step behind them was started with their tokens, which there are not."""
    forward, calls = model.forward, []

    def spoiled(tokens, plan, logits_at):
        logits = forward(tokens, plan, logits_at)
        calls.append(logits)
        return logits if len(calls) != 4 else torch.cat([logits[:1] * torch.nan, logits[1:]])

    found = []
    for ahead in (True, False):
        engine = engine_of(model, "paged", ahead)
        del calls[:]
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", spoiled)
            found.append(outputs(engine, [request(4, 9, "a", ignore_eos=True), request(5, 9, "b", ignore_eos=True)]))
    assert found[0] == found[1] and [row[3] for row in found[0]] == ["error", "length"]


def test_a_step_that_fails_leaves_nothing_behind(model, monkeypatch):
    forward, calls = model.forward, []

    def fails(*args):
        calls.append(args)
        if len(calls) == 5:
            raise RuntimeError("out of order")
        return forward(*args)

    want = outputs(engine_of(model, "radix", False), [request(4, 9, "a", ignore_eos=True)])
    engine, events = engine_of(model, "radix"), []
    monkeypatch.setattr(model, "forward", fails)
    engine.add(request(4, 9, "a", ignore_eos=True))
    while engine.has_work:
        try:
            events += engine.step()
        except RuntimeError:
            assert engine._flight is None
        engine.cache.check()
    assert [e.token for e in events] == want[0][2] and len(calls) > 9


def test_a_graph_takes_ids_that_only_the_device_knows(model, monkeypatch):
    """And nobody reads the tensors of its plan."""
    monkeypatch.setattr(graphing, "TIMES", 1)
    requests = [request(length, 8, f"r{length}", ignore_eos=True) for length in (4, 9, 6)]
    want = outputs(engine_of(model, "paged", ahead=False), requests)
    engine = engine_of(model, "paged")
    engine.graphs = model.graphs(engine.cache, 64, capture=again)
    read, there = [], LatePlan._there.func
    monkeypatch.setattr(LatePlan, "_there", property(lambda plan: read.append(plan.max_query) or there(plan)))
    monkeypatch.setattr(engine.cache.storage, "to_device", lambda plan: LatePlan(plan, torch.device("cpu")))
    filled, fill = [], graphing.Static.fill
    monkeypatch.setattr(
        graphing.Static, "fill", lambda static, *args: filled.append(type(args[0])) or fill(static, *args)
    )
    assert outputs(engine, requests) == want
    assert read and all(longest > 1 for longest in read), "only plans of prompts were read"
    assert filled.count(torch.Tensor) >= 6


# -- whatever happens between steps --------------------------------------------------------------------------


BRANCH = SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)


@functools.cache
def expected(cache, length, new, samples, eos) -> dict[int, list[int]]:
    """sample -> tokens, without anything that disturbs."""
    found = engine_of(random_model("tiny", "float32"), cache, False).generate([asked(length, new, samples, eos, "r")])
    return {output.sample: output.output_tokens for output in found}


@functools.cache
def alone(cache, prompt) -> list[int]:
    asked = Request(prompt_tokens=list(prompt), sampling=BRANCH)
    return engine_of(random_model("tiny", "float32"), cache, False).generate([asked])[0].output_tokens


def asked(length, new, samples, eos, id):
    stops = tuple(range(0, 256, 5)) if eos else ()
    return request(length, new, id, n=samples, seed=length, temperature=1.0, stop_token_ids=stops)


class Disturbed(RuleBasedStateMachine):
    """An engine that starts steps ahead; every request ends with the tokens that it has alone."""

    def __init__(self):
        super().__init__()
        self.engine = engine_of(random_model("tiny", "float32"), self.cache)
        self.want, self.done, self.branches = {}, {}, set()

    def take(self, events):
        for event in events:
            if event.output is not None:
                self.done[event.id, event.sample] = event.output
        self.engine.cache.check()

    @rule(length=st.integers(1, 14), new=st.integers(1, 9), samples=st.integers(1, 3), eos=st.booleans())
    def add(self, length, new, samples, eos):
        id = f"q{len(self.want)}"
        self.want[id] = expected(self.cache, length, new, samples, eos)
        self.engine.add(asked(length, new, samples, eos, id))

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.want)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def rollback(self, data, tokens):
        with contextlib.suppress(KVFrameError):
            self.engine.rollback(data.draw(st.sampled_from(sorted(self.want))), tokens)

    @precondition(lambda self: self.want)
    @rule(data=st.data())
    def abort(self, data):
        self.engine.abort(data.draw(st.sampled_from(sorted(self.want))))

    @precondition(lambda self: self.want)
    @rule(data=st.data(), more=st.integers(1, 3))
    def branch(self, data, more):
        """It ends with the tokens that its prompt has alone, and whom it branches from does not notice."""
        id, ids = data.draw(st.sampled_from(sorted(self.want))), data.draw(st.integers(1, 200))
        with contextlib.suppress(KVFrameError):
            self.branches.add(self.engine.branch(id, [ids] * more, BRANCH))

    @rule()
    def invalidate(self):
        self.engine.invalidate()

    def teardown(self):
        while self.engine.has_work:
            self.take(self.engine.step())
        assert self.engine.cache.stats().total("reserved") == 0
        for id, samples in self.want.items():
            for sample, tokens in samples.items():
                output = self.done[id, sample]
                aborted = output.finish_reason == "abort"
                assert output.output_tokens == (tokens[: len(output.output_tokens)] if aborted else tokens), (
                    id,
                    sample,
                )
        for output in (self.done[name, 0] for name in self.branches):
            tokens = alone(self.cache, tuple(output.prompt_tokens))
            assert output.output_tokens == tokens, output.prompt_tokens


SETTINGS = settings(
    max_examples=4, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip
for name in ("paged", "radix", "window", "int4"):
    machine = type(f"Disturbed_{name}", (Disturbed,), {"cache": name})
    case = machine.TestCase
    case.settings = SETTINGS
    globals()[f"Test_{name}"] = case if name in ("radix", "int4") else pytest.mark.nightly(case)
del case  # pytest would run it once more


# -- moving --------------------------------------------------------------------------------------------------


def test_arrays_lie_together_at_aligned_places(model):
    engine = engine_of(model, "paged", ahead=False)
    engine.add(request(9))
    (sequence, n) = engine.scheduler.schedule(0.0)[0]
    plan = engine.cache.plan([(sequence, n)]).host
    late = LatePlan(plan, torch.device("cpu"))
    assert late.max_query == n and "_there" not in vars(late)
    assert late.positions.tolist() == list(range(9)) and late.groups[0].context_lens.tolist() == [9]
    assert moved(plan, torch.device("meta")).groups[0].tables.shape == plan.groups[0].tables.shape
    together = Together({"a": ((3,), "int32"), "b": ((2, 2), "int64")})
    flat = torch.zeros(together.nbytes, dtype=torch.uint8)
    here, there = together.arrays(flat.numpy()), together.tensors(flat)
    here["a"][:], here["b"][1, 0] = (1, 2, 3), -5
    assert there["a"].tolist() == [1, 2, 3] and there["b"].tolist() == [[0, 0], [-5, 0]]
    assert (there["b"].data_ptr() - flat.data_ptr()) % 16 == 0
