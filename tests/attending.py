"""A shadow that also runs the data plane: every step stores and attends in poisoned storage, and every output is held
against what the rule of sealed and open groups says, computed densely from the request's tokens alone.

Shape legend: L tokens of a request, C of a step, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

import numpy as np
import torch
from shadow import Shadow
from walker import Walked

from kvframe.config import build_cache, compose
from kvframe.interfaces import CacheContext, Codec
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.harness import poison_free
from kvframe.types import LayerSpec

ODD = np.random.default_rng(1).integers(1, 1 << 62, 64) * 2 + 1


def some_layers(windows=(None, 10), sources=(0,)) -> tuple[LayerSpec, ...]:
    """Layers with these windows, and layers that read the keys and values of an earlier one."""
    specs = [LayerSpec(i, 4, 2, 8, 4, 0.4, window=w) for i, w in enumerate(windows)]
    return (*specs, *(LayerSpec(len(specs) + i, 4, 2, 8, 4, 0.4, kv_source=s) for i, s in enumerate(sources)))


def with_storage(overrides, layers=None, **options):
    """A cache with tensors, on the reference kernel."""
    options = {"max_len": 96, "max_requests": 6, "max_step_tokens": 96, "kernels": (ReferenceKernel(),), **options}
    return build_cache(compose(overrides), CacheContext(layers or some_layers(), **options))


def vectors(values: np.ndarray, heads: int, dim: int, salt: int) -> torch.Tensor:
    """`[L, heads, dim]` in [-2, 2): numbers that only depend on a token's shadow value."""
    n = heads * dim
    mixed = (values[:, None] ^ np.int64(salt * 7919)) * ODD[:n]  # wraps around
    return torch.from_numpy((mixed >> 20).astype(np.float64) / 2.0**42).float().view(-1, heads, dim)


def coded(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """`x [L, Hkv, D]` as codes give it back; what is in no full group is NaN."""
    out, group = torch.full_like(x, float("nan")), codec.group
    stop = len(x) // group * group
    if stop:
        parts = x[:stop].unflatten(0, (-1, group)) if group > 1 else x
        out[:stop] = codec.decode(codec.encode(parts), torch.float32).reshape(stop, *x.shape[1:])
    return out


def expected(q, k, v, codecs, rule, scale: float) -> torch.Tensor:
    """`q [C, Hq, Dk]`, the last of the L tokens of `k`, `v [L, Hkv, D]` -> what each query gets, `[C, Hq, Dv]`."""
    keys, share = np.arange(len(k)), q.shape[1] // k.shape[1]
    at = keys[len(k) - len(q) :, None]
    mask = torch.from_numpy(np.array(np.broadcast_to(rule.visible(at, keys), (len(q), len(k)))))
    seen = []
    for x, codec in ((k, codecs[0]), (v, codecs[1])):
        own = torch.from_numpy(at // codec.group == keys // codec.group) & (codec.group > 1)
        both = torch.where(own[..., None, None], x[None], coded(x, codec)[None])  # [C, L, Hkv, D]
        seen.append(both.masked_fill(~mask[..., None, None], 0.0).repeat_interleave(share, 2))
    scores = torch.einsum("qhd,qlhd->hql", q, seen[0]) * scale
    return torch.einsum("hql,qlhd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), seen[1])


class Attending(Shadow):
    """`outputs` counts the vectors that were compared."""

    outputs = 0

    def run(self, plan, batch) -> None:
        super().run(plan.host, batch)
        cache = self.cache
        poison_free(cache)
        spans = [slice(request.computed, request.computed + n) for request, n in batch]
        for layer in cache.storage.layers:
            spec = layer.spec
            owner = cache.storage.layers[spec.kv_source].spec if spec.kv_source is not None else spec
            shapes = ((spec.q_heads, spec.k_dim, spec.index + 50), (spec.kv_heads, spec.k_dim, owner.index),
                      (spec.kv_heads, spec.v_dim, owner.index + 25))  # fmt: skip
            whole = [[vectors(self.values(request), *shape) for shape in shapes] for request, _ in batch]
            q, k, v = (torch.cat([parts[i][span] for parts, span in zip(whole, spans)]) for i in range(3))
            got, at = cache.attend(spec.index, q, k, v, plan), 0
            for (request, n), parts, span in zip(batch, whole, spans):
                stop = request.computed + n
                codecs = layer.codec_k, layer.codec_v
                want = expected(parts[0][span], parts[1][:stop], parts[2][:stop], codecs, layer.retention, spec.scale)
                error = (got[at : at + n] - want).abs().max()
                assert error <= 1e-5, f"{request.id}, layer {spec.index}, {request.computed} + {n}: {float(error)}"
                at += n
                self.outputs += n


def walked(n: int, name="a", seed=0) -> Walked:
    return Walked(name, np.random.default_rng(seed).integers(0, 250, n).astype(np.int32))


class Steps:
    """Drives requests by hand, each step held against the rule."""

    def __init__(self, cache):
        self.cache, self.shadow = cache, Attending(cache)

    def admit(self, request: Walked) -> int:
        request.computed = self.cache.admit(request)
        return request.computed

    def run(self, *batch: tuple[Walked, int]) -> None:
        for request, n in batch:
            assert self.cache.grow(request, n)
        self.shadow.run(self.cache.plan(batch), batch)
        for request, n in batch:
            self.cache.commit(request, n)
            request.computed += n
        self.cache.check()
        for request, _ in batch:
            self.shadow.verify(request)

    def fork(self, parent: Walked, name: str, *ids: int) -> Walked:
        """A child that goes on with tokens of its own."""
        start = parent.tokens[: parent.computed]
        child = Walked(name, np.append(start, np.array(ids, np.int32)), computed=parent.computed)
        self.cache.fork(parent, child)
        return child
