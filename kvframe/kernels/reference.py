"""The plain kernel: reads like the definition of attention, runs everywhere, always right.

Every other kernel is held to this one by tests.

Shape legend: T tokens of the step, R requests, S block_size, Hq/Hkv query/KV heads, Dk/Dv sizes,
L tokens of one request in its table, C new tokens of one request, O of the L that are in a group which was open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kvframe import tails
from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.kernels.weighing import weigh
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan


class ReferenceKernel(Kernel):
    """Gathers, decodes, masks with `retention.visible`, and attends, one request after the other."""

    name = "reference"
    sink_queries = True
    sealing = True

    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str, block_size: int
    ) -> list[str]:
        return []

    def store(self, k: torch.Tensor, v: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> None:
        slots = plan.groups[storage.group].slots  # [T]
        for codec, planes, tail, x in (
            (storage.codec_k, storage.k, storage.tail_k, k),
            (storage.codec_v, storage.v, storage.tail_v, v),
        ):
            if tail is not None:
                tails.store(x, codec, planes, tail, plan, storage.group, storage.block_size)
                continue
            for name, code in codec.encode(x).items():  # code [T, Hkv, ...]
                planes[name].view(-1, *planes[name].shape[2:])[slots] = code.to(planes[name].dtype)

    def attend(
        self, q: torch.Tensor, storage: LayerStorage, plan: StepPlan, sink_q: torch.Tensor | None = None
    ) -> torch.Tensor:
        host, group = plan.host, plan.host.groups[storage.group]
        out = q.new_empty(q.shape[0], q.shape[1], storage.spec.v_dim)  # [T, Hq, Dv]
        for r in range(len(host.query_starts) - 1):
            start, stop = int(host.query_starts[r]), int(host.query_starts[r + 1])
            k_pos, slots = live_slots(group.tables[r], int(group.context_lens[r]), storage.block_size)
            visible = storage.retention.visible(host.positions[start:stop, None], k_pos[None, :])  # [C, L]
            used = np.asarray(visible).any(axis=0)  # a dead slot is never read: it may hold anything
            k_pos, slots, visible = k_pos[used], slots[used], np.ascontiguousarray(visible[:, used])
            mask = torch.from_numpy(visible).to(q.device)
            seen = host.positions[start:stop], k_pos, slots, visible
            k = read(storage.codec_k, storage.k, storage.tail_k, storage.spec.k_dim, storage, plan, r, *seen)
            v = read(storage.codec_v, storage.v, storage.tail_v, storage.spec.v_dim, storage, plan, r, *seen)
            second = None
            if sink_q is not None:
                second = sink_q[start:stop], torch.from_numpy(k_pos < storage.retention.sinks).to(q.device)
            out[start:stop] = attend_one(q[start:stop], k, v, mask, storage.spec, storage.learned_sinks, second)
        return out


def live_slots(table: np.ndarray, length: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions whose block still exists, and their slots.

    With block_size 4, table [7, 0, 3] and length 10:

        position  0  1  2  3 | 4 5 6 7 |  8  9
        slot     28 29 30 31 | dropped | 12 13
    """
    positions = np.arange(length)
    blocks = table[positions // block_size].astype(np.int64)
    alive = blocks != 0
    return positions[alive], (blocks * block_size + positions % block_size)[alive]


def gather(codec: Codec, planes: dict, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decoded vectors `[L, Hkv, D]` of the given slots."""
    flat = {name: plane.view(-1, *plane.shape[2:])[slots] for name, plane in planes.items()}
    return codec.decode(flat, dtype)


@dataclass
class Open:
    """K or V of one request under a codec that seals: what every query sees as codes, and what its own group gives.

    Attributes:
        codes: [L, Hkv, D]; zeros where no query of the step sees the codes.
        raw: [O, Hkv, D], the last O of the L tokens in full precision; O is 0 when no query sees its own group.
        own: bool [C, O]: key and query are of one group.
    """

    codes: torch.Tensor
    raw: torch.Tensor
    own: torch.Tensor


def read(codec, planes, tail, dim, storage, plan, r, q_pos, k_pos, slots, visible) -> torch.Tensor | Open:
    """K or V of request r in fp32: `[L, Hkv, D]`, or an Open when the codec seals.

    Args:
        q_pos: [C] positions of the queries. k_pos, slots: [L] of the keys. visible: bool [C, L].
    """
    device = next(iter(planes.values())).device
    if tail is None:
        return gather(codec, planes, torch.from_numpy(slots).to(device), torch.float32)
    group = codec.group
    first = int(q_pos[0]) // group * group  # where the group begins that was open before the step
    own = (q_pos // group)[:, None] == (k_pos // group)[None, :]  # [C, L]
    coded = torch.from_numpy((visible & ~own).any(axis=0)).to(device)
    codes = torch.zeros(len(k_pos), storage.spec.kv_heads, dim, device=device)
    if coded.any():
        where = torch.from_numpy(slots).to(device)[coded]
        codes[coded] = tails.gather(codec, planes, where, dim, storage.block_size, torch.float32)
    at = int(np.searchsorted(k_pos, first))
    raw = tail.of(plan, r)[torch.from_numpy(k_pos[at:] - first).to(device)].float()
    return Open(codes, raw, torch.from_numpy(own[:, at:]).to(device))


def attend_one(q, k, v, mask, spec: LayerSpec, learned_sinks=None, second=None) -> torch.Tensor:
    """Attention of one request in fp32: `q [C, Hq, Dk]`, `k [L, Hkv, Dk]`, `v [L, Hkv, Dv]`, `mask [C, L]`.

    `second` is `(sink_q [C, Hq, Dk], bool [L])`: other queries, and the keys that they meet. k and v may be an Open
    each.

    A learned sink is one more score per head that takes part in the softmax and has no value
    (gpt-oss). softcap: `s = c * tanh(s / c)` (Gemma 2).
    """
    C, Hq, _ = q.shape
    scores = score(q, k.codes if isinstance(k, Open) else k, spec, second)  # [Hkv, Hq/Hkv, C, L]
    if isinstance(k, Open):
        at = scores.shape[-1] - len(k.raw)
        within = None if second is None else (second[0], second[1][at:])
        scores[..., at:] = torch.where(k.own, score(q, k.raw, spec, within), scores[..., at:])
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if learned_sinks is not None:
        sink = learned_sinks.float().reshape(spec.kv_heads, -1, 1, 1).expand(-1, -1, C, 1)
        p = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        p = torch.softmax(scores, dim=-1)
    if isinstance(v, Open):
        at = p.shape[-1] - len(v.raw)
        own = F.pad(v.own, (at, 0))  # [C, L]
        out = weighed(p[..., at:] * v.own, v.raw, mask[:, at:] & v.own) + weighed(p * ~own, v.codes, mask & ~own)
    else:
        out = weighed(p, v, mask)
    return out.permute(2, 0, 1, 3).reshape(C, Hq, -1).to(q.dtype)


def weighed(p, v, mask) -> torch.Tensor:
    """Sums of `v [L, Hkv, Dv]` under weights `p [Hkv, G, C, L]`, 0 where `mask [C, L]` is -> `[Hkv, G, C, Dv]`."""
    v = v.transpose(0, 1)
    if len(mask) == 1 or math.isfinite(v.sum()):  # a single query sees all that it is given
        return torch.einsum("hgcl,hld->hgcd", p, v)
    return weigh(p, v, mask)


def score(q, k, spec: LayerSpec, second=None) -> torch.Tensor:
    """`q [C, Hq, Dk]`, `k [L, Hkv, Dk]` -> scaled products `[Hkv, Hq / Hkv, C, L]` in fp32; `second` as above."""
    queries = q.float().reshape(q.shape[0], spec.kv_heads, q.shape[1] // spec.kv_heads, -1)
    scores = torch.einsum("chgd,lhd->hgcl", queries, k) * spec.scale
    return scores if second is None else torch.where(second[1], score(second[0], k, spec), scores)
