"""Who of a step decodes and who prefills: requests with one new token, and those with more.

A chunk's rows are cut into tiles. The last tiles of a chunk see most keys; they come first, so that no program begins a
long piece of work when all others are done. With G = 2, tiles of 16 rows, and chunks of 1, 20 and 1 tokens:

    rows   [0, 2]                           requests that decode
    tiles  [[1, 32], [1, 16], [1, 0]]       request 1 has 40 rows
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvframe.types import StepPlan


@dataclass(frozen=True)
class Work:
    """Attributes:
    rows: int32 [decoding], or None where all requests of the step decode; decoding: how many do.
    tiles: int32 [n, 2] of request and first row, or None where there are none.
    """

    rows: torch.Tensor | None
    decoding: int
    tiles: torch.Tensor | None


def work(plan: StepPlan, group: int, tile: int) -> Work:
    """The Work of a step. group: query heads of a KV head; tile: rows of a tile of the prefill kernel."""
    if plan.max_query == 1:
        return Work(None, len(plan.query_starts) - 1, None)
    new = np.diff(plan.host.query_starts)
    rows, chunks = np.flatnonzero(new == 1), np.flatnonzero(new > 1)
    pairs = [(r, begin) for r in chunks.tolist() for begin in range(0, int(new[r]) * group, tile)]
    past = np.asarray(plan.host.groups[0].context_lens) - new
    pairs.sort(key=lambda pair: -(int(past[pair[0]]) + pair[1] // group))
    device = plan.query_starts.device
    move = lambda values, *shape: torch.from_numpy(np.array(values, dtype=np.int32).reshape(shape)).to(device)
    return Work(move(rows, len(rows)), len(rows), move(pairs, len(pairs), 2))
