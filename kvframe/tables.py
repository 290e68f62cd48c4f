"""Block tables of all running requests: one row per request, one int32 array per layer group.

Kept as arrays over all rows so that a step's plan is a few numpy calls, whatever the number of requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvframe.interfaces import CacheRequest


@dataclass
class Held:
    """What one running request holds.

    Attributes:
        row: row in the tables (and in per-request planes).
        blocks: per group, number of logical blocks (holes included).
        promise: per group, blocks that admission still counts on.
        published: logical blocks that were handed to the index; publishes: False after `invalidate`.
    """

    request: CacheRequest
    row: int
    blocks: list[int]
    promise: list[int]
    published: int = 0
    publishes: bool = True


class Tables:
    """Rows of `num_rows` requests in `num_groups` layer groups; columns are added as requests grow."""

    def __init__(self, num_rows: int, num_groups: int):
        self.num_rows, self.num_groups = num_rows, num_groups
        self._blocks = [np.zeros((num_rows, 8), dtype=np.int32) for _ in range(num_groups)]
        self.clear()

    def clear(self) -> None:
        for table in self._blocks:
            table[:] = 0
        self.lengths = np.zeros(self.num_rows, dtype=np.int64)
        self._held: dict[str, Held] = {}
        self._rows = list(range(self.num_rows - 1, -1, -1))
        self._promised = [0] * self.num_groups

    def __contains__(self, id: str) -> bool:
        return id in self._held

    def __getitem__(self, id: str) -> Held:
        return self._held[id]

    def all(self) -> Iterable[Held]:
        return self._held.values()

    def has_row(self) -> bool:
        return bool(self._rows)

    def free_rows(self) -> list[int]:
        """Rows that no request holds."""
        return list(self._rows)

    def promised(self, group: int) -> int:
        """Blocks that admitted requests will still take for the tokens they were admitted with."""
        return self._promised[group]

    def open(self, request: CacheRequest) -> Held:
        assert request.id not in self._held, f"request {request.id} holds a row already"
        held = Held(request, self._rows.pop(), [0] * self.num_groups, [0] * self.num_groups)
        self._held[request.id] = held
        return held

    def promise(self, held: Held, need: Sequence[int]) -> None:
        """Admission counts on these blocks; taking them with `extend` redeems the promise."""
        for g, n in enumerate(need):
            held.promise[g] += n
            self._promised[g] += n

    def close(self, id: str) -> None:
        held = self._held.pop(id)
        for g, n in enumerate(held.promise):
            self._promised[g] -= n
        for g in range(self.num_groups):
            self.shrink(held, g, 0)
        self.lengths[held.row] = 0
        self._rows.append(held.row)

    def view(self, held: Held, group: int) -> np.ndarray:
        """The request's table (a view): logical block -> block id, 0 where it was dropped."""
        return self._blocks[group][held.row, : held.blocks[group]]

    def rows(self, group: int, rows: np.ndarray, columns: int) -> np.ndarray:
        """Tables of several requests as one contiguous array [R, columns] (a copy)."""
        return self._blocks[group][rows, :columns]

    def block(self, held: Held, group: int, logical: int) -> int:
        return int(self._blocks[group][held.row, logical])

    def replace(self, held: Held, group: int, logical: int, block: int) -> None:
        self._blocks[group][held.row, logical] = block

    def extend(self, held: Held, group: int, blocks: np.ndarray) -> None:
        """Appends blocks to a request's table."""
        start, stop = held.blocks[group], held.blocks[group] + len(blocks)
        table = self._blocks[group]
        if stop > table.shape[1]:
            wider = np.zeros((self.num_rows, max(stop, 2 * table.shape[1])), dtype=np.int32)
            wider[:, : table.shape[1]] = table
            self._blocks[group] = table = wider
        table[held.row, start:stop] = blocks
        held.blocks[group] = stop
        kept = min(held.promise[group], len(blocks))
        held.promise[group] -= kept
        self._promised[group] -= kept

    def shrink(self, held: Held, group: int, blocks: int) -> np.ndarray:
        """Cuts the table to its first `blocks` entries and answers what was cut off (a copy)."""
        gone = self.view(held, group)[blocks:].copy()
        self.view(held, group)[blocks:] = 0
        held.blocks[group] = min(held.blocks[group], blocks)
        return gone
