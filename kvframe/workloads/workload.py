"""What a workload is, how it is played, and how large it is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvframe.errors import ConfigError
from kvframe.outputs import RequestOutput
from kvframe.text import TextCodec
from kvframe.types import Request, SamplingParams

Rounds = Generator[list[Request], list[RequestOutput], None]


@dataclass(frozen=True)
class Facts:
    """What a workload may know of the model: vocab_size, and how texts become token ids."""

    vocab_size: int
    text: TextCodec

    @classmethod
    def of(cls, model: Any) -> Facts:
        return cls(model.vocab_size, TextCodec(model.tokenizer, vocab_size=model.vocab_size))


class Workload(ABC):
    """A seeded description of requests. Each candidate of a comparison plays it anew, with an empty cache.

    Attributes:
        what: one sentence for tables and reports.
    """

    what = ""

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def rounds(self, facts: Facts) -> Rounds:
        """Yields the requests of a round and receives their outputs, until there is no other round.

        Every request has `prompt_tokens`, an id of its own, greedy sampling and a fixed number of output tokens (see
        `ask`). The same facts and outputs give the same requests. The outputs come in the order of the requests; one
        that was not run has none.
        """


def ask(id: str, tokens: Any, new: int) -> Request:
    """A request for `new` greedy tokens, whatever they are, after these token ids."""
    sampling = SamplingParams(max_new_tokens=int(new), ignore_eos=True)
    return Request(prompt_tokens=np.asarray(tokens, dtype=np.int32), id=id, sampling=sampling)


def play(workload: Workload, facts: Facts, answer: Callable[[list[Request]], Sequence[RequestOutput]]) -> list[Any]:
    """Plays all rounds: `answer(requests)` runs a round. Answers all outputs, in order."""
    rounds, outputs, answered = workload.rounds(facts), [], None
    try:
        while True:
            answered = list(answer(rounds.send(answered)))
            outputs += answered
    except StopIteration:
        return outputs


@dataclass(frozen=True)
class Size:
    """How large a workload is, in rounds, requests and tokens.

    Attributes:
        longest: tokens of the longest request, prompt and output.
        digest: of all that is known before it runs; another one is another workload.
    """

    rounds: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    longest: int
    digest: str


def _check_ids(request: Request, facts: Facts) -> None:
    ids = np.asarray(request.prompt_tokens)
    outside = ids[(ids < 0) | (ids >= facts.vocab_size)]
    if len(outside):
        raise ConfigError(
            f"workload: request {request.id!r} has the token id {outside[0]}, which the model does not have",
            options=[f"0 to {facts.vocab_size - 1}"],
        )


def measure(workload: Workload, facts: Facts) -> Size:
    """Plays a workload with answers of the right length, without a model. ConfigError: it has no requests."""
    seen: list[Request] = []
    digest, rounds = hashlib.sha256(), 0

    def answer(requests: list[Request]) -> list[RequestOutput]:
        for request in requests:
            _check_ids(request, facts)
        nonlocal rounds
        rounds += 1
        seen.extend(requests)
        for request in requests:
            digest.update(np.asarray(request.prompt_tokens, dtype=np.int64).tobytes())
            digest.update(repr((request.sampling, request.salt, request.arrival)).encode())
        return [
            RequestOutput(r.id, prompt_tokens=list(r.prompt_tokens), output_tokens=[0] * r.sampling.max_new_tokens)
            for r in requests
        ]

    play(workload, facts, answer)
    if not seen:
        raise ConfigError(f"the workload {workload.name} has no requests")
    prompts, news = [len(r.prompt_tokens) for r in seen], [r.sampling.max_new_tokens for r in seen]
    longest = max(p + n for p, n in zip(prompts, news))
    return Size(rounds, len(seen), sum(prompts), sum(news), longest, digest.hexdigest()[:16])
