"""TritonKernel: stores and attends on a CUDA device.

Shape legend: T tokens of the step, Hq/Hkv query/KV heads, Dk/Dv sizes.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.kernels.reference import ReferenceKernel
from kvframe.kernels.triton.layer import LARGEST, Layer
from kvframe.kernels.triton.sides import DTYPES, unreadable
from kvframe.kernels.triton.work import Work, work
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan

OLDEST = (8, 0)  # compute capability


class TritonKernel(Kernel):
    """Block tables, codes of 8 bits, windows and sinks, on NVIDIA GPUs of compute capability 8.0 and later.

    Keeps what it derived from layers and from the last plan; no state that changes a result.
    """

    name = "triton"
    sink_queries = True

    def __init__(self):
        self._plan: StepPlan | None = None
        self._work: dict[tuple[int, int], Work] = {}
        self._layers: dict[int, tuple[tuple, Layer]] = {}
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
        encode (`Codec.peak`) do it themselves."""
        from kvframe.kernels.triton.store import store

        layer = self._layer(storage)
        if layer.k.written and layer.v.written:
            store(k, v, layer, plan.groups[storage.group].slots)
        else:
            self._plain.store(k, v, storage, plan)

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        from kvframe.kernels.triton.decode import decode
        from kvframe.kernels.triton.prefill import prefill
        from kvframe.kernels.triton.reduce import reduce

        layer, group = self._layer(storage), plan.groups[storage.group]
        todo = self._todo(plan, layer)
        q, sink_q = _in_rows(q), None if sink_q is None else _in_rows(sink_q)
        out = q.new_empty(q.shape[0], layer.q_heads, layer.v.dim)
        if todo.decoding:
            step = layer, group.tables, group.context_lens, plan.query_starts, todo.rows
            parts = decode(q, sink_q, *step, todo.decoding, layer.most_parts(plan.max_context))
            reduce(*parts, layer, *step[2:], out)
        if todo.tiles is not None:
            prefill(q, sink_q, layer, group.tables, group.context_lens, plan.query_starts, todo.tiles, out)
        return out

    def _layer(self, storage: LayerStorage) -> Layer:
        parts = storage.spec, storage.retention, storage.codec_k, storage.codec_v, storage.k, storage.v
        held = self._layers.get(id(storage))  # which may have been the id of a layer that is gone
        if held is None or any(a is not b for a, b in zip(held[0], parts)):
            held = self._layers[id(storage)] = parts, Layer.of(storage)
        return held[1]

    def _todo(self, plan: StepPlan, layer: Layer) -> Work:
        if self._plan is not plan:
            self._plan, self._work = plan, {}
        key = layer.group, layer.prefill_tiles().rows
        if key not in self._work:
            self._work[key] = work(plan, *key)
        return self._work[key]


def _in_rows(q: torch.Tensor) -> torch.Tensor:
    """The same with the numbers of a head side by side."""
    return q if q.stride(-1) == 1 else q.contiguous()


def _wrong_device(device: torch.device) -> list[str]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [] if device.type == "cpu" else [f"TRITON_INTERPRET=1 runs it on the CPU, not on {device}"]
    if device.type != "cuda":
        return [f"it runs on CUDA devices, not on {device}"]
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return ["torch finds no CUDA device (torch.cuda.is_available())"]
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        return [f"it needs compute capability 8.0, and {device} has {'.'.join(map(str, capability))}"]
    return []
