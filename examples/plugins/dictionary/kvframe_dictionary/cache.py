"""Dictionary: a whole KV cache of its own. Keys and values of a request are tensors in a dict, and grow by torch.cat.

Shape legend: T tokens of the step, Hq/Hkv query/KV heads, Dk/Dv sizes; of one request: C new tokens, L stored ones.
"""

import numpy as np
import torch

from kvframe.errors import CapacityError, OptionError
from kvframe.interfaces import KVCache
from kvframe.kernels.reference import attend_one
from kvframe.types import ITEMSIZE, CacheStats, GroupStats, StepPlan


class Dictionary(KVCache):
    """Nothing is shared, found again or evicted. A request reserves the tokens that exist when it is admitted.

    `context` has the model's layers and the limits (a CacheContext); `tokens`: how many all requests may hold.
    """

    def __init__(self, context, tokens: int = 65536):
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise OptionError("tokens", tokens, options=["an integer >= 1"], fix="{name}=65536")
        own = [layer for layer in context.layers if layer.kv_source is None]
        self.context, self.tokens = context, tokens
        self.token_bytes = sum(y.kv_heads * (y.k_dim + y.v_dim) * ITEMSIZE[y.dtype] for y in own)
        self.reset()

    def capacity(self):
        return min(self.tokens, self.context.max_len)

    def peek(self, request):
        return 0, 0

    def admit(self, request):
        if len(self.length) == self.context.max_requests or not self._take(request.id, len(request.tokens)):
            return None
        self.length[request.id], self.stored[request.id] = 0, {}
        return 0

    def grow(self, request, n):
        return self._take(request.id, self.length[request.id] + n)

    def _take(self, id: str, tokens: int) -> bool:
        """Reserves as many tokens for a request, unless there is no room."""
        more = tokens - self.reserved.get(id, 0)
        if more > self.tokens - sum(self.reserved.values()):
            return False
        self.reserved[id] = self.reserved.get(id, 0) + max(more, 0)
        self.peak = max(self.peak, sum(self.reserved.values()))
        return True

    def commit(self, request, n):
        self.length[request.id] += n

    def release(self, request):
        del self.length[request.id], self.reserved[request.id], self.stored[request.id]

    def fork(self, parent, child):
        if len(self.length) == self.context.max_requests or not self._take(child.id, self.length[parent.id]):
            raise CapacityError("fork: there is no room for the child")
        self.length[child.id] = self.length[parent.id]
        self.stored[child.id] = dict(self.stored[parent.id])  # tensors are never written to, so both may hold them

    def truncate(self, request, length):
        kept = min(length, self.length[request.id])
        self.length[request.id] = self.reserved[request.id] = kept
        return kept

    def reset(self):
        self.length: dict[str, int] = {}  # request -> tokens that are computed
        self.reserved: dict[str, int] = {}  # request -> tokens for which there is room
        self.stored: dict[str, dict] = {}  # request -> layer -> (k [L, Hkv, Dk], v [L, Hkv, Dv])
        self.peak = 0

    def invalidate(self):
        pass  # nothing outlives its request

    def stats(self):
        size, layers = self.token_bytes, len(self.context.layers)
        held, used, peak = (n * size for n in (sum(self.reserved.values()), sum(self.length.values()), self.peak))
        return CacheStats((GroupStats("all", layers, 1, self.tokens, size, held, used, 0, 0, peak),), peak=peak)

    def check(self):
        assert set(self.length) == set(self.reserved) == set(self.stored), "a request is known in one place only"
        assert all(n <= self.reserved[id] for id, n in self.length.items()), "more is stored than was reserved"
        assert sum(self.reserved.values()) <= self.tokens, "more is reserved than there is"

    def plan(self, batch):
        lengths = [self.length[request.id] for request, _ in batch]
        starts = np.cumsum([0, *(n for _, n in batch)], dtype=np.int32)
        self.rows = [(request.id, start, n) for (request, n), start in zip(batch, lengths)]
        positions = np.concatenate([np.arange(start, start + n) for _, start, n in self.rows])  # [T]
        positions = torch.from_numpy(positions).to(self.context.device)
        most = max(n for _, n in batch), max(start + n for _, start, n in self.rows)
        return StepPlan(positions, starts, (), np.arange(len(batch)), (), *most)

    def attend(self, layer, q, k, v, plan):
        """`q [T, Hq, Dk]`, `k [T, Hkv, Dk]`, `v [T, Hkv, Dv]` -> `[T, Hq, Dv]`; reads what it has just stored too."""
        spec, at = self.context.layers[layer], 0
        sinks, out = (self.context.learned_sinks or {}).get(layer), q.new_empty(*q.shape[:2], spec.v_dim)
        for id, start, n in self.rows:
            new, mine = slice(at, at + n), self.stored[id]
            if spec.kv_source is None:
                old = mine.get(layer, (k[:0], v[:0]))
                mine[layer] = tuple(torch.cat([x[:start], y[new]]) for x, y in zip(old, (k, v)))
            keys, values = mine[layer if spec.kv_source is None else spec.kv_source]  # [L, Hkv, D]
            q_pos = torch.arange(start, start + n, device=q.device)[:, None]  # [C, 1]
            k_pos = torch.arange(len(keys), device=q.device)
            mask = (k_pos <= q_pos) & (q_pos - k_pos < (spec.window or len(keys) + 1))  # [C, L]
            mask &= True if spec.chunk is None else q_pos // spec.chunk == k_pos // spec.chunk
            out[new] = attend_one(q[new], keys.float(), values.float(), mask, spec, sinks)
            at += n
        return out
