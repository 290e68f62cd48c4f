"""The `cpu` kernel against the reference kernel, on steps that are built by hand.

Shape legend: R requests, T tokens, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from kvframe_plugins.no_codec import NoCodec

from kvframe.interfaces import Retention
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.storage import LayerStorage
from kvframe.types import GroupPlan, LayerSpec, StepPlan

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Band(Retention):
    """`k <= q and (window is None or q - k < window or k < sinks)`."""

    window: int | None = None
    sinks: int = 0
    kernel_mask: bool = True

    def for_layer(self, layer):
        return self

    def visible(self, q_pos, k_pos):
        seen = k_pos <= q_pos
        return seen if self.window is None else seen & ((q_pos - k_pos < self.window) | (k_pos < self.sinks))

    def dead(self, start, stop, num_computed):
        k = np.arange(start, stop)
        return np.zeros(stop - start, bool) if self.window is None else (k <= num_computed - self.window) & (k >= self.sinks)


@dataclass
class Step:
    storage: LayerStorage
    plan: StepPlan
    q: torch.Tensor  # [T, Hq, Dk]
    k: torch.Tensor  # [T, Hkv, Dk]
    v: torch.Tensor  # [T, Hkv, Dv]


def make_spec(q_heads=3, kv_heads=1, k_dim=16, v_dim=16, dtype="float32", **more) -> LayerSpec:
    return LayerSpec(0, q_heads, kv_heads, k_dim, v_dim, more.pop("scale", k_dim**-0.5), dtype=dtype, **more)


def make_step(spec, requests, block_size=16, rule=None, seed=0, holes=True) -> Step:
    """A step of requests `(context, chunk)`: `context` tokens after the step, the last `chunk` of them new.

    Every slot that no query of the step may see is NaN, and blocks of dead slots are dropped (0 in the table).
    """
    rng = np.random.default_rng(seed)
    rule = rule or Band()
    dtype, new = getattr(torch, spec.dtype), [chunk for _, chunk in requests]
    columns = max(-(-context // block_size) for context, _ in requests)
    needed = sum(-(-context // block_size) for context, _ in requests)
    ids = iter(rng.permutation(needed) + 1)
    tables = np.zeros((len(requests), columns), dtype=np.int32)
    slots, positions = [], []
    planes = [torch.full((needed + 1, block_size, spec.kv_heads, d), float("nan")) for d in (spec.k_dim, spec.v_dim)]
    for r, (context, chunk) in enumerate(requests):
        n = -(-context // block_size)
        tables[r, :n] = [next(ids) for _ in range(n)]
        p = np.arange(context)
        where = tables[r, p // block_size].astype(np.int64) * block_size + p % block_size
        dead = rule.dead(0, context, context - chunk)
        past = torch.from_numpy(where[: context - chunk][~dead[: context - chunk]])
        for plane in planes:
            shape = (len(past), *plane.shape[2:])
            values = torch.from_numpy(np.random.default_rng(seed + 1000 + context).normal(size=shape)).float()
            plane.view(-1, *plane.shape[2:])[past] = values
        if holes:
            for b in range(n):
                if dead[b * block_size : (b + 1) * block_size].all():
                    tables[r, b] = 0
        slots.append(where[context - chunk :])
        positions.append(p[context - chunk :])
    host = StepPlan(
        np.concatenate(positions), np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        (GroupPlan(np.concatenate(slots), tables, np.array([c for c, _ in requests], dtype=np.int32)),),
        np.arange(len(requests), dtype=np.int32), (), max(new), max(c for c, _ in requests),
    )  # fmt: skip
    groups = tuple(GroupPlan(*(torch.from_numpy(a) for a in (g.slots, g.tables, g.context_lens))) for g in host.groups)
    plan = replace(host, positions=torch.from_numpy(host.positions), groups=groups, host=host)
    sinks = torch.from_numpy(rng.normal(size=spec.q_heads)).float() if spec.sinks else None
    k, v = ({"payload": plane.to(dtype)} for plane in planes)
    storage = LayerStorage(spec, rule, 0, NoCodec(), NoCodec(), k, v, block_size, ReferenceKernel(), sinks)
    parts = []  # what a request brings depends on the request only
    for context, chunk in requests:
        own = np.random.default_rng(seed + 2000 + context)
        shapes = ((spec.q_heads, spec.k_dim), (spec.kv_heads, spec.k_dim), (spec.kv_heads, spec.v_dim))
        parts.append([torch.from_numpy(own.normal(size=(chunk, *shape))).to(dtype) for shape in shapes])
    return Step(storage, plan, *(torch.cat([p[i] for p in parts]) for i in range(3)))


def attend(kernel, step: Step, planes=None) -> torch.Tensor:
    kernel.store(step.k, step.v, step.storage, step.plan)
    return kernel.attend(step.q, step.storage, step.plan)


def agree(step: Step) -> torch.Tensor:
    """Runs both kernels; the reference in fp32 on the same stored numbers."""
    kernel = CpuKernel()
    assert not kernel.unsupported(step.storage.spec, (NoCodec(), NoCodec()), step.storage.retention, "cpu")
    copy = replace(step.storage, k={n: p.clone() for n, p in step.storage.k.items()},
                   v={n: p.clone() for n, p in step.storage.v.items()})  # fmt: skip
    got = attend(kernel, step)
    ReferenceKernel().store(step.k, step.v, copy, step.plan)
    for mine, theirs in ((step.storage.k, copy.k), (step.storage.v, copy.v)):
        assert torch.equal(mine["payload"].view(torch.uint8), theirs["payload"].view(torch.uint8))
    want = ReferenceKernel().attend(step.q.float(), copy, step.plan)
    assert got.dtype == step.q.dtype and got.shape == want.shape
    limit = TOLERANCE[step.storage.spec.dtype]
    torch.testing.assert_close(got.float(), want, atol=limit, rtol=limit)
    return got


MIXED = [(1, 1), (40, 1), (17, 1), (70, 30), (33, 33), (300, 1), (90, 3), (521, 1), (64, 1)]
RULES = {
    "full": Band(),
    "window": Band(24),
    "sinks": Band(24, 5),
    "wide": Band(300, 4),
    "tiny": Band(1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 64, 256, 600])
@pytest.mark.parametrize("rule", RULES)
def test_mixed_steps(dtype, heads, block_size, rule):
    agree(make_step(make_spec(*heads, dtype=dtype), MIXED, block_size, RULES[rule]))


@pytest.mark.parametrize("dims", [(8, 8), (24, 16), (16, 40), (80, 80), (192, 128)], ids=str)
@pytest.mark.parametrize("extra", [{}, {"softcap": 5.0}, {"sinks": True}, {"softcap": 3.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("rule", ["full", "sinks"])
def test_dims_softcap_and_learned_sinks(dims, extra, rule):
    agree(make_step(make_spec(6, 2, *dims, scale=0.3, **extra), MIXED, 16, RULES[rule], seed=3))
