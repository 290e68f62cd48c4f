"""Attention written down plainly, in float64: what every kernel and every cache is held to.

    s_j = scale * q . k_j,  softcap: s_j = c * tanh(s_j / c),  out = sum_j softmax(s)_j v_j over the j that q may see

A learned sink is one more score per query head, without a value. Nothing of kvframe's kernels is used here.

Shape legend: C queries of one request, L keys, Hq/Hkv query/KV heads, Dk/Dv sizes, n vectors.
"""

from __future__ import annotations

import numpy as np
import torch

from kvframe.interfaces import Codec
from kvframe.types import LayerSpec

ODD = np.random.default_rng(1).integers(1, 1 << 62, 256) * 2 + 1


def attention(q, k, v, mask, spec: LayerSpec, learned=None, second=None, sinks: int = 0) -> torch.Tensor:
    """`q [C, Hq, Dk]`, `k` and `v [L, Hkv, D]` (or `[C, L, Hkv, D]`: what each query sees) -> float64 `[C, Hq, Dv]`.

    Args:
        mask: bool [C, L], may the query see the key? What nobody sees may be NaN.
        learned: [Hq] learned sink logits, or None.
        second: [C, Hq, Dk], the queries that meet the first `sinks` keys, or None.
    """
    k, v = (x.double() if x.dim() == 4 else x.double()[None].expand(len(q), *x.shape) for x in (k, v))
    k, v = (
        x.masked_fill(~mask[..., None, None], 0.0).repeat_interleave(spec.q_heads // spec.kv_heads, 2) for x in (k, v)
    )
    scores = torch.einsum("chd,clhd->hcl", q.double(), k) * spec.scale
    if second is not None:
        others = torch.einsum("chd,clhd->hcl", second.double(), k) * spec.scale
        scores = torch.where(torch.arange(k.shape[1]) < sinks, others, scores)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if learned is not None:
        scores = torch.cat([scores, learned.double()[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("hcl,clhd->chd", weights, v)


def seen(rule, q_pos: np.ndarray, length: int) -> torch.Tensor:
    """bool `[C, length]`: what queries at `q_pos [C]` see under a retention."""
    mask = rule.visible(q_pos[:, None], np.arange(length)[None, :])
    return torch.from_numpy(np.array(np.broadcast_to(mask, (len(q_pos), length)), dtype=bool))


def coded(x: torch.Tensor, codec: Codec) -> torch.Tensor:
    """`x [L, Hkv, D]` as codes give it back; what is in no full group is NaN."""
    out, group = torch.full_like(x, float("nan"), dtype=torch.float32), codec.group
    stop = len(x) // group * group
    if stop:
        parts = x[:stop].unflatten(0, (-1, group)) if group > 1 else x
        out[:stop] = codec.decode(codec.encode(parts), torch.float32).reshape(stop, *x.shape[1:])
    return out


def stored(x: torch.Tensor, codec: Codec, q_pos: np.ndarray) -> torch.Tensor:
    """`x [L, Hkv, D]` as queries at `q_pos [C]` see it, `[C, L, Hkv, D]`: their own group in full precision when the
    codec seals, all else as codes."""
    own = (q_pos[:, None] // codec.group == np.arange(len(x)) // codec.group) & (codec.group > 1)
    return torch.where(torch.from_numpy(own)[..., None, None], x[None].float(), coded(x, codec)[None])


def vectors(values: np.ndarray, heads: int, dim: int, salt: int) -> torch.Tensor:
    """float32 `[n, heads, dim]` in [-2, 2): numbers that depend on `values` (int64 [n]) and the salt only."""
    mixed = (values[:, None] ^ np.int64(salt * 7919)) * ODD[: heads * dim]  # wraps around
    return torch.from_numpy((mixed >> 20).astype(np.float64) / 2.0**42).float().view(-1, heads, dim)


def qkv(layer: LayerSpec, values: np.ndarray) -> list[torch.Tensor]:
    """q, k and v of a layer for tokens with these values; layers that share keys and values get the same ones."""
    owner = layer.index if layer.kv_source is None else layer.kv_source
    kinds = ((layer.q_heads, layer.k_dim, layer.index + 50), (layer.kv_heads, layer.k_dim, owner),
             (layer.kv_heads, layer.v_dim, owner + 25))  # fmt: skip
    return [vectors(values, *kind) for kind in kinds]
