"""TritonKernel: stores and attends on a CUDA device.

Shape legend: T tokens of the step, Hq/Hkv query/KV heads, Dk/Dv sizes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.kernels.nvidia import wrong_device
from kvframe.kernels.of_step import OfStep
from kvframe.kernels.reference import ReferenceKernel
from kvframe.kernels.triton.layer import LARGEST, Layer
from kvframe.kernels.triton.sides import DTYPES, Side, unreadable
from kvframe.kernels.triton.work import groups, work
from kvframe.storage import LayerStorage
from kvframe.tails import Raw
from kvframe.types import LayerSpec, StepPlan


class TritonKernel(Kernel):
    """Block tables, codes of 8 bits and sealed groups of fewer, windows and sinks, on NVIDIA GPUs of compute capability
    8.0 and later.

    Keeps what it derived from the last plan; no state that changes a result.
    """

    name = "triton"
    sink_queries = True
    sealing = True

    def __init__(self):
        self._shared = OfStep()
        self._plain = ReferenceKernel()

    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str, block_size: int
    ) -> list[str]:
        reasons = []
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed (pip install triton, on Linux)")
        reasons += _wrong_device(torch.device(device))
        if not retention.kernel_mask:
            reasons.append("it knows masks of a window and sinks only")
        if layer.dtype not in DTYPES:
            reasons.append(f"it knows {', '.join(DTYPES)}, not {layer.dtype}")
        if max(layer.k_dim, layer.v_dim) > LARGEST:
            reasons.append(f"head sizes must be at most {LARGEST}, not {layer.k_dim} and {layer.v_dim}")
        for kind, codec, dim in zip(("keys", "values"), codecs, (layer.k_dim, layer.v_dim)):
            found = unreadable(codec, dim, layer.dtype)
            if found is not None:
                reasons.append(f"{found} ({kind}: {type(codec).__name__})")
        return reasons

    def graphs(self, storage: LayerStorage) -> bool:
        layer = self._layer(storage)
        return layer.k.written and layer.v.written  # other codecs encode themselves, in whatever way

    def store(self, k: torch.Tensor, v: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> None:
        """Encodes `k [T, Hkv, Dk]` and `v [T, Hkv, Dv]` into the slots of the plan; codecs that do not say how they
        encode (`Codec.peak`, `Codec.ranged`) do it themselves."""
        from kvframe.kernels.triton.store import store

        layer, slots = self._layer(storage), plan.groups[storage.group].slots
        if not (layer.k.written and layer.v.written):
            self._plain.store(k, v, storage, plan)
        elif not layer.seals:
            store(k, v, layer, slots)
        else:
            for only, (x, side) in enumerate(((k, layer.k), (v, layer.v))):
                if side.group > 1:
                    self._seal(x, side, storage, plan)
                else:
                    store(k, v, layer, slots, only)

    def _seal(self, x: torch.Tensor, side: Side, storage: LayerStorage, plan: StepPlan) -> None:
        from kvframe.kernels.triton.seal import seal

        group, todo = plan.groups[storage.group], self._of_step(plan, groups, side.group)
        raw = None if todo is None else x.new_empty(int(todo.starts[-1]), *x.shape[1:])
        step = group.tables, group.context_lens, plan.query_starts, plan.rows
        seal(x, side, storage.block_size, *step, todo, raw)
        side.tail.plan, side.tail.raw = plan, None if todo is None else Raw(raw, todo.starts)

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        from kvframe.kernels.triton.decode import decode
        from kvframe.kernels.triton.prefill import prefill
        from kvframe.kernels.triton.reduce import reduce

        layer, group = self._layer(storage), plan.groups[storage.group]
        todo = self._of_step(plan, work, layer.group, layer.prefill_tiles().rows)
        q, sink_q = _in_rows(q), None if sink_q is None else _in_rows(sink_q)
        out = q.new_empty(q.shape[0], layer.q_heads, layer.v.dim)
        step = layer, group.tables, group.context_lens, plan.query_starts
        if todo.decoding:
            longest = layer.most_parts(plan.max_context)
            parts = decode(q, sink_q, *step, todo.rows, todo.decoding, longest, plan.rows)
            reduce(*parts, layer, *step[2:], todo.rows, out)
        if todo.tiles is not None:
            raw = {}
            for kind, side in (("k", layer.k), ("v", layer.v)):
                if side.tail is not None:
                    raw[kind] = side.tail.raw.vectors, self._of_step(plan, groups, side.group).base
            prefill(q, sink_q, *step, todo.tiles, out, raw)
        return out

    def _layer(self, storage: LayerStorage) -> Layer:
        if self.name not in storage.memo:
            storage.memo[self.name] = Layer.of(storage)
        return storage.memo[self.name]

    def _of_step(self, plan: StepPlan, make: Callable, *args: int) -> Any:
        """`make(plan, *args)`, once per step."""
        return self._shared.get(plan, (make, *args), lambda: make(plan, *args))


def _in_rows(q: torch.Tensor) -> torch.Tensor:
    """The same with the numbers of a head side by side."""
    return q if q.stride(-1) == 1 else q.contiguous()


def _wrong_device(device: torch.device) -> list[str]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [] if device.type == "cpu" else [f"TRITON_INTERPRET=1 runs it on the CPU, not on {device}"]
    return wrong_device(device)
