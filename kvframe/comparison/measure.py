"""One run of one candidate: it plays the workload with an empty cache, and its figures are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvframe.engine import Engine
from kvframe.evaluation.runs import token_bytes
from kvframe.memprofile import by_dtype
from kvframe.outputs import RequestOutput
from kvframe.types import Request
from kvframe.workloads.workload import Facts, Workload, play

Advance = Callable[[int], None]

# of an engine's summary; the others are its own business
KEPT = (
    "output_tokens_per_s", "seconds", "ttft_s_p50", "ttft_s_p99", "itl_s_p50", "itl_s_p99",
    "kv_bytes_peak", "kv_bytes_reserved", "kv_bytes_used", "kv_bytes_tail", "kv_bytes_pool", "bytes_per_token",
    "utilization", "prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens",
    "steps", "requests", "refused", "preemptions", "evictions", "copies",
)  # fmt: skip


@dataclass
class Run:
    """figures: see kvframe.comparison. outputs: of all rounds, in order."""

    figures: dict[str, Any]
    outputs: list[RequestOutput]

    @property
    def tokens_hash(self) -> str:
        """The same tokens have the same one."""
        return _hash([output.output_tokens for output in self.outputs])

    def kept(self) -> list[dict[str, Any]]:
        """The outputs as they are written."""
        return [
            {"id": output.id, "prompt": _hash([output.prompt_tokens]), "tokens": output.output_tokens}
            for output in self.outputs
        ]


def run(contender: Any, model: Any, workload: Workload, facts: Facts, advance: Advance) -> Run:
    """Plays the workload once.

    Args:
        contender: see kvframe.comparison.candidates. advance: told of every n output tokens.
    """
    with contender.open(model, advance) as player:
        outputs = play(workload, facts, player.answer)
        found = player.figures()
    figures = {key: found.get(key) for key in KEPT}
    cached, prompts, used = figures["cached_tokens"], figures["prompt_tokens"], figures["utilization"]
    used = used if figures["kv_bytes_peak"] else None  # there is nothing to waste
    figures |= {"utilization": used, "waste": None if used is None else 1 - used}
    figures |= {"hit_rate": cached / prompts if prompts and cached is not None else None}
    return Run({**figures, "weights_bytes": model.weight_bytes}, outputs)


class EnginePlayer:
    """Plays rounds of requests through an engine. Its meter runs from the first round to the last."""

    def __init__(self, engine: Engine, advance: Advance):
        self.engine, self.advance = engine, advance
        engine.cache.start_run()
        engine.clock.start()
        engine.meter.start()

    def answer(self, requests: Sequence[Request]) -> list[RequestOutput]:
        engine, outputs = self.engine, {}
        now = engine.clock.now()
        order = [engine.add(replace(request, arrival=request.arrival + now)) for request in requests]
        while engine.has_work:
            events = engine.step()
            outputs |= {event.id: event.output for event in events if event.output is not None}
            self.advance(sum(event.token is not None for event in events))
        return [outputs[id] for id in order]

    def figures(self) -> dict[str, Any]:
        cache, summary = self.engine.cache, self.engine.summary()
        allocated = sum(by_dtype(cache.tensors()).values()) or summary["kv_bytes_pool"]  # a cache may show no tensors
        return {**summary, "bytes_per_token": token_bytes(cache), "kv_bytes_pool": allocated}


def _hash(rows: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray([len(row), *row], dtype=np.int64).tobytes())
    return digest.hexdigest()[:12]
