"""Where the memory of a candidate goes: one large step of the workload under watch, apart from the timed runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvframe.memprofile import activations, profile
from kvframe.types import Request
from kvframe.workloads.workload import Facts, Workload

DECODED = 2  # output tokens of each request: a prefill and a decode are seen
OF_A_RUN = ("kv_peak", "kv_pool")  # a row has them, of the whole workload


def memory(contender: Any, model: Any, workload: Workload, facts: Facts) -> dict[str, Any] | None:
    """What kvframe.memprofile says of a candidate. None for a baseline: its cache is not told from its activations."""
    if contender.baseline is not None:
        return None
    with contender.open(model, lambda n: None) as player:
        with activations(model) as seen:
            player.answer(_some(workload, facts, player.engine.scheduler.max_step_tokens))
        found = profile(player.engine, seen)
    return {key: value for key, value in found.items() if key not in OF_A_RUN}


def _some(workload: Workload, facts: Facts, tokens: int) -> list[Request]:
    """Requests of the first round, all there at once, until their prompts fill a step of so many tokens."""
    rounds = workload.rounds(facts)
    some = []
    for request in next(rounds):
        sampling = replace(request.sampling, max_new_tokens=min(DECODED, request.sampling.max_new_tokens))
        some.append(replace(request, arrival=0.0, sampling=sampling))
        tokens -= len(request.prompt_tokens)
        if tokens <= 0:
            break
    rounds.close()
    return some
