"""mode=engine: the scheduler and the cache as the engine runs them, in simulated time.

Requests arrive at their time, wait, run side by side in chunks, hold what they use, write their output and are
preempted when there is no room. A step takes `step_s + token_s * computed tokens` simulated seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from omegaconf import DictConfig

from kvframe.errors import ConfigError
from kvframe.interfaces import CacheContext, KVCache
from kvframe.policies import make_policy
from kvframe.scheduler import Scheduler
from kvframe.simulation.building import Peaks, build, layers, limits
from kvframe.simulation.trace import MOST, Trace, TraceRequest
from kvframe.types import Keep

KEEP = Keep()


class SimulatedSequence:
    """What scheduler and cache know of a request in the engine, without text. Attributes: see kvframe.sequence.

    Its tokens exist from the first look at them to its end: hash id i is `i * tokens_per_id, i * tokens_per_id + 1,
    ...`; outputs are negative, and nobody else has them.
    """

    __slots__ = ("id", "request", "n", "prompt_len", "limit", "computed", "preemptions", "arrival")
    __slots__ += ("first_token_at", "cached", "_buffer", "_tokens_per_id", "_first_output")
    salt, keep = "", KEEP

    def __init__(self, number: int, request: TraceRequest, limit: int, tokens_per_id: int, first_output: int):
        self.id, self.request, self.limit, self.arrival = str(number), request, limit, request.arrival
        self.n = self.prompt_len = request.input_length
        self.computed = self.cached = self.preemptions = 0
        self.first_token_at: float | None = None
        self._buffer: np.ndarray | None = None
        self._tokens_per_id, self._first_output = tokens_per_id, first_output

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]: input, and output so far (a view)."""
        if self._buffer is None:
            size = self._tokens_per_id
            inputs = (self.request.ids[:, None] * np.int32(size) + np.arange(size, dtype=np.int32)).ravel()
            outputs = np.arange(self.limit - self.prompt_len, dtype=np.int32) - np.int32(self._first_output)
            self._buffer = np.concatenate([inputs[: self.prompt_len], outputs])
        return self._buffer[: self.n]

    @property
    def outputs(self) -> int:
        return self.n - self.prompt_len

    def forget(self) -> None:
        """It is done."""
        self._buffer = None


def cache_for(cfg: DictConfig, trace: Trace, capacity: int | None, windows: list[int | None]) -> KVCache:
    """The configured cache; `capacity` None: more blocks than the trace can fill."""
    engine = limits(cfg, trace)
    context = CacheContext(
        layers(windows),
        max_len=engine["max_len"],
        max_requests=engine["max_requests"],
        max_step_tokens=engine["max_step_tokens"],
    )
    if capacity is not None:
        return build(cfg, context, capacity)
    size = build(cfg, context, 1).stats().groups[0].block_size
    outputs = sum(max(request.output_length, 1) for request in trace.requests)
    shares = engine["max_requests"] * -(-engine["max_len"] // size)  # what runs may hold as copies of its own
    blocks = -(-(trace.prefixes * trace.tokens_per_id + outputs) // size) + 2 * len(trace.requests) + shares
    return build(cfg, context, blocks, every_group=True)


class Simulation:
    """One run of a trace through an empty cache.

    Args:
        step_s, token_s: seconds of a step, and of each token that is computed in it.
    """

    def __init__(self, cfg: DictConfig, trace: Trace, cache: KVCache, step_s: float, token_s: float):
        self.trace, self.cache, self.step_s, self.token_s = trace, cache, step_s, token_s
        self.engine = limits(cfg, trace)
        limits_ = (self.engine[name] for name in ("max_requests", "max_step_tokens", "prefill_chunk"))
        self.scheduler = Scheduler(cache, *limits_, policy=make_policy(self.engine["policy"]))
        self.block_size = cache.stats().groups[0].block_size
        self.peaks = Peaks(cache)
        self.time = 0.0
        self.steps = self.computed = self.outputs = 0
        self.hit_tokens = self.hit_blocks = self.refused = self.cut = 0
        self.ttft: list[float] = []
        cache.now = lambda: self.time
        if trace.distinct * trace.tokens_per_id > MOST or trace.output_tokens + len(trace.requests) > MOST:
            raise ConfigError(
                f"the trace has more than {MOST} different tokens, which int32 cannot tell apart",
                fix="requests=N, the first N requests only",
            )

    def run(self, advance: Callable[[int], None]) -> dict:
        """Runs until every request is done. `advance(n)` is told of every n that are."""
        coming, scheduler, idle = deque(self._sequences()), self.scheduler, 0
        while coming or scheduler.waiting or scheduler.running:
            while coming and coming[0].arrival <= self.time:
                scheduler.add(coming.popleft())
            batch = scheduler.schedule(self.time)
            done = len(scheduler.stuck)
            self.refused += done
            scheduler.stuck.clear()
            if batch:
                done += self._step(batch)
            elif coming and not scheduler.running and not scheduler.waiting:
                self.time = max(self.time, coming[0].arrival)
            idle = 0 if batch or done or not scheduler.waiting else idle + 1
            assert idle < 100, "requests wait and nothing is scheduled"
            if done:
                advance(done)
        advance(self._refused_at_once)
        return self._row()

    def _sequences(self) -> list[SimulatedSequence]:
        """The requests that can run, as the engine would take them: longest lengths are cut, long inputs refused."""
        longest = min(self.engine["max_len"], self.cache.capacity() + 1)
        sequences, written = [], 1
        for number, request in enumerate(self.trace.requests):
            wanted = request.input_length + max(request.output_length, 1)  # computing an input gives one token
            if request.input_length + 1 > longest:
                continue
            limit = min(wanted, longest)
            self.cut += limit < wanted
            written += limit - request.input_length
            sequences.append(SimulatedSequence(number, request, limit, self.trace.tokens_per_id, written))
        self._refused_at_once = len(self.trace.requests) - len(sequences)
        self.refused += self._refused_at_once
        return sequences

    def _step(self, batch: list[tuple[SimulatedSequence, int]]) -> int:
        """What the engine does around a forward. Answers the number of requests that are done."""
        cache, computed, finished = self.cache, 0, 0
        self.peaks.look()
        self._run_copies(batch)
        for sequence, n in batch:
            cache.commit(sequence, n)
            sequence.computed += n
            computed += n
        self.steps += 1
        self.computed += computed
        self.time += self.step_s + self.token_s * computed
        for sequence, _ in batch:
            if sequence.computed == sequence.n:
                sequence.n += 1
                self.outputs += 1
                if sequence.first_token_at is None:
                    sequence.first_token_at = self.time
                if sequence.n >= sequence.limit:
                    self._finish(sequence)
                    finished += 1
        return finished

    def _run_copies(self, batch: list[tuple[SimulatedSequence, int]]) -> None:
        """What a plan does with the copies that wait for it; addresses are of no use here."""
        copies = getattr(self.cache, "copies", None)
        if copies is not None:
            copies.take()
        else:
            self.cache.plan(batch)

    def _finish(self, sequence: SimulatedSequence) -> None:
        self.scheduler.finish(sequence)
        self.hit_tokens += sequence.cached
        self.hit_blocks += sequence.cached // self.block_size
        self.ttft.append(sequence.first_token_at - sequence.arrival)
        sequence.forget()

    def _row(self) -> dict:
        self.cache.check()
        stats = self.cache.stats()
        assert stats.total("reserved") == 0, "blocks are held after the last request"
        blocks = sum(-(-request.input_length // self.block_size) for request in self.trace.requests)
        p50, p99 = np.percentile(self.ttft, [50, 99]).tolist() if self.ttft else (None, None)
        return {
            "block_size": self.block_size,
            "hit_rate_blocks": self.hit_blocks / blocks,
            "hit_rate_tokens": self.hit_tokens / self.trace.input_tokens,
            "hit_blocks": self.hit_blocks,
            "input_blocks": blocks,
            "hit_tokens": self.hit_tokens,
            "evictions": stats.evictions,
            **self.peaks.row(stats),
            "preemptions": self.scheduler.preemptions,
            "refused": self.refused,
            "cut": self.cut,
            "output_tokens": self.outputs,
            "computed_tokens": self.computed,
            "steps": self.steps,
            "simulated_s": self.time,
            "ttft_s_p50": p50,
            "ttft_s_p99": p99,
        }
