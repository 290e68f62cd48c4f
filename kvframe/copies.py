"""Copies between blocks that a plan must run before its forward: copy-on-write, and partial blocks of a hit.

A copy waits for the next plan, whoever is in it: so a block that depends on one can be shared and given up like any
other. Its source is locked by a reference until the commit after that plan. A copy into a block that has another owner
by then is harmless, since copies run first and in order.

A fork also copies the parent's row of the tails (see kvframe.sealing), where the open group is. That copy waits as
well, and needs no lock: tails are written by forwards only, and copies run before the next one. So until then a row
holds what it held at the fork, whether its request was cut, ended, or gave the row to another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvframe.blocks import BlockPool

Copy = tuple[int, int, int, int]  # layer group, source block, destination block, number of slots


class Copies:
    """The copies of one cache that are not behind us.

    Attributes:
        count: copies of blocks that were handed to a plan since the last reset of the counters.
        rows: copies of tails that wait for the next plan: destination row, of a running request -> source row, whoever
            holds it by now.
        tails: int64 [C, 2] (source row, destination row) for the plan that took its copies last.
    """

    def __init__(self, pools: Sequence[BlockPool]):
        self.pools = pools
        self.clear()

    def clear(self) -> None:
        """Forgets everything; the pools are reset as well."""
        self._due: list[Copy] = []
        self._running: list[Copy] = []
        self.rows: dict[int, int] = {}
        self.tails = np.zeros((0, 2), dtype=np.int64)
        self.count = 0

    def add(self, group: int, source: int, destination: int, slots: int) -> None:
        """A copy for the next plan. The caller's reference to `source` becomes its lock."""
        self._due.append((group, source, destination, slots))

    def add_row(self, source: int, destination: int) -> None:
        """A copy of a tail for the next plan.

        Kept as if all ran at once: a row that is to be copied itself stands for where its content comes from.

            fork 3 -> 5, fork 5 -> 6        (3, 5), (3, 6)
            fork 3 -> 5, 3 ends and its row becomes a child's: fork 7 -> 3        (3, 5), (7, 3)
        """
        self.rows[destination] = self.rows.get(source, source)

    def forget_row(self, row: int) -> None:
        """The request of a row has ended: what waits to be copied into it is not needed."""
        self.rows.pop(row, None)

    def take(self) -> list[Copy]:
        """What the plan that is made now has to run; its copies of tails are in `tails`."""
        self.done()
        self.tails = np.array(list(self.rows.items()), dtype=np.int64).reshape(-1, 2)[:, ::-1]
        self.rows = {}
        self._due, self._running = [], self._due
        self.count += len(self._running)
        return self._running

    def done(self) -> None:
        """The copies of the last plan were run: their sources may go."""
        self._running = self._unlock(self._running, unused_only=False)

    def forget_unused(self) -> None:
        """Copies into blocks that nobody holds any more are not needed."""
        self._due = self._unlock(self._due, unused_only=True)
        self._running = self._unlock(self._running, unused_only=True)

    def locked(self, group: int) -> list[int]:
        """Sources that are locked in a layer group, once per copy."""
        return [source for g, source, _, _ in self._due + self._running if g == group]

    def _unlock(self, copies: list[Copy], unused_only: bool) -> list[Copy]:
        left = []
        for copy in copies:
            group, source, destination, _ = copy
            if unused_only and self.pools[group].refs[destination]:
                left.append(copy)
            else:
                self.pools[group].drop(np.array([source]))
        return left
