"""Decode steps as CUDA graphs: what a step starts on the device is recorded once and started again as a whole.

A graph has fixed addresses and sizes, so a step is padded to a *bucket* of requests and of context, and what differs
from step to step (ids, positions, slots, block tables, lengths) lies in one buffer that a step fills on the host and
copies over. With a bucket of 4, three requests:

    ids            17  5  9  0        the last one is nobody: its token goes to the null block,
    positions     130  8 41  0        its table is empty, and its logits are dropped
    context_lens  131  9 42  0

Pure decode steps of caches that read a step through the plan's tensors alone (`KVCache.graphs`) go this way; prefill,
and caches that look at the host, do not.

Shape legend: N requests of a bucket, B columns of a table, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from kvframe.moving import Together, named, planned, sent
from kvframe.types import StepPlan

log = logging.getLogger(__name__)

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT, COLUMNS = 1024, 64  # the shortest context, and the fewest columns of a table; the next ones are twice as long
TIMES = 3  # a bucket that is seen so often is captured: that takes as long as many steps


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

    Args:
        requests: N. context: the longest one, in tokens. columns: of the table of each layer group.
    """

    def __init__(self, requests: int, context: int, columns: tuple[int, ...], device: torch.device):
        shapes: dict[str, tuple[tuple[int, ...], type]] = {
            name: ((requests,), np.int64) for name in ("ids", "positions", "keep")
        }
        shapes |= {"starts": ((requests + 1,), np.int32), "rows": ((requests,), np.int32)}
        for g, n in enumerate(columns):
            shapes |= {f"slots{g}": ((requests,), np.int64), f"lengths{g}": ((requests,), np.int32)}
            shapes |= {f"tables{g}": ((requests, n), np.int32)}
        together = Together(shapes)
        self._staged = torch.zeros(together.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(together.nbytes, dtype=torch.uint8, device=device)
        here, there = together.arrays(self._staged.numpy()), together.tensors(self._there)
        here["starts"][:] = np.arange(requests + 1)
        here["keep"][:] = np.arange(requests)
        self._here, self.ids, self.keep = here, there["ids"], there["keep"]
        none = tuple(np.zeros((0, 3), dtype=np.int64) for _ in columns)
        nothing = StepPlan(None, None, (), None, none, 1, context)
        self.plan = planned(there, len(columns), planned(here, len(columns), nothing))
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, tokens: np.ndarray | torch.Tensor, plan: StepPlan) -> None:
        """Takes a decode step: `tokens [R]`, and its plan on the host. One copy to the device, and one there for tokens
        that only the device knows."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before read the same memory
        here, n = self._here, len(tokens)
        known = not isinstance(tokens, torch.Tensor)
        for name, array in (*named(plan).items(), ("ids", tokens if known else np.zeros(0))):
            place = here[name]
            if name == "starts":
                continue
            if array.ndim == 2:
                place[:n, : array.shape[1]], place[:n, array.shape[1] :] = array, 0
            else:
                place[: len(array)] = array
            place[len(array) :] = 0  # nobody: the null block, and no context
        self._there.copy_(self._staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if not known:
            self.ids[:n].copy_(tokens)


class CudaCapture:
    """Records what a function starts on a device, on one stream; what it records shares memory.

    The second of two runs before it shows where the host would wait: an error then, and nothing is captured yet.
    """

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """`(replay, result)`. Raises whatever the function raises, and RuntimeError where it waits for the device."""
        now, mode = torch.cuda.current_stream(), torch.cuda.get_sync_debug_mode()
        self.stream.wait_stream(now)
        try:
            with torch.cuda.stream(self.stream):
                run()  # kernels are compiled, and libraries take their memory
                torch.cuda.set_sync_debug_mode("error")
                run()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            now.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(now):  # a capture that fails leaves its stream the current one
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = run()
        return graph.replay, result


class Graphs:
    """The graphs of one model and one cache. Where a step cannot be captured, all steps are run as they are.

    Args:
        run: (ids [N], plan, keep [N]) -> float32 logits [N, V], through the cache.
        eager: (tokens, plan, logits_at) -> logits, as HFModel.forward; for steps that are not graphs yet.
        device: of the model. max_len: tokens of the longest request.
        version: changes when addresses of weights may have changed.
        capture: makes what records (see CudaCapture), or what stands in for it.
    """

    def __init__(
        self,
        run: Callable[..., torch.Tensor],
        eager: Callable[..., torch.Tensor],
        device: str,
        max_len: int,
        version: Callable[[], int],
        capture: Callable[[torch.device], Callable] = CudaCapture,
    ):
        self._run, self._eager, self._device, self._max_len = run, eager, torch.device(device), max_len
        self._new_capture, self._version = capture, version
        self.why: str | None = None  # why there are none
        self.forget()

    def __len__(self) -> int:
        return len(self._made)

    @staticmethod
    def take(plan: StepPlan, logits_at: np.ndarray) -> bool:
        """Is it a pure decode step?"""
        return plan.max_query == 1 and len(logits_at) > 0

    def forget(self) -> None:
        """Addresses may have changed."""
        self._made: dict[tuple, tuple[Static, Callable[[], None], torch.Tensor]] = {}
        self._seen: Counter[tuple] = Counter()
        self._at, self._capture = self._version(), None

    def _key(self, plan: StepPlan) -> tuple[int, int, int]:
        """The bucket of a plan on the host: requests, context and columns."""
        columns = max(group.tables.shape[1] for group in plan.groups)
        context = min(doubled(plan.max_context, CONTEXT), max(self._max_len, plan.max_context))
        return batch_bucket(len(plan.positions)), context, doubled(columns, COLUMNS)

    def forward(self, tokens: np.ndarray | torch.Tensor, plan: StepPlan, logits_at: np.ndarray) -> torch.Tensor:
        """As HFModel.forward: float32 logits [K, V], which nothing writes again."""
        if self.why is not None:
            return self._eager(tokens, plan, logits_at)
        if self._at != self._version():
            self.forget()
        host = plan.host or plan
        key = self._key(host)
        self._seen[key] += 1
        if self._seen[key] < TIMES:
            return self._eager(tokens, plan, logits_at)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if key not in self._made and not self._make(key, tokens, host):
                return self._eager(tokens, plan, logits_at)
            static, replay, logits = self._made[key]
            static.fill(tokens, host)
            replay()
            if len(logits_at) == len(tokens):
                return logits[: len(tokens)].clone()  # the next step writes there
            return logits[sent(np.asarray(logits_at, dtype=np.int64), self._device)]

    def _make(self, key: tuple[int, int, int], tokens, plan: StepPlan) -> bool:
        """Captures a bucket. False: it cannot be done, now and later."""
        requests, context, columns = key
        static = Static(requests, context, (columns,) * len(plan.groups), self._device)
        static.fill(tokens, plan)
        self._capture = self._capture or self._new_capture(self._device)
        try:
            self._made[key] = static, *self._capture(lambda: self._run(static.ids, static.plan, static.keep))
        except Exception as error:
            self.forget()
            self.why = f"{type(error).__name__}: {error}"
            log.warning("no CUDA graphs, which is slower: a decode step cannot be captured (%s)", self.why)
            return False
        return True
