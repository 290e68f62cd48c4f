"""A KVCache that is no BlockKVCache: a dict of tensors per request. The slowest right one; it shares nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvframe.errors import CapacityError
from kvframe.interfaces import CacheContext, KVCache
from kvframe.types import CacheStats, GroupStats, StepPlan


@dataclass
class Row:
    """One request: stored tokens, tokens with room, and per layer k and v, `[n, Hkv, D]`."""

    length: int = 0
    room: int = 0
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class DictCache(KVCache):
    """Room for `size` tokens in all."""

    def __init__(self, context: CacheContext, size: int = 140):
        self.context, self.size, self.rows = context, size, {}
        self.bytes = sum(
            layer.kv_heads * (layer.k_dim + layer.v_dim) * 4 for layer in context.layers if layer.kv_source is None
        )
        self.peak = 0

    def capacity(self):
        return min(self.size, self.context.max_len)

    @property
    def taken(self):
        return sum(row.room for row in self.rows.values())

    def peek(self, request):
        return 0, 0

    def admit(self, request):
        if len(self.rows) == self.context.max_requests or self.taken + len(request.tokens) > self.size:
            return None
        self.rows[request.id] = Row()
        return 0

    def grow(self, request, n):
        row = self.rows[request.id]
        more = max(row.length + n - row.room, 0)
        if self.taken + more > self.size:
            return False
        row.room += more
        self.peak = max(self.peak, self.taken)
        return True

    def commit(self, request, n):
        self.rows[request.id].length += n

    def release(self, request):
        del self.rows[request.id]

    def fork(self, parent, child):
        row = self.rows[parent.id]
        if len(self.rows) == self.context.max_requests or self.taken + row.length > self.size:
            raise CapacityError("no room for a fork")
        self.rows[child.id] = Row(row.length, row.length, dict(row.kv))
        self.peak = max(self.peak, self.taken)

    def truncate(self, request, length):
        row = self.rows[request.id]
        row.length = min(length, row.length)
        row.room = row.length
        return row.length

    def reset(self):
        self.rows.clear()
        self.peak = 0

    def invalidate(self):
        pass

    def stats(self):
        used = sum(row.length for row in self.rows.values()) * self.bytes
        layers = sum(layer.kv_source is None for layer in self.context.layers)
        group = GroupStats(
            "all", layers, 1, self.size, self.bytes, self.taken * self.bytes, used, 0, 0, self.peak * self.bytes
        )
        return CacheStats((group,))

    def tensors(self):
        return (x for row in self.rows.values() for kv in row.kv.values() for x in kv)

    def check(self):
        assert self.taken <= self.size
        assert all(row.length <= row.room for row in self.rows.values())

    def plan(self, batch):
        self.batch = [(self.rows[request.id], n) for request, n in batch]
        positions = np.concatenate([np.arange(row.length, row.length + n) for row, n in self.batch])
        starts = np.cumsum([0, *(n for _, n in self.batch)])
        longest = max(row.length + n for row, n in self.batch)
        rows = np.arange(len(self.batch))
        return StepPlan(torch.from_numpy(positions), starts, (), rows, (), int(np.diff(starts).max()), longest)

    def attend(self, layer, q, k, v, plan):
        spec, outs = self.context.layers[layer], []
        for (row, n), start in zip(self.batch, plan.query_starts):
            own = slice(start, start + n)
            if spec.kv_source is None:
                old = row.kv.get(layer, (k[:0], v[:0]))
                row.kv[layer] = tuple(torch.cat([x[: row.length], y[own]]) for x, y in zip(old, (k, v)))
            keys, values = row.kv[layer if spec.kv_source is None else spec.kv_source]
            outs.append(self._one(spec, q[own], keys, values, torch.arange(row.length, row.length + n)))
        return torch.cat(outs)

    def _one(self, spec, q, k, v, at):
        share, j = spec.q_heads // spec.kv_heads, torch.arange(len(k))
        seen = (j <= at[:, None]) & (at[:, None] - j < (spec.window or len(k)))
        scores = torch.einsum("chd,lhd->hcl", q, k.repeat_interleave(share, 1)) * spec.scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hcl,lhd->chd", weights, v.repeat_interleave(share, 1))
