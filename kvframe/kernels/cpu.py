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
from dataclasses import dataclass

import numpy as np
import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.kernels.cpu_codes import DTYPES, Reader, likely_readers, reader
from kvframe.kernels.cpu_prefill import Chunk, make_chunk, prefill
from kvframe.kernels.native import address, callback, run, team
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan

FEW = 16  # most new tokens of a request that goes token by token; see benchmarks/attention_cpu.py --prefill
ALONE = 1 << 18  # bytes of keys and values that one thread has read before another one would be awake


@dataclass(slots=True)
class Work:
    """A step of one layer group, for all its layers: items for the compiled function and chunks for GEMMs.

    Attributes:
        items: int64 [n, 8], see `cpu_decode`; tables: int32 [R, B]; slots: int64 [T]; keys: what the items read.
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


class CpuKernel(Kernel):
    """Attention over block tables on the host, for one thread of the engine at a time.

    Keeps what it derived from the last plan, and scratch memory; no state that changes a result.
    """

    name = "cpu"
    sink_queries = True

    def __init__(self):
        self._plan: StepPlan | None = None
        self._work: dict[tuple, Work] = {}
        self._readers: dict[int, tuple[Codec, Codec, LayerSpec, Reader, Reader]] = {}
        self._args = (ctypes.c_int64 * 32)()
        self._at = ctypes.addressof(self._args)
        self._buffers: dict[str, np.ndarray] = {}

    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str
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
        work = self._prepare(storage, plan)
        k_reader, v_reader = self._read(storage)
        if k_reader.plain and v_reader.plain:
            self._scatter(k, v, storage.k["payload"], storage.v["payload"], work)
            return
        for x, codec, planes, how in (
            (k, storage.codec_k, storage.k, k_reader),
            (v, storage.codec_v, storage.v, v_reader),
        ):
            if how.peak is not None and x.dtype in (torch.float32, torch.bfloat16):
                self._encode(x, planes, how, work)
            else:
                slots = torch.from_numpy(work.slots)
                for name, code in codec.encode(x).items():  # code [T, Hkv, ...]
                    planes[name].view(-1, *planes[name].shape[2:])[slots] = code.to(planes[name].dtype)

    def _scatter(self, k, v, k_plane: torch.Tensor, v_plane: torch.Tensor, work: Work) -> None:
        """Plain vectors to their slots of the planes `[N, S, Hkv, D]`."""
        k, v = (
            x if x.stride(-1) == 1 and x.dtype is plane.dtype else x.to(plane.dtype).contiguous()
            for x, plane in ((k, k_plane), (v, v_plane))
        )
        size = k.element_size()
        struct.pack_into(
            "13q", self._args, 0, k.shape[0], address(work.slots), k.shape[1],
            k.data_ptr(), k.stride(0) * size, k.stride(1) * size, k_plane.data_ptr(), k.shape[2] * size,
            v.data_ptr(), v.stride(0) * size, v.stride(1) * size, v_plane.data_ptr(), v.shape[2] * size,
        )  # fmt: skip
        callback("scatter")(self._at)

    def _encode(self, x: torch.Tensor, planes: dict[str, torch.Tensor], how: Reader, work: Work) -> None:
        """Codes and scales of `x [T, Hkv, D]` to their slots."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        scales = planes.get("scale")
        struct.pack_into(
            "9q3d", self._args, 0, x.shape[0], x.shape[1], x.shape[2], address(work.slots), x.data_ptr(), x.stride(0),
            x.stride(1), planes["payload"].data_ptr(), 0 if scales is None else scales.data_ptr(),
            how.peak, how.most, how.fixed,
        )  # fmt: skip
        callback("encode", str(x.dtype).removeprefix("torch."), how.type)(self._at)

    def _read(self, storage: LayerStorage) -> tuple[Reader, Reader]:
        """How the planes of a layer are read."""
        codecs, spec = (storage.codec_k, storage.codec_v), storage.spec
        held = self._readers.get(id(storage))  # which may have been the id of a layer that is gone
        if held is None or held[0] is not codecs[0] or held[1] is not codecs[1] or held[2] is not spec:
            if len(self._readers) > 4096:  # layers of caches that are gone
                self._readers.clear()
            found = [reader(codec, dim, spec.dtype) for codec, dim in zip(codecs, (spec.k_dim, spec.v_dim))]
            held = self._readers[id(storage)] = (*codecs, spec, *found)
        return held[3], held[4]

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`q [T, Hq, Dk]` (and `sink_q [T, Hq, Dk]` for the sinks) -> `out [T, Hq, Dv]`."""
        work = self._prepare(storage, plan)
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = torch.empty(q.shape[0], q.shape[1], storage.spec.v_dim, dtype=q.dtype)
        if len(work.items):
            self._decode(torch.cat([q, sink_q]) if work.apart else q, out, storage, work)
        for chunk in work.chunks:
            rows = slice(chunk.start, chunk.stop)
            prefill(q[rows], out[rows], storage, chunk, None if sink_q is None else sink_q[rows])
        return out

    def _prepare(self, storage: LayerStorage, plan: StepPlan) -> Work:
        """What all layers of a group share, made once per step."""
        if self._plan is not plan:
            self._plan, self._work = plan, {}
        rule = storage.retention
        key = (storage.group, rule.window, rule.sinks, storage.block_size)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = split_work(plan.host or plan, *key, rule.sink_position)
        return work

    def _decode(self, q: torch.Tensor, out: torch.Tensor, storage: LayerStorage, work: Work) -> None:
        """Fills the rows of `out [T, Hq, Dv]` that belong to decode tokens."""
        from kvframe.kernels.cpu_decode import scratch_bytes

        spec, items = storage.spec, len(work.items)
        k_how, v_how = self._read(storage)
        hq, hkv, dk, dv = spec.q_heads, spec.kv_heads, spec.k_dim, spec.v_dim
        planes = storage.k["payload"], storage.v["payload"]
        nbytes = work.keys * hkv * sum(d * plane.element_size() for d, plane in zip((dk, dv), planes))
        threads = torch.get_num_threads() if nbytes > ALONE and team() is not None else 1
        # how heads are dealt out to threads changes no result: each head is computed the same way
        per_work = hkv if items >= 2 * threads or threads == 1 else max(1, hkv * items // (2 * threads))
        pieces = items * -(-hkv // per_work)
        sinks = None if storage.learned_sinks is None else storage.learned_sinks.float().contiguous()
        done = self._buffer("done", items * hkv) if work.split else None
        if done is not None:
            done[: items * hkv] = 0
        tables = [how.table for how in (k_how, v_how)]
        scales = [x.get("scale") for x in (storage.k, storage.v)]
        size = scratch_bytes(hq, dk, dv, hkv * max(dk, dv) if any(x is not None for x in tables) else 0)
        struct.pack_into(
            "23q3d4q", self._args, 0, 0, 0, pieces, per_work, address(self._buffer("scratch", threads * size // 8)),
            size, q.data_ptr(), q.stride(0), q.stride(1), *(plane.data_ptr() for plane in planes), out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(), address(work.items), address(work.tables), work.tables.shape[1],
            address(self._buffer("partial", items * hq * (dv + 2) // 2 + 1)) if work.split else 0,
            0 if done is None else address(done), hq, hkv, dk, dv, storage.block_size,
            spec.scale * k_how.factor, spec.softcap or 0.0, v_how.factor,
            *(0 if x is None else x.data_ptr() for x in scales), *(0 if x is None else address(x) for x in tables),
        )  # fmt: skip
        run(callback(*attend_name(spec.dtype, k_how, v_how)), self._at, min(threads, pieces))

    def _buffer(self, name: str, words: int) -> np.ndarray:
        """An int64 array of at least so many words, the same one from call to call."""
        held = self._buffers.get(name)
        if held is None or held.size < words:
            held = self._buffers[name] = np.zeros(words + words // 2 + 8, dtype=np.int64)
        return held


def attend_name(dtype: str, k: Reader, v: Reader) -> tuple[str, ...]:
    """Which compiled function attends to what these read."""
    return "attend", dtype, k.type, v.type, k.scale or "float32", v.scale or "float32"


# ---------------------------------------------------------------- the plan, split into work


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
