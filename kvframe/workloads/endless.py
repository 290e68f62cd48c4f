"""Texts that outgrow an attention window."""

from __future__ import annotations

from kvframe.workloads.mixed import Mixed


class Endless(Mixed):
    """A stream that goes on: a prompt that nearly fills a window of 1,024 tokens, and an output far beyond it. A cache
    with a window of that size (or a smaller one) stops growing, the others do not.

    Args: see Mixed.
    """

    def __init__(self, requests: int = 2, prompt=960, output=256, seed: int = 0):
        super().__init__(requests, prompt, output, seed)
        least, most = self.prompt[0] + self.output[0], self.prompt[1] + self.output[1]
        longest = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        self.what = f"{requests} text(s) that grow to {longest} tokens, beyond an attention window"
