"""Attention and packed products as operators that torch.compile does not look into.

Each layer's attention is one call of `kvframe::attend`, which finds the running step by a number. It writes keys and
values into pools that the graph does not know; what keeps the order is that each layer's q, k and v come from the
output of the layer before, and that the output is always used. Products of linear layers (see kvframe.hf.linear) are
calls of `kvframe::multiply`, for the same reason.

Shape legend: T tokens of a flat step, Hq/Hkv query/KV heads, Dk/Dv key/value size.
"""

from __future__ import annotations

import torch

from kvframe.hf.opaque import PRODUCTS, RUNNING


@torch.library.custom_op("kvframe::attend", mutates_args=())
def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, running: int, v_dim: int
) -> torch.Tensor:
    """`q [1, Hq, T, Dk]`, `k [1, Hkv, T, Dk]`, `v [1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`.

    Args:
        layer: index among the model's attention layers. running: number of what they share. v_dim: Dv.
    """
    now = RUNNING[running]
    out = now.cache.attend(layer, q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), now.plan)
    return out.unsqueeze(0).contiguous()


@attend.register_fake
def _(q, k, v, layer, running, v_dim):
    return q.new_empty(1, q.shape[2], q.shape[1], v_dim)


@torch.library.custom_op("kvframe::multiply", mutates_args=())
def multiply(x: torch.Tensor, number: int, outputs: int) -> torch.Tensor:
    """`x [..., I]` -> `[..., outputs]` by the product of this number."""
    return PRODUCTS[number].multiply(x)


@multiply.register_fake
def _(x, number, outputs):
    return x.new_empty(*x.shape[:-1], outputs)
