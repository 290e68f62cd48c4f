"""NaN and infinities in the keys or values of one token: they reach the queries that see this token, and no other.

Shape legend: L tokens of a request, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.int8 import Int8
from kvframe_plugins.no_codec import NoCodec
from test_kernel_codes import CODECS, coded
from test_kernel_cpu import RULES

from kvframe.config import build_cache, compose
from kvframe.interfaces import CacheContext
from kvframe.kernels import cpu_prefill
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.steps import make_spec, make_step
from kvframe.testing.walked import Walked
from kvframe.types import LayerSpec, Rotary

L, AT, WINDOW, SINKS = 90, 40, 24, 3
LAYERS = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "learned sinks": {"sinks": True},
    "sizes": {"k_dim": 24},
    "turned sinks": {"rotary": Rotary((1.0, 0.3, 0.1, 0.01, 0.02, 0.03, 0.04, 0.05))},
}
KERNELS = {"reference": ReferenceKernel, "cpu": CpuKernel}
CASES = [(kernel, "none", layer) for kernel in KERNELS for layer in LAYERS]
CASES += [(kernel, codec, layer) for kernel in KERNELS for codec in ("int8", "fp8") for layer in ("plain", "softcap")]
CASES += [("reference", "int4", layer) for layer in ("sizes", "learned sinks")]
WILD = (math.nan, math.inf, -math.inf)
WHOLE, CUT, MIXED = (L,), (25, 18, 47), (30, 7, 1, 52)


@cache
def config(codec: str, window: bool, turned: bool):
    rule = []
    if window:
        rule = ["cache/retention=sliding_window", f"cache.retention.window={WINDOW}", f"cache.retention.sinks={SINKS}"]
        rule += ["cache.retention.positions=cache"] * turned
    return compose(["cache=paged", f"cache/codec={codec}", "cache.layout.block_size=32", "cache.num_blocks=8", *rule])


class Run:
    """One layer of a cache, and what a request of L tokens brings."""

    def __init__(self, kernel: str, codec: str, layer: str, window: bool):
        spec = LayerSpec(0, 6, 2, **{"k_dim": 16, "v_dim": 16, "scale": 0.3, **LAYERS[layer]})
        draw = torch.Generator().manual_seed(0)
        learned = {0: torch.randn(6, generator=draw)} if spec.sinks else None
        kernels = (KERNELS[kernel](),)
        context = CacheContext((spec,), max_len=96, max_step_tokens=96, kernels=kernels, learned_sinks=learned)
        self.cache = build_cache(config(codec, window, layer == "turned sinks"), context)
        shapes = (6, spec.k_dim), (2, spec.k_dim), (2, spec.v_dim)
        self.q, self.k, self.v = (torch.randn(L, *shape, generator=draw) for shape in shapes)

    def of(self, chunks, wild=None, kind="v") -> torch.Tensor:
        """The outputs `[L, Hq, Dv]`; `wild` stands in one channel of head 1 of the token AT."""
        x = {"k": self.k.clone(), "v": self.v.clone()}
        if wild is not None:
            x[kind][AT, 1, 5] = wild
        request, parts = Walked("a", np.arange(L, dtype=np.int32)), []
        request.computed = self.cache.admit(request)
        for n in chunks:
            assert self.cache.grow(request, n)
            span = slice(request.computed, request.computed + n)
            plan = self.cache.plan([(request, n)])
            parts.append(self.cache.attend(0, self.q[span], x["k"][span], x["v"][span], plan))
            self.cache.commit(request, n)
            request.computed += n
        self.cache.release(request)
        return torch.cat(parts)


@pytest.mark.parametrize("kernel, codec, layer", CASES)
def test_who_does_not_see_a_token_is_not_spoiled_by_it(kernel, codec, layer):
    """Neither the queries before it, in its chunk and in others, nor those whose window has left it behind."""
    for window in (True,) if layer == "turned sinks" else (False, True):
        run = Run(kernel, codec, layer, window)
        blind = np.arange(L) < AT
        if window and codec != "int4":  # where the tokens of a group are encoded together, they are spoiled together
            blind |= np.arange(L) >= AT + WINDOW
        for chunks in (WHOLE, CUT, MIXED):
            clean = run.of(chunks)
            assert clean.isfinite().all()
            for kind in "kv":
                for wild in WILD:
                    got = run.of(chunks, wild, kind)
                    assert torch.equal(got[blind], clean[blind]), (chunks, kind, wild)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_who_sees_it_answers_the_same_however_the_prompt_is_cut(kernel, layer):
    """A NaN shows; an infinite value is an infinite output; and what a query gets does not depend on its chunk."""
    for window in (True,) if layer == "turned sinks" else (False, True):
        run = Run(kernel, "none", layer, window)
        sees = slice(AT, AT + WINDOW if window else L)
        for kind in "kv":
            for wild in WILD:
                outs = [run.of(chunks, wild, kind) for chunks in (WHOLE, CUT, MIXED)]
                for out in outs:
                    torch.testing.assert_close(out, outs[0], atol=1e-5, rtol=1e-5, equal_nan=True)
                hit = outs[0][sees, 3:]  # the query heads of KV head 1
                if kind == "v":
                    torch.testing.assert_close(hit[..., 5], torch.full_like(hit[..., 5], wild), equal_nan=True)
                elif math.isnan(wild):
                    assert hit.isnan().all()
                assert outs[0][:, :3].isfinite().all()


def test_tiles_of_a_careful_prefill(monkeypatch):
    """The same over several tiles of queries and keys."""
    run = Run("cpu", "none", "plain", True)
    whole = run.of(WHOLE, math.nan, "v")
    monkeypatch.setattr(cpu_prefill, "TILE_Q", 16)
    monkeypatch.setattr(cpu_prefill, "TILE_K", 24)
    monkeypatch.setattr(cpu_prefill, "FEW_MORE", 4)  # ask for the keys only that not all queries see
    for layer in ("plain", "softcap", "turned sinks"):
        run = Run("cpu", "none", layer, True)
        for kind in "kv":
            got, clean = run.of(WHOLE, math.nan, kind), run.of(WHOLE)
            blind = torch.from_numpy((np.arange(L) < AT) | (np.arange(L) >= AT + WINDOW))
            assert torch.equal(got[blind], clean[blind]) and got[~blind, 3:].isnan().any(-1).all()
            if (layer, kind) == ("plain", "v"):
                torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["none", "int8", "e4m3", "e5m2", "table"])
@pytest.mark.parametrize("rule", RULES)
def test_stale_slots_do_not_matter(name, rule):
    """Slots of a block behind the end of the context, or outside the window, may hold any bits."""
    step = make_step(make_spec(6, 2), [(1, 1), (41, 1), (300, 1), (33, 3), (90, 40), (50, 50)], 16, RULES[rule])
    stale = step.storage.k["payload"].isnan()[..., 0, 0]  # [N, S]
    if name != "none":
        step = coded(step, (CODECS[name], CODECS[name]))
    outs = []
    for byte in (0x00, 0x7F, 0xFF, 0x80):  # 0, NaN and large numbers; NaN; -0 or -128
        for plane in (*step.storage.k.values(), *step.storage.v.values()):
            plane.view(torch.uint8)[stale] = byte
        kernel = CpuKernel()
        kernel.store(step.k, step.v, step.storage, step.plan)
        outs.append(kernel.attend(step.q, step.storage, step.plan))
    assert stale.any() and outs[0].isfinite().all() and all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("codec", [NoCodec(), Int8(), Fp8(), Fp8("e5m2")], ids=["none", "int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("dims", [(8, 16), (24, 40), (64, 72)], ids=str)
@pytest.mark.parametrize("heads", [(3, 1), (4, 2), (5, 5)], ids=str)
def test_a_visible_nan_shows_in_decode(codec, dims, heads):
    """At the query heads of its KV head, and in a value that has NaN as a code at its own channel only."""
    share, last = heads[0] // heads[1], heads[1] - 1
    for kind in "kv":
        for channel in (0, dims[kind == "v"] - 1):
            step = coded(make_step(make_spec(*heads, *dims), [(40, 1), (300, 1)], 16), (codec, codec))
            getattr(step, kind)[0, last, channel] = math.nan
            kernel = CpuKernel()
            kernel.store(step.k, step.v, step.storage, step.plan)
            out = kernel.attend(step.q, step.storage, step.plan)
            spoiled = out[0, last * share :]
            where = spoiled[..., channel] if kind == "v" and not isinstance(codec, Int8) else spoiled
            assert where.isnan().all() and out.isnan().sum() == where.numel()
