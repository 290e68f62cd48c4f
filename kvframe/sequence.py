"""Sequence: one sample of a request while it lives in the engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kvframe.outputs import RequestOutput
from kvframe.types import Request

SERIAL = itertools.count()


class Sequence:
    """Token ids so far and how many of them the cache holds.

    Attributes:
        id: key of the sample in the cache; no two sequences of a process ever share one.
        request_id, sample: what the user calls it; `name` is both in one word.
        prompt_len: tokens of the prompt; n: tokens that exist (prompt and output).
        computed: leading tokens whose keys and values are in the cache.
        limit: the most tokens that may exist (max_new_tokens, the engine's and the cache's limit).
        seed: of this sample's draws.
        text: its Detokenizer.
        times: of the output tokens, in seconds of the engine's clock.
        siblings: samples that wait to be forked from this one at its first token.
    """

    def __init__(self, request: Request, id: str, sample: int, prompt: np.ndarray, limit: int, seed: int, text: Any):
        self.request, self.request_id, self.sample, self.seed, self.text = request, id, sample, seed, text
        self.id = f"{next(SERIAL)}/{id}#{sample}"
        self.params, self.salt, self.keep, self.arrival = request.sampling, request.salt, request.keep, request.arrival
        self._buffer = np.empty(max(limit, len(prompt)) + 1, dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self.prompt_len = self.n = len(prompt)
        self.limit = limit
        self.computed = self.cached = self.preemptions = 0
        self.logprobs: list[dict] | None = None if request.sampling.logprobs is None else []
        self.times: list[float] = []
        self.siblings: list[Sequence] = []

    @property
    def tokens(self) -> np.ndarray:
        """int32 [n]: prompt and output so far (a view)."""
        return self._buffer[: self.n]

    @property
    def name(self) -> str:
        return self.request_id if self.sample == 0 else f"{self.request_id}, sample {self.sample}"

    @property
    def outputs(self) -> int:
        return self.n - self.prompt_len

    def append(self, token: int, now: float, logprob: dict | None = None) -> None:
        self._buffer[self.n] = token
        self.n += 1
        self.times.append(now)
        if self.logprobs is not None:
            self.logprobs.append(logprob)

    def truncate(self, length: int) -> None:
        """The output tokens from `length` (>= prompt_len) on were never there: token ids, times, log-probabilities and
        text. What the cache holds is the scheduler's business."""
        self.n = length
        del self.times[self.outputs :]
        if self.logprobs is not None:
            del self.logprobs[self.outputs :]
        self.text = self.text.again(self.tokens[self.prompt_len :].tolist())

    def output(self, finish_reason: str, error: str | None = None) -> RequestOutput:
        """What the user gets. Times are seconds of the engine's clock, from arrival."""
        ttft = itl = None
        if self.times:
            ttft = self.times[0] - self.arrival
            if self.outputs > 1:
                itl = (self.times[-1] - self.times[0]) / (self.outputs - 1)
        return RequestOutput(
            id=self.request_id,
            sample=self.sample,
            prompt=self.request.prompt,
            prompt_tokens=self.tokens[: self.prompt_len].tolist(),
            output_tokens=self.tokens[self.prompt_len :].tolist(),
            text=self.text.text,
            finish_reason=finish_reason,
            ttft_s=ttft,
            itl_s=itl,
            cached_tokens=self.cached,
            preemptions=self.preemptions,
            logprobs=self.logprobs,
            error=error,
        )
