"""Decode steps that were planned while the step before them ran: nobody can tell, whatever happens between steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_graphs import again

from kvframe import graphs as graphing
from kvframe.config import build_engine, compose
from kvframe.errors import KVFrameError
from kvframe.hf import random_model
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
    if ahead:
        engine.look_ahead()
    return engine


def request(length, new=6, id=None, **sampling):
    prompt = [3 + (7 * i) % 50 for i in range(length)]
    return Request(prompt_tokens=prompt, sampling=SamplingParams(max_new_tokens=new, **sampling), id=id)


def outputs(engine, requests) -> list:
    found = []
    for events in engine.steps(requests):
        engine.cache.check()
        found += [event.output for event in events if event.output is not None]
    key = lambda output: (output.id, output.sample)
    return [(o.id, o.sample, o.output_tokens, o.finish_reason, o.logprobs) for o in sorted(found, key=key)]


@pytest.mark.parametrize("cache", CACHES)
def test_outputs_are_the_same(model, cache):
    requests = [
        request(n, 5 + n % 4, f"r{n}", ignore_eos=True, seed=n, temperature=n % 3, n=1 + n % 2) for n in (1, 17, 9, 5)
    ]
    requests.append(request(12, 8, "stops", stop_token_ids=tuple(range(0, 256, 3)), logprobs=1))
    engine = engine_of(model, cache)
    assert outputs(engine, requests) == outputs(engine_of(model, cache, ahead=False), requests)
    assert engine.ahead.used > 3
    assert cache == "small" or engine.ahead.wasted, "somebody ended before its limit"


def test_an_end_by_length_is_foreseen(model):
    engine = engine_of(model, "paged")
    engine.generate([request(5, 4, ignore_eos=True), request(6, 8, ignore_eos=True)])
    assert engine.ahead.wasted == 0 and engine.ahead.used == 7  # all but the prompts' step
    assert engine.cache.stats().total("reserved") == 0


@pytest.mark.parametrize("change", ["branch", "rollback", "abort", "invalidate", "add"])
def test_what_was_foreseen_is_thrown_away_when_requests_change(model, change):
    found = []
    for ahead in (True, False):
        engine, events = engine_of(model, "radix", ahead), []
        for id in "ab":
            engine.add(request(6 + (id == "b"), 12, id, ignore_eos=True))
        for _ in range(4):
            events += engine.step()
        if ahead:
            assert engine.ahead._next is not None
        match change:
            case "branch":
                engine.branch("a", [9, 8, 7], SamplingParams(max_new_tokens=5, ignore_eos=True), "c")
            case "rollback":
                engine.rollback("a", 2)
            case "abort":
                engine.abort("a")
            case "invalidate":
                engine.invalidate()
            case "add":
                engine.add(request(3, 5, "c", ignore_eos=True))
        used = engine.ahead.used if ahead else 0
        events += engine.step()
        assert not ahead or engine.ahead.used == used
        while engine.has_work:
            events += engine.step()
            engine.cache.check()
        found.append({e.output.id: e.output.output_tokens for e in events if e.output is not None})
    assert found[0] == found[1]


def test_a_branch_that_has_to_wait_still_changes_whom_it_branches_from(model):
    """The step has no tokens left for it, so the batch is the one that was foreseen; but their block is shared now."""
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


def test_a_graph_takes_the_plan_before_its_tokens(model, monkeypatch):
    """And reads no tensor of a plan."""
    monkeypatch.setattr(graphing, "TIMES", 1)
    requests = [request(n, 8, f"r{n}", ignore_eos=True) for n in (4, 9, 6)]
    want = outputs(engine_of(model, "paged", ahead=False), requests)
    engine = engine_of(model, "paged", ahead=False)
    engine.graphs = model.graphs(engine.cache, 64, capture=again)
    engine.look_ahead()
    read, there = [], LatePlan._there.func
    monkeypatch.setattr(LatePlan, "_there", property(lambda plan: read.append(plan.max_query) or there(plan)))
    monkeypatch.setattr(engine.cache.storage, "to_device", lambda plan: LatePlan(plan, torch.device("cpu")))
    put, filled = [], graphing.Static.put
    monkeypatch.setattr(graphing.Static, "put", lambda static, plan: put.append(plan) or filled(static, plan))
    assert outputs(engine, requests) == want
    assert set(read) == {read[0]} and read[0] > 1, "only the prompts' plan was read"
    assert len(put) < 2 * engine.ahead.used, "what was put ahead is not put again"


# -- whatever happens between steps --------------------------------------------------------------------------


class Twins(RuleBasedStateMachine):
    """Two engines that are told the same, one of which looks ahead."""

    def __init__(self):
        super().__init__()
        model = random_model("tiny", "float32")
        self.engines = [engine_of(model, self.cache, ahead) for ahead in (True, False)]
        self.events, self.count = [[], []], 0

    def both(self, act):
        answers = []
        for engine in self.engines:
            try:
                answers.append(act(engine))
            except KVFrameError as error:
                answers.append(type(error))
        assert answers[0] == answers[1]

    @rule(n=st.integers(1, 14), new=st.integers(1, 9), samples=st.integers(1, 3), eos=st.booleans())
    def add(self, n, new, samples, eos):
        self.count += 1
        stops = tuple(range(0, 256, 5)) if eos else ()
        made = request(n, new, f"r{self.count}", n=samples, seed=n, temperature=1.0, stop_token_ids=stops)
        self.both(lambda engine: engine.add(made))

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            for engine, events in zip(self.engines, self.events):
                events += [(e.id, e.sample, e.token, e.output and e.output.finish_reason) for e in engine.step()]

    @precondition(lambda self: self.count)
    @rule(data=st.data(), tokens=st.integers(0, 3))
    def rollback(self, data, tokens):
        id = f"r{data.draw(st.integers(1, self.count))}"
        self.both(lambda engine: engine.rollback(id, tokens) is None)  # how much is kept may differ

    @precondition(lambda self: self.count)
    @rule(data=st.data(), more=st.integers(1, 3))
    def branch(self, data, more):
        id, self.count = f"r{data.draw(st.integers(1, self.count))}", self.count + 1
        new = f"r{self.count}"
        self.both(lambda engine: engine.branch(id, [4] * more, SamplingParams(max_new_tokens=4, seed=1), new))

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data):
        id = f"r{data.draw(st.integers(1, self.count))}"
        self.both(lambda engine: engine.abort(id))

    @rule()
    def invalidate(self):
        self.both(lambda engine: engine.invalidate())

    @invariant()
    def sound(self):
        for engine in self.engines:
            engine.cache.check()
        assert sorted(map(str, self.events[0])) == sorted(map(str, self.events[1]))

    def teardown(self):
        for engine, events in zip(self.engines, self.events):
            while engine.has_work:
                events += [(e.id, e.sample, e.token, e.output and e.output.finish_reason) for e in engine.step()]
            assert engine.cache.stats().total("reserved") == 0
        assert sorted(map(str, self.events[0])) == sorted(map(str, self.events[1]))


SETTINGS = settings(
    max_examples=6, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
for name in ("paged", "radix", "int4"):
    machine = type(f"Twins_{name}", (Twins,), {"cache": name})
    globals()[f"Test_{name}"] = machine.TestCase
    machine.TestCase.settings = SETTINGS


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
