"""Teacher forcing through a cache: texts that are known go through the model as prompts and outputs would.

A text is computed in chunks, and its end token by token, so that chunk edges, copies, the store path and the decode
path are all taken. All texts are in one batch, as far as the engine's limits and the cache allow:

    step    0         1         2         3     4
    text 0  [chunk]   [chunk]   [rest]    [1]   [1]
    text 1  [chunk]   [chunk]   [rest]    [1]   [1]

Shape legend: T tokens of a step, n tokens of one text in it, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvframe.config import plain
from kvframe.errors import CapacityError, PluginError
from kvframe.interfaces import KVCache

_SERIAL = itertools.count()


@dataclass(eq=False)
class Text:
    """A text for a cache (a CacheRequest).

    Attributes:
        tokens: int32 [L]; all of them are computed.
        salt: texts with different salts share nothing in a prefix index.
        decode: the last so many are computed one at a time.
        first: position of the first one whose logits are wanted.
        number: whatever the caller knows it by.
    """

    tokens: np.ndarray
    salt: str
    decode: int = 0
    first: int = 0
    number: int = 0
    keep: Any = None

    def __post_init__(self):
        self.id = f"text/{next(_SERIAL)}"
        self.computed = self.found = 0  # tokens in the cache; tokens that were there before

    def next(self, chunk: int) -> int:
        """Tokens of the next step."""
        left = len(self.tokens) - self.computed
        return 1 if left <= self.decode else min(chunk, left - self.decode)


@dataclass(frozen=True)
class Limits:
    """What one step may hold: tokens of one text, tokens of all, texts."""

    chunk: int
    step: int
    texts: int

    @classmethod
    def of(cls, cfg: Any, chunk: int) -> Limits:
        """The engine's limits, with chunks of at most `chunk` tokens."""
        engine = plain(cfg, "engine")
        step = engine["max_step_tokens"]
        return cls(min(chunk, step, engine["prefill_chunk"] or step), step, engine["max_requests"])


def teach(
    model: Any, cache: KVCache, texts: Iterable[Text], limits: Limits
) -> Iterator[tuple[Text, int, int, torch.Tensor]]:
    """Computes texts. Yields, for each part of a text that was computed, (text, start, n, logits).

    The part has the n tokens from position `start` on. `logits` are float32 [k, V] of the last k of them, those at
    positions >= text.first. What the cache found of a text is not computed.

    Raises:
        CapacityError: a text does not fit into the cache.
    """
    waiting, running = list(texts)[::-1], []
    model.bind(cache)
    try:
        while waiting or running:
            while waiting and len(running) < limits.texts and (found := cache.admit(waiting[-1])) is not None:
                text = waiting.pop()
                text.computed = text.found = found
                running.append(text)
            if not running:
                raise CapacityError(
                    f"a text of {len(waiting[-1].tokens)} tokens does not fit into the cache",
                    fix="a larger cache.memory or cache.num_blocks, or a smaller max_tokens",
                )
            batch = _batch(cache, running, limits)
            yield from _step(model, cache, batch)
            for text in [text for text in running if text.computed == len(text.tokens)]:
                running.remove(text)
                cache.release(text)
    finally:
        for text in running:
            cache.release(text)


def teach_unseen(
    model: Any, cache: KVCache, texts: Iterable[Text], limits: Limits
) -> Iterator[tuple[Text, int, int, torch.Tensor]]:
    """`teach` of texts whose salts are new: every token must be computed.

    Raises:
        PluginError: the cache answers tokens of a text all the same. What came of it would not be its own.
    """
    for text, start, n, logits in teach(model, cache, texts, limits):
        if text.found:
            kind = type(cache)
            raise PluginError(
                f"the cache {kind.__module__}.{kind.__qualname__} says that it has {text.found} tokens under the salt "
                f"{text.salt!r}, which no request had before",
                fix="its admit(), or the match() of its index, must answer tokens of requests with the same salt only",
            )
        yield text, start, n, logits


def _batch(cache: KVCache, running: list[Text], limits: Limits) -> list[tuple[Text, int]]:
    """Which texts get how many tokens in the next step, with room made for them."""
    batch, left = [], limits.step
    for text in running:
        n = min(text.next(limits.chunk), left)
        if n and cache.grow(text, n):
            batch.append((text, n))
            left -= n
    if not batch:
        raise CapacityError(
            f"the cache has no room for the next tokens of {len(running)} texts",
            fix="a larger cache.memory or cache.num_blocks, or texts=1",
        )
    return batch


def _step(model, cache: KVCache, batch) -> Iterator[tuple[Text, int, int, torch.Tensor]]:
    """One forward; what it answers is cut into the texts again after all of it is committed."""
    plan = cache.plan(batch)
    tokens = np.concatenate([text.tokens[text.computed : text.computed + n] for text, n in batch])  # [T]
    wanted, counts, at = [], [], 0
    for text, n in batch:
        skip = min(max(text.first - text.computed, 0), n)
        wanted.append(np.arange(at + skip, at + n))
        counts.append(n - skip)
        at += n
    logits = model.forward(tokens, plan, np.concatenate(wanted))  # [sum of counts, V]
    parts = []
    for (text, n), part in zip(batch, logits.split(counts)):
        parts.append((text, text.computed, n, part))
        cache.commit(text, n)
        text.computed += n
    yield from parts
