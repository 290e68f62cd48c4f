"""The plan of a step: addresses of every new token, a few numpy calls whatever the number of requests.

Shape legend: T tokens of the step, R requests, S block_size, B table columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvframe.copies import Copy
from kvframe.tables import Held, Tables
from kvframe.types import GroupPlan, StepPlan


def make_plan(
    tables: Tables,
    helds: Sequence[Held],
    new: Sequence[int],
    block_size: int,
    copies: Sequence[Copy],
    tails: np.ndarray,
) -> StepPlan:
    """Positions and slots of each request's next `new` tokens; `copies` are (group, source, destination, slots),
    `tails` int64 [C, 2] rows.

    With S = 4, a request with 6 tokens in blocks [9, 5] that gets 3 (grow has added block 7):

        positions    6   7   8      logical block 1, 1, 2 of the table [9, 5, 7]
        slots       22  23  28      5 * 4 + 2, 5 * 4 + 3, 7 * 4 + 0
    """
    rows = np.array([held.row for held in helds], dtype=np.int32)
    news = np.array(new, dtype=np.int64)  # [R]
    lengths = tables.lengths[rows]  # [R]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(news, out=starts[1:])
    owner = np.repeat(np.arange(len(rows)), news)  # [T]
    positions = np.arange(int(starts[-1])) - starts[:-1][owner] + lengths[owner]  # [T]
    context = (lengths + news).astype(np.int32)
    longest = int(context.max())
    logical, offset = np.divmod(positions, block_size)
    groups = []
    for g in range(tables.num_groups):
        blocks = tables.rows(g, rows, -(-longest // block_size))  # [R, B]
        target = blocks[owner, logical].astype(np.int64)  # [T]
        assert target.all(), "a token would be written to the null block"
        groups.append(GroupPlan(target * block_size + offset, blocks, context))
    moves = tuple(
        np.array([copy[1:] for copy in copies if copy[0] == g], dtype=np.int64).reshape(-1, 3)
        for g in range(tables.num_groups)
    )
    return StepPlan(positions, starts, tuple(groups), rows, moves, int(news.max()), longest, tails=tails)
