"""The plain kernel: reads like the definition of attention, runs everywhere, always right.

Every other kernel is held to this one by tests.

Shape legend: T tokens of the step, R requests, S block_size, Hq/Hkv query/KV heads, Dk/Dv sizes,
L tokens of one request in its table, C new tokens of one request.
"""

from __future__ import annotations

import numpy as np
import torch

from kvframe.interfaces import Codec, Kernel, Retention
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec, StepPlan


class ReferenceKernel(Kernel):
    """Gathers, decodes, masks with `retention.visible`, and attends, one request after the other."""

    name = "reference"
    sink_queries = True

    def unsupported(
        self, layer: LayerSpec, codecs: tuple[Codec, Codec], retention: Retention, device: str
    ) -> list[str]:
        return []

    def store(self, k: torch.Tensor, v: torch.Tensor, storage: LayerStorage, plan: StepPlan) -> None:
        slots = plan.groups[storage.group].slots  # [T]
        for codec, planes, x in ((storage.codec_k, storage.k, k), (storage.codec_v, storage.v, v)):
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
            slots = torch.from_numpy(slots[used]).to(q.device)
            mask = torch.from_numpy(np.ascontiguousarray(visible[:, used])).to(q.device)
            k = gather(storage.codec_k, storage.k, slots, torch.float32)  # [L, Hkv, Dk]
            v = gather(storage.codec_v, storage.v, slots, torch.float32)  # [L, Hkv, Dv]
            second = None
            if sink_q is not None:
                second = sink_q[start:stop], torch.from_numpy(k_pos[used] < storage.retention.sinks).to(q.device)
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


def attend_one(q, k, v, mask, spec: LayerSpec, learned_sinks=None, second=None) -> torch.Tensor:
    """Attention of one request in fp32: `q [C, Hq, Dk]`, `k [L, Hkv, Dk]`, `v [L, Hkv, Dv]`, `mask [C, L]`.

    `second` is `(sink_q [C, Hq, Dk], bool [L])`: other queries, and the keys that they meet.

    A learned sink is one more score per head that takes part in the softmax and has no value
    (gpt-oss). softcap: `s = c * tanh(s / c)` (Gemma 2).
    """
    C, Hq, _ = q.shape
    scores = score(q, k, spec)  # [Hkv, Hq/Hkv, C, L]
    if second is not None:
        scores = torch.where(second[1], score(second[0], k, spec), scores)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if learned_sinks is not None:
        sink = learned_sinks.float().reshape(spec.kv_heads, -1, 1, 1).expand(-1, -1, C, 1)
        p = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        p = torch.softmax(scores, dim=-1)
    return torch.einsum("hgcl,lhd->chgd", p, v).reshape(C, Hq, -1).to(q.dtype)


def score(q, k, spec: LayerSpec) -> torch.Tensor:
    """`q [C, Hq, Dk]`, `k [L, Hkv, Dk]` -> scaled products `[Hkv, Hq / Hkv, C, L]` in fp32."""
    queries = q.float().reshape(q.shape[0], spec.kv_heads, q.shape[1] // spec.kv_heads, -1)
    return torch.einsum("chgd,lhd->hgcl", queries, k) * spec.scale
