"""Seeded token ids and sizes for workloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvframe.errors import ConfigError
from kvframe.workloads.workload import Facts

SPECIAL = 100  # ids below it are often special tokens, and are not drawn


class Draws:
    """Random tokens of one run of a workload.

    No two pieces of text begin with the same token (until a vocabulary is used up), so nothing is shared by accident:
    what a prefix index finds is what the workload means it to find.
    """

    def __init__(self, seed: int, facts: Facts):
        self._random = np.random.default_rng(seed)
        self._least = min(SPECIAL, facts.vocab_size // 4)
        self._most = facts.vocab_size
        self._firsts = self._random.permutation(np.arange(self._least, self._most))
        self._pieces = 0

    def tokens(self, n: int) -> np.ndarray:
        """int32 [n], the first one of which begins no other piece."""
        ids = self._random.integers(self._least, self._most, n)
        ids[:1] = self._firsts[self._pieces % len(self._firsts)]
        self._pieces += 1
        return ids.astype(np.int32)

    def size(self, bounds: tuple[int, int]) -> int:
        """Uniform between the bounds, both included."""
        return int(self._random.integers(*bounds, endpoint=True))


def count(key: str, value: Any, least: int = 1) -> int:
    """An integer option of a workload. ConfigError names the key."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"workload.{key}={value!r} cannot be used", options=[f"an integer >= {least}"])
    return value


def bounds(key: str, value: Any, least: int = 1) -> tuple[int, int]:
    """An option that is a number of tokens, or the least and the most of it. ConfigError names the key."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    fine = len(pair) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not fine or not least <= pair[0] <= pair[1]:
        raise ConfigError(
            f"workload.{key}={value!r} cannot be used",
            options=[f"tokens, an integer >= {least}", "[least,most]"],
            fix=f"workload.{key}=[16,64]",
        )
    return pair[0], pair[1]
