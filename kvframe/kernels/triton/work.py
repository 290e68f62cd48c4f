"""What there is to do in a step: who decodes and who prefills (requests with one new token, and those with more), and
which groups of a codec that seals get a token.

A chunk's rows are cut into tiles. The last tiles of a chunk see most keys; they come first, so that no program begins a
long piece of work when all others are done. With G = 2, tiles of 16 rows, and chunks of 1, 20 and 1 tokens:

    rows   [0, 2]                           requests that decode
    tiles  [[1, 32], [1, 16], [1, 0]]       request 1 has 40 rows

Shape legend: R requests, n tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvframe.moving import sent
from kvframe.tails import raw_starts
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
    return Work(_moved(rows, plan, len(rows)), len(rows), _moved(pairs, plan, len(pairs), 2))


@dataclass(frozen=True)
class Groups:
    """The groups of a step with chunks that get a token.

    Attributes:
        tiles: int32 [n, 2], request and position of the first token of each group.
        base: int32 [R]; starts: see kvframe.tails.Raw. The token at position p of request r is raw vector base[r] + p.
    """

    tiles: torch.Tensor
    base: torch.Tensor
    starts: np.ndarray


def groups(plan: StepPlan, size: int) -> Groups | None:
    """The Groups of a step for groups of `size` tokens; None where every request gets one token."""
    if plan.max_query == 1:
        return None
    lengths = np.asarray(plan.host.groups[0].context_lens)
    firsts, starts = raw_starts(plan.host, lengths, size)
    spans = zip(firsts.tolist(), lengths.tolist())
    tiles = [(r, begin) for r, (first, length) in enumerate(spans) for begin in range(first, length, size)]
    return Groups(_moved(tiles, plan, len(tiles), 2), _moved(starts[:-1] - firsts, plan, len(firsts)), starts)


def _moved(values, plan: StepPlan, *shape: int) -> torch.Tensor:
    """int32, where the plan is."""
    return sent(np.array(values, dtype=np.int32).reshape(shape), plan.query_starts.device)
