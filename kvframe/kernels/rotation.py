"""Turning queries: the second query, with which a token looks at the sinks from another position than its own.

Rotary embeddings turn pair i of a query at position p by the angle `p * inv_freq[i]`, and of a key in the same way, so
that their product depends on the distance only (Su et al., RoFormer, arXiv:2104.09864). A query that was turned for
position p and is to stand at position t is turned by the difference:

    angle_i = fl32(t * inv_freq_i) - fl32(p * inv_freq_i)         fl32: rounded as the model computed it, in float32

Where t = p the angle is 0, and the second query is the first one bit by bit.

Shape legend: T tokens of the step, Hq query heads, Dk size, n pairs.
"""

from __future__ import annotations

import numpy as np
import torch

from kvframe.types import Rotary, StepPlan


def turns(q_pos: np.ndarray, target: np.ndarray, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """`(cos, sin)`, float32 [T, n], of the turns from positions `q_pos [T]` to `target [T]`."""
    inv_freq = np.array(rotary.inv_freq, dtype=np.float32)
    now, then = (p.astype(np.float32)[:, None] * inv_freq for p in (q_pos, target))  # [T, n]
    angle = then.astype(np.float64) - now
    return torch.from_numpy(np.cos(angle).astype(np.float32)), torch.from_numpy(np.sin(angle).astype(np.float32))


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """`x [T, H, Dk]` with its pairs turned: (a, b) -> (a cos - b sin, b cos + a sin), in float32 `[T, n]`."""
    n, start = cos.shape[-1], rotary.start
    a, b = (y.float() for y in pairs(x, n, start, rotary.interleaved))  # [T, H, n]
    out, cos, sin = x.clone(), cos[:, None], sin[:, None]
    first, second = pairs(out, n, start, rotary.interleaved)
    first.copy_(a * cos - b * sin)
    second.copy_(b * cos + a * sin)
    return out


def pairs(x: torch.Tensor, n: int, start: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views `[..., n]` of the first and the second numbers of the pairs of `x [..., Dk]`; see Rotary."""
    turning = x[..., start : start + 2 * n]
    if interleaved:
        return turning[..., 0::2], turning[..., 1::2]
    return turning[..., :n], turning[..., n:]


class SinkQueries:
    """Makes the second queries of a step. Angles are computed once per step and shared by the layers."""

    def __init__(self):
        self._plan: StepPlan | None = None
        self._made: dict = {}

    def __call__(self, q: torch.Tensor, storage, plan: StepPlan) -> torch.Tensor | None:
        """`q [T, Hq, Dk]` -> the queries for the sinks, same shape; None under a rule that has none."""
        if not storage.sink_queries:
            return None
        rotary = storage.spec.rotary
        if not rotary.inv_freq:
            return q
        if self._plan is not plan:
            self._plan, self._made = plan, {}
        key = storage.group, rotary
        if key not in self._made:
            q_pos = np.asarray((plan.host or plan).positions)
            cos, sin = turns(q_pos, storage.retention.sink_position(q_pos), rotary)
            self._made[key] = cos.to(q.device), sin.to(q.device)
        return turn(q, *self._made[key], rotary)
