"""Prompts that begin alike: a system prompt, a few examples, a document that many ask about."""

from __future__ import annotations

import numpy as np

from kvframe.workloads.drawing import Draws, bounds, count
from kvframe.workloads.workload import Facts, Rounds, Workload, ask


class SharedPrefix(Workload):
    """Each prompt is one of a few prefixes and a piece of its own:

        prefixes=2      AAAAAAAA a    BBBBBBBB b    AAAAAAAA c    BBBBBBBB d

    A cache that finds prefixes computes each of them once: `(requests - prefixes) * prefix` tokens are found.

    Args:
        requests: how many, at once. prefixes: how many different prefixes; prefix: tokens of each.
        prompt, output: own tokens of each prompt, and tokens of its output, a number or [least, most].
        seed: of sizes and tokens.
    """

    def __init__(
        self, requests: int = 8, prefixes: int = 2, prefix: int = 192, prompt=(16, 48), output=(16, 48), seed: int = 0
    ):
        self.requests, self.prefixes = count("requests", requests), count("prefixes", prefixes)
        self.prefix, self.seed = count("prefix", prefix), count("seed", seed, 0)
        self.prompt, self.output = bounds("prompt", prompt), bounds("output", output)
        self.what = f"{requests} requests at once that begin with one of {prefixes} prefixes of {prefix} tokens"

    def rounds(self, facts: Facts) -> Rounds:
        draws, requests = Draws(self.seed, facts), []
        prefixes = [draws.tokens(self.prefix) for _ in range(self.prefixes)]
        for i in range(self.requests):
            own = draws.tokens(draws.size(self.prompt))
            tokens = np.concatenate([prefixes[i % self.prefixes], own])
            requests.append(ask(f"p{i % self.prefixes}.{i}", tokens, draws.size(self.output)))
        yield requests
