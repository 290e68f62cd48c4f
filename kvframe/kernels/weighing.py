"""Values weighed by what each query makes of them, where some queries may not see all values.

The softmax gives a value that a query may not see the weight 0. In a product that is enough while numbers are finite,
but `0 * NaN` and `0 * inf` are NaN: one token whose values overflowed would spoil every query of the chunk, also those
before it, and the answer would depend on how the prompt is cut.

Shape legend: C queries, L values, Hkv KV heads, G query heads of each, Dv size.
"""

from __future__ import annotations

import math

import torch


def harmless(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a mask may be added to scores of `k`, and zeros be multiplied by `v`: all is finite, the scores too. Both
    are read once: what is not finite makes a sum that is not. Also False where finite numbers have such a sum."""
    k = k.flatten()
    return math.isfinite(torch.dot(k, k)) and math.isfinite(v.sum())


def weigh(p: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`sum over l of p[.., c, l] * v[l]`, over the l that c sees: `p [Hkv, G, C, L]` (0 where it does not), `v [Hkv, L,
    Dv]`, `mask bool [C, L]` -> `[Hkv, G, C, Dv]`.

    The product gets zeros for what is not finite, and who sees such a number gets it added. For queries that see finite
    numbers only this is the plain product, bit by bit.
    """
    out = (p.flatten(1, 2) @ v.where(v.isfinite(), 0.0)).unflatten(1, p.shape[1:3])
    for number, there in ((math.inf, v == math.inf), (-math.inf, v == -math.inf), (math.nan, v.isnan())):
        if there.any():
            seen = mask.to(out.dtype) @ there.to(out.dtype) > 0  # [Hkv, C, Dv]
            out += torch.where(seen, number, 0.0).unsqueeze(1).to(out.dtype)
    return out
