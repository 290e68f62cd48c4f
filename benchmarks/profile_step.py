"""Where a decode step spends its time, by room: planning, attention, linear layers, the rest of the model, sampling."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.table import Table

from kvframe import Request, SamplingParams
from kvframe.hf.linear import ByRows
from kvframe.hf.replay.replayed import Replayed
from kvframe.kernels.cpu_chain import Chain

ATTENTION, LINEAR = "attention (store + attend)", "linear layers"
CHAINS = "chains (linear layers, norms, rotary, activations)"


@dataclass
class Profile:
    """Milliseconds per step of each room. `rest` is what the rooms do not explain."""

    steps: int = 0
    batch: int = 0
    rows: dict[str, float] = field(default_factory=dict)

    def table(self) -> Table:
        total = self.rows["step"]
        table = Table(title=f"profile of a decode step, batch {self.batch}, mean of {self.steps} steps")
        for column in ("room", "ms", "share"):
            table.add_column(column, justify="left" if column == "room" else "right")
        for name, ms in self.rows.items():
            table.add_row(name, f"{ms:.2f}", f"{100 * ms / total:.1f} %")
        return table


def room(function) -> str:
    """Where the time of a step of a replayed forward belongs."""
    return CHAINS if isinstance(function, Chain) else LINEAR if isinstance(function, ByRows) else "operations"


class Clocked:
    """Adds up the time inside wrapped functions."""

    def __init__(self):
        self.seconds = defaultdict(float)

    def wrap(self, name: str, function):
        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


@contextmanager
def _replaced(owner, attribute: str, value):
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, before)


def profile_decode(engine, jobs, steps: int = 20) -> Profile:
    """Runs the jobs' prompts, then times `steps` pure decode steps of the whole batch."""
    import kvframe.engine as loop

    longest = steps + 8
    for job in jobs:
        engine.add(Request(prompt_tokens=job.prompt, sampling=SamplingParams(max_new_tokens=longest, ignore_eos=True)))
    while any(s.n - s.computed > 1 for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    clock = Clocked()
    hooks = []
    replayed = engine.model._run if isinstance(engine.model._run, Replayed) else None
    if replayed is not None:
        before = replayed.run
        replayed.run = replayed.program.compiled(lambda function: clock.wrap(room(function), function))
    else:
        for part in engine.model.module.modules():
            if isinstance(part, torch.nn.Linear):
                hooks.append((part, part.forward))
                part.forward = clock.wrap(LINEAR, part.forward)
    batch = len(engine.scheduler.running)
    with (
        _replaced(engine.cache, "attend", clock.wrap(ATTENTION, engine.cache.attend)),
        _replaced(engine.cache, "plan", clock.wrap("planning", engine.cache.plan)),
        _replaced(engine.cache, "commit", clock.wrap("commit", engine.cache.commit)),
        _replaced(engine.cache, "stats", clock.wrap("meter", engine.cache.stats)),
        _replaced(engine.scheduler, "schedule", clock.wrap("scheduling", engine.scheduler.schedule)),
        _replaced(engine.model, "forward", clock.wrap("forward", engine.model.forward)),
        _replaced(loop, "sample", clock.wrap("sampling", loop.sample)),
    ):
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        total = time.perf_counter() - began
    if replayed is not None:
        replayed.run = before
    for part, forward in hooks:
        part.forward = forward
    for sequence in list(engine.scheduler.running):
        engine.abort(sequence.request_id)
    engine.step()
    ms = {name: 1e3 * seconds / steps for name, seconds in clock.seconds.items() if name != "operations"}
    inside = ms.pop("forward")
    known = sum(ms[name] for name in (ATTENTION, LINEAR, CHAINS) if name in ms)
    ms["other operations, Python" if replayed else "norms, rotary, activations, module calls"] = inside - known
    step = 1e3 * total / steps
    ms["engine loop (text, bookkeeping)"] = step - sum(ms.values())
    return Profile(steps, batch, {"step": step, **dict(sorted(ms.items(), key=lambda row: -row[1]))})
