"""One row of a batch, as a cache knows a request."""

from __future__ import annotations

import itertools

import numpy as np

from kvframe.types import Keep

_SERIAL = itertools.count()
_UNKNOWN = itertools.count(2)


def unknown(shape: tuple[int, ...]) -> np.ndarray:
    """int32 ids of tokens that nobody named (embeddings): each negative, and never given twice, so that no text has
    them and no prefix with them is ever found."""
    n = int(np.prod(shape, dtype=np.int64))
    return -np.fromiter(itertools.islice(_UNKNOWN, n), dtype=np.int32, count=n).reshape(shape)


class Row:
    """One row, as a cache knows a request (kvframe.interfaces.CacheRequest).

    Attributes:
        tokens: int32 [n], of all its columns that are no padding. admitted: the cache knows it.
    """

    __slots__ = ("admitted", "id", "keep", "salt", "tokens")

    def __init__(self, salt: str, tokens: np.ndarray | None = None):
        self.id, self.salt, self.keep, self.admitted = f"row {next(_SERIAL)}", salt, Keep(), False
        self.tokens = np.empty(0, dtype=np.int32) if tokens is None else tokens
