"""FlashInfer's wrapper objects: one per kind of layer and step, since layers of several kinds take turns in a step.

All wrappers of a device share the buffer of partial results, which is used within a call only; the plan of a wrapper
lies in memory of its own.

Shape legend: T tokens of the step, R requests, Hq/Hkv query/KV heads, D size of a head, P slots of a page, M pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from kvframe.kernels.pages import Pages

ON_CUDA_CORES = (1, 2, 3)  # query heads per KV head; more of them fill the tiles of tensor cores, which take any number


class Kind(NamedTuple):
    """What the plan of a wrapper depends on, beside the step.

    Attributes:
        group: of layers, whose pages are the same. decoding: every request has one query.
        softcap: 0: none. window_left: keys before its own that a query sees; -1: all. page: P.
    """

    device: torch.device
    dtype: torch.dtype
    group: int
    decoding: bool
    q_heads: int
    kv_heads: int
    dim: int
    scale: float
    softcap: float
    window_left: int
    page: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """What the plans of both wrappers are told in this order."""
        return self.q_heads, self.kv_heads, self.dim, self.page

    @property
    def options(self) -> dict[str, Any]:
        """What they are told by name."""
        return {
            "window_left": self.window_left, "logits_soft_cap": self.softcap, "sm_scale": self.scale,
            "q_data_type": self.dtype, "kv_data_type": self.dtype,
        }  # fmt: skip


class Decode:
    """One query per request, which sees all that is listed."""

    def __init__(self, kind: Kind, buffer: torch.Tensor):
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.kind = kind
        tensor_cores = kind.q_heads // kind.kv_heads not in ON_CUDA_CORES
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=tensor_cores, backend="fa2")

    def plan(self, query_starts: np.ndarray, pages: Pages, ids: torch.Tensor) -> None:
        """query_starts int32 [R + 1] and pages on the host, ids int32 [M] on the device."""
        starts, last = torch.from_numpy(pages.starts), torch.from_numpy(pages.last)
        self.wrapper.plan(starts, ids, last, *self.kind.sizes, **self.kind.options)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q [T, Hq, D]`, `k` and `v [pages, P, Hkv, D]` -> `[T, Hq, D]`."""
        return self.wrapper.run(q, (k, v))


class Prefill:
    """Any number of queries per request, the last of which stands at its last key."""

    def __init__(self, kind: Kind, buffer: torch.Tensor, backend: str):
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.kind = kind
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(buffer, "NHD", backend=backend)

    def plan(self, query_starts: np.ndarray, pages: Pages, ids: torch.Tensor) -> None:
        """As in Decode."""
        starts, last = torch.from_numpy(pages.starts), torch.from_numpy(pages.last)
        queries = torch.from_numpy(query_starts)
        self.wrapper.plan(queries, starts, ids, last, *self.kind.sizes, causal=True, **self.kind.options)

    run = Decode.run


class Turns:
    """Two wrappers that take turns with the plans of a kind.

    A plan goes to the device out of host memory of the wrapper's own, and nobody waits for that copy; an engine plans a
    step while the one before it runs (see kvframe.flight). So who is planned anew waits for its own last copy, which is
    two plans old.
    """

    def __init__(self, make: Callable[[], Decode | Prefill]):
        self._both = [(make(), None), (make(), None)]

    def plan(self, *args: Any) -> Decode | Prefill:
        """The wrapper that has this plan now."""
        wrapper, copied = self._both.pop(0)
        if copied is not None:
            copied.synchronize()
        wrapper.plan(*args)
        if wrapper.kind.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(wrapper.kind.device))
        self._both.append((wrapper, copied))
        return wrapper


class Wrappers:
    """The wrappers that were needed so far, and a buffer per device. Args: size: of a buffer, in bytes."""

    def __init__(self, backend: str, size: int):
        self.backend, self.size = backend, size
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._made: dict[Kind, Turns] = {}

    def of(self, kind: Kind) -> Turns:
        if kind not in self._made:
            if kind.device not in self._buffers:  # the library wants zeros
                self._buffers[kind.device] = torch.zeros(self.size, dtype=torch.uint8, device=kind.device)
            buffer = self._buffers[kind.device]
            make = lambda: Decode(kind, buffer) if kind.decoding else Prefill(kind, buffer, self.backend)
            self._made[kind] = Turns(make)
        return self._made[kind]
