"""Ragged prompts and outputs that have nothing in common."""

from __future__ import annotations

from kvframe.workloads.drawing import Draws, bounds, count
from kvframe.workloads.workload import Facts, Rounds, Workload, ask


class Mixed(Workload):
    """Prompts and outputs of many lengths, uniform between bounds, all at once.

    Args:
        requests: how many. prompt, output: tokens of each, a number or [least, most]. seed: of sizes and tokens.
    """

    def __init__(self, requests: int = 8, prompt=(16, 256), output=(16, 96), seed: int = 0):
        self.requests, self.seed = count("requests", requests), count("seed", seed, 0)
        self.prompt, self.output = bounds("prompt", prompt), bounds("output", output)
        self.what = f"{requests} requests of many lengths at once, nothing in common"

    def rounds(self, facts: Facts) -> Rounds:
        draws = Draws(self.seed, facts)
        sizes = [(draws.size(self.prompt), draws.size(self.output)) for _ in range(self.requests)]
        yield [ask(f"m{i}", draws.tokens(prompt), new) for i, (prompt, new) in enumerate(sizes)]
