"""A step, sorted into what the `cpu` kernel does: items of decode tokens, chunks of prompts.

Shape legend: T tokens of the step, R requests, B blocks of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvframe.kernels.cpu_prefill import Chunk, make_chunk
from kvframe.kernels.native import address
from kvframe.types import StepPlan

FEW = 16  # most new tokens of a request that goes token by token; see benchmarks/attention_cpu.py --prefill


@dataclass(frozen=True, slots=True)
class Deal:
    """Items among threads, for layers that are alike.

    Attributes:
        threads, pieces, per_work: how many threads, pieces of work, KV heads of a piece.
        scratch: bytes of a thread. buffers: address of scratch, of partial results and of counters, or 0.
        done: the counters, which start at 0 in each layer, or None. holds: the memory.
    """

    threads: int
    pieces: int
    per_work: int
    scratch: int
    buffers: tuple[int, int, int]
    done: np.ndarray | None
    holds: tuple


@dataclass(slots=True)
class Work:
    """A step of one layer group, for all its layers: items for the compiled function and chunks for GEMMs.

    Attributes:
        items: int64 [n, 8], see `cpu_decode`; tables: int32 [R, B]; slots: int64 [T]; keys: what the items read.
        at: addresses of items, tables and slots. deals: how the items are dealt out to threads, per kind of layer.
        split: some token has more than one item.
        apart: some item reads a second query, in row `T + token`.
    """

    items: np.ndarray
    tables: np.ndarray
    slots: np.ndarray
    keys: int
    split: bool
    apart: bool
    chunks: list[Chunk]
    at: tuple[int, int, int] = field(init=False)
    deals: dict[tuple, Deal] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.at = address(self.items), address(self.tables), address(self.slots)


def split_work(
    plan: StepPlan, group: int, window: int | None, sinks: int, block_size: int, sink_position=lambda q_pos: None
) -> Work:
    """Sorts the requests of a step into items and chunks. sink_position: see Retention."""
    starts, positions = np.asarray(plan.query_starts), np.asarray(plan.positions, dtype=np.int64)
    tables = np.ascontiguousarray(plan.groups[group].tables, dtype=np.int32)
    slots = np.ascontiguousarray(plan.groups[group].slots, dtype=np.int64)
    counts = np.diff(starts)
    tokens = np.flatnonzero(np.repeat(counts <= FEW, counts))  # numbers of the tokens of decode requests
    rows = np.repeat(np.arange(len(counts)), counts)[tokens]
    seen_from = sink_position(positions)
    apart = None if seen_from is None or (seen_from == positions).all() else seen_from != positions
    second = None if apart is None else tokens + len(positions) * apart[tokens]
    items, keys = make_items(tokens, rows, positions[tokens], window, sinks, second)
    chunks = []
    for r in np.flatnonzero(counts > FEW):
        a, b = int(starts[r]), int(starts[r + 1])
        far = apart is not None and bool(apart[a:b].any())
        chunks.append(make_chunk(a, b, int(positions[a]), tables[r], window, sinks, block_size, far))
    some = apart is not None and bool(apart[tokens].any())
    return Work(items, tables, slots, keys, bool((items[:, 7] > 1).any()), some, chunks)


def make_items(tokens, rows, positions, window: int | None, sinks: int, second=None) -> tuple[np.ndarray, int]:
    """Items `[n, 8]` of decode tokens, and the keys they read. `tokens`, `rows`, `positions`: [m].

    See the drawing in `cpu_decode`: a token has the splits that hold a sink, then those that hold the window. Where
    `second [m]` names another row of queries than `tokens`, sinks and window have items of their own.
    """
    from kvframe.kernels.cpu_decode import ITEM, SPLIT

    stop = positions + 1
    low = np.zeros_like(stop) if window is None else np.maximum(stop - window, 0)
    sink = np.minimum(low, sinks)  # visible are [0, sink) and [low, stop)
    first_window = low // SPLIT
    sink_splits = np.minimum(-(-sink // SPLIT), first_window)  # those that hold nothing of the window
    if second is not None:
        sink_splits = np.where(second != tokens, -(-sink // SPLIT), sink_splits)
    count = sink_splits + (stop - 1) // SPLIT - first_window + 1
    owner = np.repeat(np.arange(len(tokens)), count)  # [n]
    first = np.cumsum(count) - count
    j = np.arange(len(owner)) - first[owner]
    grid = np.where(j < sink_splits[owner], j, j - sink_splits[owner] + first_window[owner]) * SPLIT
    items = np.empty((len(owner), ITEM), dtype=np.int64)
    items[:, 0], items[:, 1] = tokens[owner], rows[owner]
    for column, (a, b) in ((2, (0, sink[owner])), (4, (low[owner], stop[owner]))):
        items[:, column] = np.clip(a, grid, grid + SPLIT)
        items[:, column + 1] = np.clip(b, grid, grid + SPLIT)
    if second is not None:
        far, of_sinks = (second != tokens)[owner], j < sink_splits[owner]
        items[:, 0] = np.where(of_sinks, second[owner], tokens[owner])
        items[far & of_sinks, 4:6] = 0
        items[far & ~of_sinks, 2:4] = 0
    items[:, 6], items[:, 7] = first[owner], count[owner]
    return items, int((sink + stop - low).sum())
