"""Block tables as libraries want them: for each request the pages that are looked at, in one list.

A page is a piece of a block: planes `[N, S, ...]` are looked at as `[N * S / P, P, ...]`, which costs nothing. With
blocks of S = 4 slots, pages of P = 2 and the table [7, 3], a request of 7 tokens has

    position   0  1 | 2  3 | 4  5 | 6  .
    page       14     15     6      7           last: 1, tail: slot 15

With P = 1 a page is a slot, and a list may begin anywhere: under a window of 3 a single query at 6 gets [12, 13, 14].

Shape legend: R requests, B logical blocks of a table, M pages of all requests, X slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvframe.types import GroupPlan, StepPlan


@dataclass(frozen=True)
class Pages:
    """Numpy arrays.

    Attributes:
        starts: int32 [R + 1]; request r has `ids[starts[r] : starts[r + 1]]`.
        ids: int32 [M].
        last: int32 [R]; tokens in the last page of each request, 1 .. P.
        tail: int64 [X]; slots of last pages behind the ends of their requests: whatever was there before.
    """

    starts: np.ndarray
    ids: np.ndarray
    last: np.ndarray
    tail: np.ndarray

    @classmethod
    def of(cls, group: GroupPlan, block_size: int, page: int, first: np.ndarray | None = None) -> Pages:
        """The pages of a step, from the host's tables.

        Args:
            page: P, which divides `block_size`.
            first: int64 [R], multiples of P: the first position of each request that is looked at; None: 0.
        """
        lengths, tables = group.context_lens.astype(np.int64), group.tables.astype(np.int64)
        begin = np.zeros_like(lengths) if first is None else first // page
        counts = -(-lengths // page) - begin
        each = block_size // page
        rows, logical = _runs(begin, counts)
        ids = tables[rows, logical // each] * each + logical % each
        starts = np.concatenate([[0], np.cumsum(counts)])
        lists = (a.astype(np.int32) for a in (starts, ids, (lengths - 1) % page + 1))
        return cls(*lists, tail(group, block_size, page))


def tail(group: GroupPlan, block_size: int, page: int) -> np.ndarray:
    """int64 [X]: the slots between the end of each request and the end of its last page.

    A request writes the last of its tokens in each step, so nobody shares its last page: they are its own to clean.
    """
    lengths, tables = group.context_lens.astype(np.int64), group.tables.astype(np.int64)
    rows, position = _runs(lengths, -lengths % page)
    return tables[rows, position // block_size] * block_size + position % block_size


def first_seen(plan: StepPlan, group: GroupPlan, window: int) -> np.ndarray:
    """int64 [R]: the first position that any query of each request sees under a window. Host."""
    new = np.diff(plan.query_starts).astype(np.int64)
    return np.maximum(group.context_lens.astype(np.int64) - new - window + 1, 0)


def _runs(begin: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`counts[r]` numbers from `begin[r]` on for each r, one after the other, and their r."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - (before - begin)[rows]
