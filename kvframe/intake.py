"""Intake: requests become sequences. Names, token ids, limits and seeds, and the errors of all that cannot run."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvframe.errors import ConfigError, PromptTooLongError, RequestError
from kvframe.interfaces import KVCache
from kvframe.sampling import resolve_seed
from kvframe.sequence import Sequence
from kvframe.text import TextCodec
from kvframe.types import Request, SamplingParams

log = logging.getLogger(__name__)


def check_settings(model: Any, cache: KVCache, seed: Any, sizes: Mapping[str, Any]) -> None:
    """ConfigError for a seed, or for limits (`max_len` and others), that an engine cannot work with."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"engine.seed={seed!r} cannot be used", options=["an integer"])
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"engine.{name}={value!r} cannot be used", options=["an integer >= 1"])
    if model.max_len is not None and sizes["max_len"] > model.max_len and not cache.unbounded:
        longer = f"; for longer requests {cache.unbounded_fix}" if cache.unbounded_fix else ""
        too_long = f"engine.max_len={sizes['max_len']} is more than the {model.max_len} tokens this model takes."
        raise ConfigError(
            " ".join([too_long, *model.notes]),
            options=[f"1 .. {model.max_len}"],
            fix=f"engine.max_len={model.max_len}, or null{longer}",
        )


class Intake:
    """Makes the sequences of an engine.

    Args:
        model: an HFModel: its vocabulary and BOS token.
        cache: how much it holds is a limit.
        text: encodes prompts.
        max_len: longest sequence in tokens, prompt and output.
        seed: base of the seeds of requests that bring none.
        live: id -> the samples of a request that are not done yet; the engine's, read only.
    """

    def __init__(
        self, model: Any, cache: KVCache, text: TextCodec, max_len: int, seed: int, live: Mapping[str, list[Sequence]]
    ):
        self.model, self.cache, self.text, self.max_len, self.seed, self.live = model, cache, text, max_len, seed, live
        self.restart()

    def restart(self) -> None:
        """Counts names and seeds from the beginning."""
        self._names, self._unseeded = itertools.count(), itertools.count()

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence, prompt and output. The last token is answered but never stored, so there
        may be one more than the cache holds."""
        return min(self.max_len, self.cache.capacity() + 1)

    def named(self, requests: Iterable[Request]) -> list[Request]:
        """The requests with an id each; ids that are given are left to those who gave them."""
        requests = list(requests)
        for request in requests:
            if not isinstance(request, Request):
                raise RequestError(f"{str(request)[:60]!r} is not a Request", fix="Request(prompt=...)")
        taken = Counter(request.id for request in requests if request.id is not None)
        twice = [id for id, n in taken.items() if n > 1]
        if twice:
            raise RequestError(f"several requests have the id {twice[0]!r}", fix="give each request an id of its own")
        return [replace(r, id=self._name(taken)) if r.id is None else r for r in requests]

    def _name(self, taken: Iterable[str] = ()) -> str:
        return next(name for i in self._names if (name := f"r{i}") not in self.live and name not in taken)

    def sequences(self, request: Request) -> list[Sequence]:
        """One sequence per sample of a request.

        Raises:
            RequestError: an empty prompt for which the model has no BOS token, token ids outside the vocabulary,
                an id that is running already; PromptTooLongError: it can never fit.
        """
        id = self._name() if request.id is None else request.id
        if id in self.live:
            raise RequestError(f"request id {id!r} is already running", fix="give each request an id of its own")
        prompt, params = self._prompt_tokens(request), request.sampling
        if len(prompt) + min(params.max_new_tokens, 1) > self.limit:
            raise PromptTooLongError(
                f"request {id!r} has a prompt of {len(prompt)} tokens; prompt and output together are at most "
                f"{self.limit} (engine.max_len={self.max_len}, cache capacity {self.cache.capacity()})",
                fix="a shorter prompt, a larger engine.max_len, or a larger cache.memory or cache.num_blocks",
            )
        limit = min(len(prompt) + params.max_new_tokens, self.limit)
        if limit < len(prompt) + params.max_new_tokens:
            cut, wanted = limit - len(prompt), params.max_new_tokens
            log.warning(
                "request %r ends after %d of %d new tokens: prompt and output are at most %d", id, cut, wanted, limit
            )
        base = params.seed if params.seed is not None else (self.seed << 32) + next(self._unseeded)
        context = () if request.prompt_tokens is not None else prompt[-5:].tolist()
        return [
            Sequence(request, id, i, prompt, limit, resolve_seed(base, i), self.text.detokenizer(params.stop, context))
            for i in range(params.n)
        ]

    def branch(
        self, parent: Sequence, prompt_tokens: Any, sampling: SamplingParams | None, id: str | None, now: float
    ) -> Request:
        """The request that continues from all tokens of a sequence with some more. RequestError as in `sequences`."""
        tokens = np.concatenate([parent.tokens, _row(prompt_tokens)])
        return Request(
            prompt_tokens=tokens,
            sampling=replace(parent.params, n=1) if sampling is None else sampling,
            id=id,
            salt=parent.salt,
            keep=parent.keep,
            arrival=now,
        )

    def living(self, id: str, sample: int, tokens: int = 0) -> Sequence:
        """The sample of a request that is not done yet and has put out `tokens` tokens. RequestError when there is
        none, or fewer."""
        if id not in self.live:
            names = [repr(name) for name in itertools.islice(self.live, 10)]
            raise RequestError(
                f"request {id!r} is not running", options=names, fix="name one that was added and is not done yet"
            )
        samples = {sequence.sample: sequence for sequence in self.live[id]}
        if sample not in samples:
            raise RequestError(
                f"request {id!r} has no running sample {sample!r}", options=map(str, samples), fix="name one of them"
            )
        outputs = samples[sample].outputs
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= outputs:
            raise RequestError(
                f"{tokens!r} tokens of request {samples[sample].name!r} cannot be taken back",
                options=[f"0 .. {outputs}"],
                fix="a number of output tokens; the prompt stays",
            )
        return samples[sample]

    def _prompt_tokens(self, request: Request) -> np.ndarray:
        if request.messages is not None:
            ids = self.text.chat(request.messages)
        elif request.prompt is not None:
            ids = self.text.encode(request.prompt)
        else:
            ids = request.prompt_tokens
        tokens = _row(ids)
        if len(tokens) == 0:
            if self.model.bos_id is None:
                raise RequestError(
                    "the prompt is empty and the model has no BOS token to start from", fix="give a prompt"
                )
            tokens = np.array([self.model.bos_id])
        wrong = tokens[(tokens < 0) | (tokens >= self.model.vocab_size)]
        if len(wrong):
            raise RequestError(
                f"token id {int(wrong[0])} is not in the vocabulary", options=[f"0 .. {self.model.vocab_size - 1}"]
            )
        return tokens.astype(np.int32)


def _row(ids: Any) -> np.ndarray:
    """int64 [n] of whatever a user gives as token ids. RequestError when it is not one row of integers."""
    try:
        tokens = np.asarray(ids)
    except (ValueError, TypeError, OverflowError):
        tokens = np.empty((0, 0))
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise RequestError(f"prompt_tokens={str(ids)[:80]} is not one row of token ids", options=["a list of integers"])
    return tokens.astype(np.int64)
