"""A step of one layer, built by hand: block tables in any order, storage that is poison wherever nobody may look.

Shape legend: R requests, T tokens of the step, L tokens of one request, C new ones, Hq/Hkv heads, Dk/Dv sizes, S slots
of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvframe.interfaces import Codec, Retention
from kvframe.kernels.reference import ReferenceKernel
from kvframe.storage import POISON, LayerStorage
from kvframe.tails import Tail, by_group, group_slots
from kvframe.testing.definition import attention, seen, stored
from kvframe.testing.parts import Band, Verbatim
from kvframe.types import GroupPlan, LayerSpec, StepPlan


@dataclass
class Step:
    """What a kernel gets.

    Attributes:
        q, k, v: `[T, Hq, Dk]`, `[T, Hkv, Dk]`, `[T, Hkv, Dv]`. second: other queries for the sinks, or None.
        requests: `(L, C)` of each request. texts: all its q, k and v, `[L, H, D]`, on the host.
    """

    storage: LayerStorage
    plan: StepPlan
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    requests: Sequence[tuple[int, int]]
    texts: list[list[torch.Tensor]]
    second: torch.Tensor | None = None

    def run(self, kernel) -> torch.Tensor:
        """Stores and attends: `[T, Hq, Dv]`."""
        kernel.store(self.k, self.v, self.storage, self.plan)
        return self.attend(kernel)

    def attend(self, kernel) -> torch.Tensor:
        return kernel.attend(self.q, self.storage, self.plan, *(() if self.second is None else (self.second,)))

    def wanted(self) -> torch.Tensor:
        """float64 `[T, Hq, Dv]` on the host: what the definition says."""
        outs, at, held, q = [], 0, self.storage, self.q.cpu()
        learned = None if held.learned_sinks is None else held.learned_sinks.cpu()
        for (length, chunk), (_, k, v) in zip(self.requests, self.texts):
            places = np.arange(length - chunk, length)
            k, v = stored(k, held.codec_k, places), stored(v, held.codec_v, places)
            second = None if self.second is None else self.second[at : at + chunk].cpu()
            mask = seen(held.retention, places, length)
            outs.append(attention(q[at : at + chunk], k, v, mask, held.spec, learned, second, held.retention.sinks))
            at += chunk
        return torch.cat(outs)

    def holding(self, other: Step) -> Step:
        """`other`, a step of the same sizes, in the memory of this one: its plan and tensors stay where they are."""
        groups = zip(self.plan.groups, other.plan.groups)
        pairs = [(self.plan, other.plan, ("positions", "query_starts", "rows")), (self, other, ("q", "k", "v"))]
        for mine, its, names in [*pairs, *((a, b, ("slots", "tables", "context_lens")) for a, b in groups)]:
            for name in names:
                getattr(mine, name).copy_(getattr(its, name))
        for mine, its in ((self.storage.k, other.storage.k), (self.storage.v, other.storage.v)):
            for name, plane in mine.items():
                plane.copy_(its[name])
        for mine, its in ((self.storage.tail_k, other.storage.tail_k), (self.storage.tail_v, other.storage.tail_v)):
            if mine is not None:
                mine.plane.copy_(its.plane)
        return replace(self, requests=other.requests, texts=other.texts)

    def copy(self) -> Step:
        """The same step with storage of its own."""
        clone, held = lambda planes: {name: plane.clone() for name, plane in planes.items()}, self.storage
        tails = (tail and Tail(tail.plane.clone()) for tail in (held.tail_k, held.tail_v))
        storage = replace(held, **dict(zip(("k", "v", "tail_k", "tail_v"), (clone(held.k), clone(held.v), *tails))))
        return replace(self, storage=storage, q=self.q.clone(), k=self.k.clone(), v=self.v.clone())


def make_spec(q_heads=3, kv_heads=1, k_dim=16, v_dim=16, dtype="float32", **more) -> LayerSpec:
    return LayerSpec(0, q_heads, kv_heads, k_dim, v_dim, more.pop("scale", k_dim**-0.5), dtype=dtype, **more)


def poison(plane: torch.Tensor) -> torch.Tensor:
    """Fills a plane with NaN, or the code that stands for it where there is none."""
    return plane.fill_(POISON.get(plane.dtype, float("nan")))


def make_step(
    spec: LayerSpec,
    requests: Sequence[tuple[int, int]],
    block_size: int = 16,
    rule: Retention | None = None,
    seed: int = 0,
    holes: bool = True,
    codecs: tuple[Codec, Codec] | None = None,
    device: str = "cpu",
    clean: bool = False,
) -> Step:
    """A step of requests `(L, C)`: L tokens after the step, the last C of them new.

    What a request brings depends on its L and the seed only. Slots that no query of the step may see are poison (zeros
    if `clean`), and blocks whose slots are all dead are dropped (`holes`). Under a codec that seals, what is in a full
    group before the step lies in the planes, and the rest in the tails; request r has row r of them.
    """
    rng, rule, codecs = np.random.default_rng(seed), rule or Band(), codecs or (Verbatim(), Verbatim())
    dtype, sizes = getattr(torch, spec.dtype), [-(-length // block_size) for length, _ in requests]
    ids = iter(rng.permutation(sum(sizes)) + 1)
    tables = np.zeros((len(requests), max(sizes)), dtype=np.int32)
    shape = (sum(sizes) + 1, block_size, spec.kv_heads)
    planes = [_empty(codec, dim, shape, spec.dtype, clean) for codec, dim in zip(codecs, (spec.k_dim, spec.v_dim))]
    tails = [
        _tail(codec, len(requests), spec, dim, dtype, clean) for codec, dim in zip(codecs, (spec.k_dim, spec.v_dim))
    ]
    slots, positions, texts = [], [], []
    for r, (length, chunk) in enumerate(requests):
        tables[r, : sizes[r]] = [next(ids) for _ in range(sizes[r])]
        p, past = np.arange(length), length - chunk
        where = tables[r, p // block_size].astype(np.int64) * block_size + p % block_size
        texts.append(_text(spec, length, seed, dtype))
        dead = np.asarray(rule.dead(0, length, past))
        alive = torch.from_numpy(np.flatnonzero(~dead[:past]))
        for codec, held, tail, x in zip(codecs, planes, tails, texts[r][1:]):
            if tail is not None:
                seal(codec, held, x, np.flatnonzero(~dead[:past]), tables[r], past, block_size)
                tail.plane[r, : past % codec.group] = x[past // codec.group * codec.group : past]
                continue
            for name, code in codec.encode(x[alive]).items():
                view = held[name].view(-1, *held[name].shape[2:])
                view[torch.from_numpy(where)[alive]] = code.to(view.dtype)
        for b in range(sizes[r]):
            if holes and dead[b * block_size : (b + 1) * block_size].all():
                tables[r, b] = 0
        slots.append(where[past:])
        positions.append(p[past:])
    new = [chunk for _, chunk in requests]
    host = StepPlan(
        np.concatenate(positions), np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        (GroupPlan(np.concatenate(slots), tables, np.array([n for n, _ in requests], dtype=np.int32)),),
        np.arange(len(requests), dtype=np.int32), (), max(new), max(n for n, _ in requests),
    )  # fmt: skip
    learned = torch.from_numpy(rng.normal(size=spec.q_heads)).float().to(device) if spec.sinks else None
    planes = [{name: plane.to(device) for name, plane in held.items()} for held in planes]
    tails = [tail and Tail(tail.plane.to(device)) for tail in tails]
    storage = LayerStorage(spec, rule, 0, *codecs, *planes, block_size, ReferenceKernel(), learned, *tails)
    parts = [[x[length - chunk :] for x in text] for text, (length, chunk) in zip(texts, requests)]
    q, k, v = (torch.cat([part[i] for part in parts]).to(device) for i in range(3))
    return Step(storage, _moved(host, device), q, k, v, list(requests), texts)


def seal(codec: Codec, planes: dict, x: torch.Tensor, alive: np.ndarray, table, past: int, block_size: int) -> None:
    """Encodes the full groups among the first `past` tokens of `x [L, Hkv, D]` in which something is alive."""
    size = codec.group
    for start in np.unique(alive[alive < past // size * size] // size * size).tolist():
        (where,) = group_slots(table, start, start + size, size, block_size)
        for name, code in codec.encode(x[None, start : start + size]).items():
            view, count = by_group(planes[name], codec, name, x.shape[-1], block_size)
            view[where // count, where % count] = code[0].to(planes[name].dtype)


def _empty(codec: Codec, dim: int, shape: tuple[int, ...], model_dtype: str, clean: bool) -> dict[str, torch.Tensor]:
    found, (blocks, slots, heads) = {}, shape
    for name, plane in codec.planes(dim).items():
        entries = slots // codec.group if plane.per == "group" else slots
        made = torch.zeros(blocks, entries, heads, *plane.shape, dtype=getattr(torch, plane.resolved(model_dtype)))
        found[name] = made if clean else poison(made)
    return found


def _tail(codec: Codec, rows: int, spec: LayerSpec, dim: int, dtype: torch.dtype, clean: bool) -> Tail | None:
    tail = Tail.allocate(codec, rows, spec.kv_heads, dim, dtype, "cpu")
    if tail is not None:
        tail.plane.zero_() if clean else poison(tail.plane)
    return tail


def _text(spec: LayerSpec, length: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draws = np.random.default_rng([seed, length])
    shapes = ((spec.q_heads, spec.k_dim), (spec.kv_heads, spec.k_dim), (spec.kv_heads, spec.v_dim))
    return [torch.from_numpy(draws.normal(size=(length, *shape))).to(dtype) for shape in shapes]


def _moved(host: StepPlan, device: str) -> StepPlan:
    """The plan as tensors."""
    move = lambda array: torch.from_numpy(array).to(device)
    groups = tuple(GroupPlan(move(g.slots), move(g.tables), move(g.context_lens)) for g in host.groups)
    return replace(
        host, positions=move(host.positions), query_starts=move(host.query_starts), rows=move(host.rows),
        groups=groups, host=host,
    )  # fmt: skip
