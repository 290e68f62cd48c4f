"""The tensors of a cache: planes per layer, copies between blocks, and one device copy of the plan per step.

Shape legend: N blocks (null block 0 included), S block_size, G codec group, Hkv KV heads.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch

from kvframe.errors import IncompatibleCacheError
from kvframe.interfaces import CacheContext, Codec, Kernel, Retention
from kvframe.kernels.rotation import SinkQueries
from kvframe.moving import LatePlan, moved, sent
from kvframe.tails import Tail
from kvframe.types import LayerSpec, StepPlan

log = logging.getLogger(__name__)

POISON = {torch.int8: -128, torch.uint8: 127}


@dataclass
class LayerStorage:
    """What a kernel knows of one layer.

    Attributes:
        spec: heads, sizes, scale, softcap of the layer.
        retention: the rule of its layer group; group: index of that group in the plan.
        codec_k, codec_v: how keys and values are stored.
        k, v: plane name -> tensor [N, S (/ G), Hkv, ...]; a layer with `spec.kv_source` shares its source's.
        block_size: S.
        learned_sinks: [Hq] logits, or None.
        kernel: the kernel that serves the layer.
        tail_k, tail_v: open groups where the codec seals, else None; shared with the source like the planes.
        last_reader: no layer behind this one reads what it reads.
        sink_queries: the rule has a `sink_position`, so the kernel gets a second query.
        memo: what its kernel derived from all of this, under a name of its own.
    """

    spec: LayerSpec
    retention: Retention
    group: int
    codec_k: Codec
    codec_v: Codec
    k: dict[str, torch.Tensor]
    v: dict[str, torch.Tensor]
    block_size: int
    kernel: Kernel
    learned_sinks: torch.Tensor | None = None
    tail_k: Tail | None = None
    tail_v: Tail | None = None
    last_reader: bool = True
    sink_queries: bool = field(init=False)
    memo: dict = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self):
        self.sink_queries = has_sink_queries(self.retention)

    def forget_raw(self) -> None:
        """The step's vectors in full precision are not needed any more."""
        for tail in (self.tail_k, self.tail_v):
            if tail is not None:
                tail.forget()


@dataclass
class Storage:
    """All layers of a cache on one device. `sink_query(q, layer, plan)` makes the second queries of a step."""

    layers: list[LayerStorage]
    device: torch.device
    sink_query: SinkQueries = field(default_factory=SinkQueries)

    @classmethod
    def allocate(
        cls, context: CacheContext, codec: Codec, retention: Retention, group_of, block_size: int, num_blocks
    ) -> Storage:
        """Planes for every layer.

        Args:
            group_of: layer index -> index of its layer group.
            num_blocks: per group, blocks without the null block.
        """
        device, layers, reasons, passed_over = torch.device(context.device), [], {}, {}
        sinks = context.learned_sinks or {}
        readers = {_owner(spec): spec.index for spec in context.layers}  # whose codes -> the last layer that reads them
        for spec in context.layers:
            group = group_of[spec.index]
            owner = context.layers[_owner(spec)]
            codecs = codec.for_layer(owner, "k"), codec.for_layer(owner, "v")
            rule = retention.for_layer(spec)
            kernel, why = choose(context.kernels, spec, codecs, rule, context.device, block_size)
            if kernel is None:
                for reason in why:
                    reasons.setdefault(reason, []).append(spec.index)
            if reasons:
                continue
            for reason in why:
                passed_over.setdefault(reason, []).append(spec.index)
            if spec.kv_source is None:
                shape = (num_blocks[group] + 1, block_size, spec.kv_heads)
                dims, dtype = (spec.k_dim, spec.v_dim), getattr(torch, spec.dtype)
                k, v = (_planes(c, dim, shape, spec.dtype, device) for c, dim in zip(codecs, dims))
                tails = [
                    Tail.allocate(c, context.max_requests, spec.kv_heads, dim, dtype, device)
                    for c, dim in zip(codecs, dims)
                ]
            else:
                source = layers[spec.kv_source]
                k, v, tails = source.k, source.v, (source.tail_k, source.tail_v)
            learned = sinks.get(spec.index)
            last = readers[_owner(spec)] == spec.index
            layers.append(LayerStorage(spec, rule, group, *codecs, k, v, block_size, kernel, learned, *tails, last))
        if reasons:
            raise IncompatibleCacheError(f"{_spans(where)}: {why}: kernel=auto" for why, where in reasons.items())
        for reason, where in passed_over.items():
            log.info("%s: %s", _spans(where), reason)
        return cls(layers, device)

    @property
    def graphs(self) -> bool:
        """No layer needs the host in a decode step: no second queries, and kernels that say so."""
        return all(layer.kernel.graphs(layer) and not layer.sink_queries for layer in self.layers)

    def run_copies(self, copies) -> None:
        """Copies the first n slots of a block into another one, in every plane of the group's layers; of a codec that
        seals, the whole groups among them."""
        for group, rows in enumerate(copies):
            if not len(rows):
                continue
            for layer in self.layers:
                if layer.group != group or layer.spec.kv_source is not None:
                    continue
                dims = layer.spec.k_dim, layer.spec.v_dim
                for codec, planes, dim in zip((layer.codec_k, layer.codec_v), (layer.k, layer.v), dims):
                    specs = codec.planes(dim)
                    for name, plane in planes.items():
                        unit = 1 if specs[name].per == "group" else codec.group  # entries of a group
                        for source, destination, n in rows.tolist():
                            entries = n // codec.group * unit
                            plane[destination, :entries] = plane[source, :entries]

    def tails(self):
        """Every tail once."""
        for layer in self.layers:
            if layer.spec.kv_source is None:
                yield from (tail for tail in (layer.tail_k, layer.tail_v) if tail is not None)

    def copy_tails(self, rows: np.ndarray) -> None:
        """Copies rows of the tails, all at once: int64 [C, 2] of (source, destination)."""
        if not len(rows):
            return
        sources, destinations = sent(rows.T.copy(), self.device)
        for tail in self.tails():
            tail.plane[destinations] = tail.plane[sources]

    def to_device(self, plan: StepPlan) -> StepPlan:
        """The same plan as tensors; on a GPU they travel when somebody reads one."""
        return moved(plan, self.device) if self.device.type == "cpu" else LatePlan(plan, self.device)

    def planes(self):
        """Every plane once, the null blocks included."""
        for layer in self.layers:
            if layer.spec.kv_source is None:
                yield from (*layer.k.values(), *layer.v.values())

    def tensors(self):
        """Planes and tails."""
        yield from self.planes()
        yield from (tail.plane for tail in self.tails())

    def nbytes(self) -> int:
        """Bytes of all planes; tails are not in it."""
        return sum(plane.nbytes for plane in self.planes())

    def poison(self, group: int, blocks: np.ndarray) -> None:
        """Fills blocks with NaN (or -128): what nobody should read must not go unnoticed. For tests."""
        ids = torch.from_numpy(blocks.astype(np.int64)).to(self.device)
        for layer in self.layers:
            if layer.group == group and layer.spec.kv_source is None:
                for plane in (*layer.k.values(), *layer.v.values()):
                    plane[ids] = POISON.get(plane.dtype, float("nan"))

    def poison_tails(self, lengths: dict[int, int]) -> None:
        """Fills rows of the tails with NaN behind the last token of their request; `lengths`: row -> its tokens."""
        for tail in self.tails():
            for row, length in lengths.items():
                tail.plane[row, length % tail.plane.shape[1] :] = float("nan")


def choose(kernels, spec, codecs, retention, device, block_size) -> tuple[Kernel | None, list[str]]:
    """The first kernel that can serve the layer, and why the ones before it cannot."""
    why: list[str] = []
    for kernel in kernels:
        reasons = kernel.unsupported(spec, codecs, retention, device, block_size)
        if has_sink_queries(retention) and not kernel.sink_queries:
            reasons = [*reasons, "it takes no second query for the sinks (cache.retention.positions=absolute)"]
        if any(codec.group > 1 for codec in codecs) and not kernel.sealing:
            reasons = [*reasons, "it does not read open groups of tokens (a codec that stores token by token)"]
        if not reasons:
            return kernel, why
        why += [f"kernel {kernel.name}: {reason}" for reason in reasons]
    return None, why


def _owner(spec: LayerSpec) -> int:
    """Index of the layer whose codes a layer reads."""
    return spec.index if spec.kv_source is None else spec.kv_source


def has_sink_queries(retention: Retention) -> bool:
    return retention.sink_position(np.zeros(1, dtype=np.int64)) is not None


def _spans(numbers: list[int]) -> str:
    """Layer numbers as a person writes them: [0, 1, 2, 5] -> "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"


def _planes(codec: Codec, dim: int, shape, model_dtype: str, device) -> dict[str, torch.Tensor]:
    blocks, slots, heads = shape
    return {
        name: torch.empty(
            (blocks, slots // codec.group if plane.per == "group" else slots, heads, *plane.shape),
            dtype=getattr(torch, plane.resolved(model_dtype)),
            device=device,
        )
        for name, plane in codec.planes(dim).items()
    }
