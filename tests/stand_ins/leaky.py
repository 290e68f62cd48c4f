"""Attention over pages as such libraries compute it: what is masked is multiplied by 0, not left out.

Shape legend: C queries of one request, L slots of its pages, Hq/Hkv query/KV heads, D size of a head.
"""

from __future__ import annotations

import torch


def attend(q, k, v, length: int, scale: float, causal: bool = True, left: int = -1, softcap: float = 0.0):
    """`q [C, Hq, D]`, `k` and `v [L, Hkv, D]`, of which the first `length` are tokens -> `[C, Hq, D]`.

    Query i stands at `length - C + i`. causal: it sees nothing behind. left: so many keys before it; -1: all.
    Scores are replaced where they are masked; of V everything in the pages takes part, as in the least careful of the
    implementations.
    """
    assert 1 <= len(q) <= length <= len(k) == len(v)
    each = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(each, 1) for x in (k, v))
    scores = torch.einsum("chd,lhd->hcl", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(length - len(q), length)[:, None]
    key = torch.arange(len(k))[None, :]
    seen = key < length
    if causal:
        seen = seen & (key <= place)
    if left >= 0:
        seen = seen & (key >= place - left)
    weights = torch.softmax(torch.where(seen, scores, float("-inf")), -1)
    return torch.einsum("hcl,lhd->chd", weights, v).to(q.dtype)  # 0 x NaN is NaN
