"""Decode steps as CUDA graphs: what a step starts on the device is recorded once and started again as a whole.

A graph has fixed addresses and sizes, so a step is padded to a *bucket* of requests and of context, and what differs
from step to step (ids, positions, slots, block tables, lengths) lies in one buffer that a step fills on the host and
copies over. With a bucket of 4, three requests:

    ids            17  5  9  0        the last one is nobody: its token goes to the null block,
    positions     130  8 41  0        its table is empty, and its logits are dropped
    context_lens  131  9 42  1

Pure decode steps of caches that read a step through the plan's tensors alone (`KVCache.graphs`) go this way; prefill,
and caches that look at the host, do not.

Shape legend: N requests of a bucket, B columns of a table, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvframe.types import GroupPlan, StepPlan

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 1024  # tokens of the shortest context; the next ones are twice as long
ALIGNED = 16  # bytes


def batch_bucket(requests: int) -> int:
    """The smallest bucket that holds them; from the largest of BATCHES on, its multiples."""
    for bucket in BATCHES:
        if requests <= bucket:
            return bucket
    return -(-requests // BATCHES[-1]) * BATCHES[-1]


def doubled(n: int, least: int = 1) -> int:
    """The smallest of least, 2 least, 4 least, ... that is not less than n."""
    while least < n:
        least *= 2
    return least


class Static:
    """What steps of one bucket have in common: the plan, and where it lies.

    Attributes:
        plan: on the device; `plan.host` is what a step fills. ids [N], keep [N]: on the device.
    """

    def __init__(self, requests: int, context: int, columns: tuple[int, ...], device: torch.device):
        """columns: of the table of each layer group."""
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            name: ((requests,), np.int64) for name in ("ids", "positions", "keep")
        }
        shapes |= {"starts": ((requests + 1,), np.int32), "rows": ((requests,), np.int32)}
        for g, n in enumerate(columns):
            shapes |= {f"slots{g}": ((requests,), np.int64), f"lengths{g}": ((requests,), np.int32)}
            shapes |= {f"tables{g}": ((requests, n), np.int32)}
        places, size = {}, 0
        for name, (shape, kind) in shapes.items():
            places[name] = size
            size += -(-int(np.prod(shape)) * np.dtype(kind).itemsize // ALIGNED) * ALIGNED
        self._staged = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        flat = self._staged.numpy()
        here, there = {}, {}
        for name, (shape, kind) in shapes.items():
            nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
            here[name] = flat[places[name] : places[name] + nbytes].view(kind).reshape(shape)
            dtype = torch.int64 if kind is np.int64 else torch.int32
            there[name] = self._there[places[name] : places[name] + nbytes].view(dtype).view(shape)
        here["starts"][:] = np.arange(requests + 1)
        here["keep"][:] = np.arange(requests)
        self._here, self.ids, self.keep = here, there["ids"], there["keep"]
        host = self._plan(here, columns, context, None)
        self.plan = self._plan(there, columns, context, host)
        self._copied: Any = None

    @staticmethod
    def _plan(arrays: dict[str, Any], columns: tuple[int, ...], context: int, host: StepPlan | None) -> StepPlan:
        groups = tuple(
            GroupPlan(arrays[f"slots{g}"], arrays[f"tables{g}"], arrays[f"lengths{g}"]) for g in range(len(columns))
        )
        none = tuple(np.zeros((0, 3), dtype=np.int64) for _ in columns)
        return StepPlan(arrays["positions"], arrays["starts"], groups, arrays["rows"], none, 1, context, host=host)

    def fill(self, tokens: np.ndarray, plan: StepPlan) -> None:
        """Takes a decode step: `tokens [R]`, and its plan on the host. One copy to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before reads the same memory
        here, n = self._here, len(tokens)
        for name, values, nobody in (
            ("ids", tokens, 0), ("positions", plan.positions, 0), ("rows", plan.rows, 0),
        ):  # fmt: skip
            here[name][:n], here[name][n:] = values, nobody
        for g, group in enumerate(plan.groups):
            columns = group.tables.shape[1]
            here[f"slots{g}"][:n], here[f"slots{g}"][n:] = group.slots, 0  # the null block
            here[f"lengths{g}"][:n], here[f"lengths{g}"][n:] = group.context_lens, 1
            here[f"tables{g}"][:n, :columns], here[f"tables{g}"][:n, columns:] = group.tables, 0
            here[f"tables{g}"][n:] = 0
        self._there.copy_(self._staged, non_blocking=True)
        if self._there.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()


def cuda_capture(run: Callable[[], torch.Tensor], pool: Any) -> tuple[Callable[[], None], torch.Tensor]:
    """`(replay, result)` of a function that only starts work on the current device. pool: memory that graphs share."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled, and libraries find their memory
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = run()
    return graph.replay, result


class Graphs:
    """The graphs of one model and one cache.

    Args:
        run: (ids [N], plan, keep [N]) -> float32 logits [N, V], through the cache.
        device: of the model.
        capture: `cuda_capture`, or what stands in for it.
    """

    def __init__(self, run: Callable[..., torch.Tensor], device: str, capture=cuda_capture):
        self._run, self._device, self._capture = run, torch.device(device), capture
        self._made: dict[tuple, tuple[Static, Callable[[], None], torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._made)

    @staticmethod
    def take(plan: StepPlan, logits_at: np.ndarray) -> bool:
        """Is it a pure decode step?"""
        return plan.max_query == 1 and len(logits_at) > 0

    def forget(self) -> None:
        """Addresses may have changed."""
        self._made.clear()

    def forward(self, tokens: np.ndarray, plan: StepPlan, logits_at: np.ndarray) -> torch.Tensor:
        """As HFModel.forward."""
        columns = tuple(doubled(group.tables.shape[1]) for group in plan.groups)
        key = batch_bucket(len(tokens)), doubled(plan.max_context, CONTEXT), columns
        new = key not in self._made
        static = Static(*key, self._device) if new else self._made[key][0]
        static.fill(tokens, plan.host or plan)
        if new:
            run = lambda: self._run(static.ids, static.plan, static.keep)
            self._made[key] = static, *self._capture(run, self._pool)
        _, replay, logits = self._made[key]
        replay()
        if len(logits_at) == len(tokens):
            return logits[: len(tokens)].clone()  # the next step writes there
        return logits[torch.from_numpy(np.asarray(logits_at, dtype=np.int64)).to(logits.device)]
