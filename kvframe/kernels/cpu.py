"""The fast kernel for CPUs: paged decode compiled with numba, prefill through torch's GEMMs.

A step is a mix of requests. Those with at most FEW new tokens go, all together, to one compiled call that walks the
block tables and reads each key and value once (`cpu_decode`). Longer chunks are few: one after the other gathers the
blocks it may see and attends with GEMMs in tiles of queries (`cpu_prefill`). Codes that are `number * scale` are read
as they lie there (`cpu_codes`); no decoded copy of a context outlives the layer's chunk.

Shape legend: T tokens of the step, R requests, S block_size, Hq/Hkv query/KV heads, Dk/Dv sizes, n items.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct

import numpy as np
import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.kernels import native
from kvframe.kernels.cpu_codes import DTYPES, Reader, likely_readers, reader
from kvframe.kernels.cpu_layer import Layer, attend_name, layer_of
from kvframe.kernels.cpu_prefill import prefill
from kvframe.kernels.cpu_work import Deal, Work, split_work
from kvframe.kernels.native import address, callback, run
from kvframe.kernels.of_step import OfStep
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan

ALONE = 1 << 18  # bytes of keys and values that one thread has read before another one would be awake


class CpuKernel(Kernel):
    """Attention over block tables on the host, for one thread of the engine at a time.

    Keeps what it derived from the last plan, and scratch memory; no state that changes a result.
    """

    name = "cpu"
    sink_queries = True

    def __init__(self):
        self._shared = OfStep()
        self._args = (ctypes.c_int64 * 32)()
        self._at = ctypes.addressof(self._args)
        self._buffers: dict[str, np.ndarray] = {}

    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str, block_size: int
    ) -> list[str]:
        reasons = []
        if torch.device(device).type != "cpu":
            reasons.append(f"it runs on device cpu, not on {device}")
        if not retention.kernel_mask:
            reasons.append("it knows masks of a window and sinks only")
        if layer.dtype not in DTYPES:
            reasons.append(f"it knows {' and '.join(DTYPES)}, not {layer.dtype}")
        if layer.k_dim % 8 or layer.v_dim % 8:
            reasons.append(f"head sizes must be multiples of 8, not {layer.k_dim} and {layer.v_dim}")
        for kind, codec, dim in zip(("keys", "values"), codecs, (layer.k_dim, layer.v_dim)):
            found = reader(codec, dim, layer.dtype)
            if isinstance(found, str):
                reasons.append(f"{found} ({kind}: {type(codec).__name__})")
        if importlib.util.find_spec("numba") is None:
            reasons.append("numba is not installed (pip install numba)")
        return reasons

    def warm(self, device: str, dtype: str, codec: Codec | None = None) -> None:
        here = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        if not here or dtype not in DTYPES or importlib.util.find_spec("numba") is None:
            return
        for pair in likely_readers(codec, dtype):
            if all(how.plain for how in pair):
                callback("scatter")
            for how in pair:
                if how.peak is not None:
                    callback("encode", dtype, how.type)
            callback(*attend_name(dtype, *pair))

    def store(self, k: torch.Tensor, v: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> None:
        """Copies or encodes `k [T, Hkv, Dk]` and `v [T, Hkv, Dv]` to the slots of the plan."""
        layer = layer_of(storage)
        work = self._prepare(layer, storage, plan)
        if layer.plain:
            self._scatter(k, v, storage.k["payload"], storage.v["payload"], work)
            return
        for x, codec, planes, how in (
            (k, storage.codec_k, storage.k, layer.k_how),
            (v, storage.codec_v, storage.v, layer.v_how),
        ):
            if how.peak is not None and x.dtype in (torch.float32, torch.bfloat16):
                self._encode(x, planes, how, work)
            else:
                slots = torch.from_numpy(work.slots)
                for name, code in codec.encode(x).items():  # code [T, Hkv, ...]
                    planes[name].view(-1, *planes[name].shape[2:])[slots] = code.to(planes[name].dtype)

    def _scatter(self, k, v, k_plane: torch.Tensor, v_plane: torch.Tensor, work: Work) -> None:
        """Plain vectors to their slots of the planes `[N, S, Hkv, D]`."""
        k, v = _ready(k, k_plane), _ready(v, v_plane)
        size, (tokens, heads, dk), (k_token, k_head, _), (v_token, v_head, _) = (
            k.element_size(), k.shape, k.stride(), v.stride(),
        )  # fmt: skip
        struct.pack_into(
            "13q", self._args, 0, tokens, work.at[2], heads,
            k.data_ptr(), k_token * size, k_head * size, k_plane.data_ptr(), dk * size,
            v.data_ptr(), v_token * size, v_head * size, v_plane.data_ptr(), v.shape[2] * size,
        )  # fmt: skip
        callback("scatter")(self._at)

    def _encode(self, x: torch.Tensor, planes: dict[str, torch.Tensor], how: Reader, work: Work) -> None:
        """Codes and scales of `x [T, Hkv, D]` to their slots."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        scales = planes.get("scale")
        struct.pack_into(
            "9q3d", self._args, 0, x.shape[0], x.shape[1], x.shape[2], work.at[2], x.data_ptr(), x.stride(0),
            x.stride(1), planes["payload"].data_ptr(), 0 if scales is None else scales.data_ptr(),
            how.peak, how.most, how.fixed,
        )  # fmt: skip
        callback("encode", str(x.dtype).removeprefix("torch."), how.type)(self._at)

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`q [T, Hq, Dk]` (and `sink_q [T, Hq, Dk]` for the sinks) -> `out [T, Hq, Dv]`."""
        layer = layer_of(storage)
        work = self._prepare(layer, storage, plan)
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty((q.shape[0], q.shape[1], storage.spec.v_dim), dtype=q.dtype)
        if len(work.items):
            self._decode(torch.cat([q, sink_q]) if work.apart else q, out, layer, storage, work)
        for chunk in work.chunks:
            rows = slice(chunk.start, chunk.stop)
            prefill(q[rows], out[rows], storage, chunk, None if sink_q is None else sink_q[rows])
        return out

    def _prepare(self, layer: Layer, storage: LayerStorage, plan: StepPlan) -> Work:
        """What all layers of a group share, made once per step."""
        split = lambda: split_work(plan.host or plan, *layer.key, storage.retention.sink_position)
        return self._shared.get(plan, layer.key, split)

    def _decode(self, q: torch.Tensor, out: torch.Tensor, layer: Layer, storage: LayerStorage, work: Work) -> None:
        """Fills the rows of `out [T, Hq, Dv]` that belong to decode tokens."""
        deal = work.deals.get(layer.shape) or self._deal(layer, work)
        if deal.done is not None:
            deal.done[:] = 0
        items, tables, _ = work.at
        scratch, partial, done = deal.buffers
        k_scale, v_scale = storage.k.get("scale"), storage.v.get("scale")
        struct.pack_into(
            "23q3d4q", self._args, 0, 0, 0, deal.pieces, deal.per_work, scratch, deal.scratch,
            q.data_ptr(), q.stride(0), q.stride(1), storage.k["payload"].data_ptr(), storage.v["payload"].data_ptr(),
            out.data_ptr(), layer.sinks_at, items, tables, work.tables.shape[1], partial, done, *layer.sizes,
            *layer.factors, 0 if k_scale is None else k_scale.data_ptr(), 0 if v_scale is None else v_scale.data_ptr(),
            *layer.tables_at,
        )  # fmt: skip
        run(layer.function, self._at, deal.threads)

    def _deal(self, layer: Layer, work: Work) -> Deal:
        """The Deal of layers like this one. It changes no result: each head is computed the same way."""
        (hq, hkv, _, dv), items = layer.sizes[:4], len(work.items)
        threads = native.threads(work.keys * layer.key_bytes > ALONE)
        per_work = hkv if items >= 2 * threads or threads == 1 else max(1, hkv * items // (2 * threads))
        pieces = items * -(-hkv // per_work)
        scratch = self._buffer("scratch", threads * layer.scratch // 8)
        partial = self._buffer("partial", items * hq * (dv + 2) // 2 + 1) if work.split else None
        done = self._buffer("done", items * hkv)[: items * hkv] if work.split else None
        held = (scratch, partial, done)
        deal = work.deals[layer.shape] = Deal(
            threads=min(threads, pieces), pieces=pieces, per_work=per_work, scratch=layer.scratch,
            buffers=tuple(0 if x is None else address(x) for x in held), done=done, holds=held,
        )  # fmt: skip
        return deal

    def _buffer(self, name: str, words: int) -> np.ndarray:
        """An int64 array of at least so many words, the same one from call to call."""
        held = self._buffers.get(name)
        if held is None or held.size < words:
            held = self._buffers[name] = np.zeros(words + words // 2 + 8, dtype=np.int64)
        return held


def _ready(x: torch.Tensor, plane: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.dtype is plane.dtype else x.to(plane.dtype).contiguous()
