"""A few long prompts and short answers."""

from __future__ import annotations

from kvframe.workloads.mixed import Mixed


class LongContext(Mixed):
    """Documents that are read and summed up: nearly all work is prefill, nearly all memory is context.

    Args: see Mixed.
    """

    def __init__(self, requests: int = 2, prompt=2048, output=32, seed: int = 0):
        super().__init__(requests, prompt, output, seed)
        self.what = f"{requests} long prompt(s) with short answers"
