"""The `cpu` kernel on planes of codes against the reference kernel, which encodes and decodes as the codec says.

Shape legend: R requests, T tokens, Hq/Hkv heads, Dk/Dv sizes.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.int4 import Int4
from kvframe_plugins.int8 import Int8
from kvframe_plugins.mixed import Mixed
from kvframe_plugins.no_codec import NoCodec
from numba import cfunc
from test_kernel_cpu import HEADS, RULES, Band, Step, make_spec, make_step

from kvframe.config import build, compose
from kvframe.kernels import cpu, cpu_bits, cpu_codes, cpu_prefill, native
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.cpu_vector import load8, pointer, put8
from kvframe.kernels.reference import ReferenceKernel
from kvframe.types import Request, SamplingParams


class Skewed(Int8):
    """uint8 codes of a table that no format has: a code c stands for sinh of it."""

    peak = None
    TABLE = np.sinh((np.arange(256, dtype=np.float32) - 128) / 40).astype(np.float32)

    def __init__(self):
        super().__init__()
        self.peak = None

    def values(self):
        return self.TABLE

    def planes(self, dim):
        found = super().planes(dim)
        return found | {"payload": replace(found["payload"], dtype="uint8")}

    def encode(self, x):
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-9) / float(self.TABLE[-1])
        codes = torch.round(torch.asinh(x.float() / scale) * 40) + 128
        return {"payload": codes.nan_to_num().clamp(0, 255).to(torch.uint8), "scale": scale}

    def decode(self, planes, dtype):
        return (torch.from_numpy(self.TABLE)[planes["payload"].long()] * planes["scale"]).to(dtype)


LAYER = make_spec()
CODECS = {
    "int8": Int8(),
    "e4m3": Fp8(),
    "e5m2": Fp8("e5m2"),
    "clipped": Int8(percentile=95),
    "fixed": Fp8(scales=0.011).for_layer(LAYER, "k"),
    "table": Skewed(),
}
PAIRS = {name: (codec, codec) for name, codec in CODECS.items()}
PAIRS |= {"v only": (NoCodec(), CODECS["int8"]), "two": (CODECS["fixed"], Int8(scale_dtype="float16"))}
FAST = ("int8", "e4m3")


def coded(step: Step, codecs) -> Step:
    """The same step over planes of codes; what was NaN is the code of NaN."""
    planes = [
        {n: p.clone() for n, p in codec.encode(held["payload"]).items()}
        for codec, held in zip(codecs, (step.storage.k, step.storage.v))
    ]
    step.storage = replace(step.storage, codec_k=codecs[0], codec_v=codecs[1], k=planes[0], v=planes[1])
    return step


def bits(planes: dict) -> list[bytes]:
    """The planes as bytes; all NaN are one NaN."""
    return [torch.where(p != p, torch.tensor(float("nan")).to(p.dtype) if p.is_floating_point() else p, p).contiguous()
            .view(torch.uint8).numpy().tobytes() for p in planes.values()]  # fmt: skip


def agree(step: Step, limit=1e-5) -> torch.Tensor:
    """Runs both kernels: the same codes bit by bit, and the same attention; the reference in fp32."""
    kernel, storage = CpuKernel(), step.storage
    codecs = storage.codec_k, storage.codec_v
    assert not kernel.unsupported(storage.spec, codecs, storage.retention, "cpu", storage.block_size)
    copy = replace(storage, **{kind: {n: p.clone() for n, p in getattr(storage, kind).items()} for kind in "kv"})
    kernel.store(step.k, step.v, storage, step.plan)
    ReferenceKernel().store(step.k, step.v, copy, step.plan)
    assert bits(storage.k) == bits(copy.k) and bits(storage.v) == bits(copy.v)
    second = ()
    if storage.sink_queries:  # it is the first query where the token looks from its own position
        positions = step.plan.host.positions
        own = torch.from_numpy(storage.retention.sink_position(positions) == positions)
        second = (torch.where(own[:, None, None], step.q, step.q.flip(0)),)
    got = kernel.attend(step.q, storage, step.plan, *second)
    want = ReferenceKernel().attend(step.q.float(), copy, step.plan, *(x.float() for x in second))
    limit = limit if step.q.dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=limit * max(1.0, float(want.abs().max())), rtol=limit)
    return got


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dims", [(8, 8), (24, 16), (64, 64), (80, 40)], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (8, 2), (5, 1), (7, 1)], ids=str)
def test_dims_heads_and_learned_sinks(name, dims, heads):
    spec = make_spec(*heads, *dims, scale=0.3, sinks=True)
    agree(coded(make_step(spec, [(300, 1), (70, 30), (33, 5)], 16, RULES["sinks"], seed=3), PAIRS[name]))


@given(
    requests=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 16, 100]),
    window=st.none() | st.integers(1, 60),
    sinks=st.integers(0, 20),
    heads=st.sampled_from(HEADS),
    name=st.sampled_from(sorted(PAIRS)),
)
@settings(max_examples=40, deadline=None)
def test_any_step(requests, block_size, window, sinks, heads, name):
    requests = [(max(context, chunk), chunk) for context, chunk in requests]
    step = make_step(make_spec(*heads, k_dim=8, v_dim=8), requests, block_size, Band(window, sinks))
    agree(coded(step, PAIRS[name]))


@pytest.mark.parametrize("name", FAST)
def test_special_numbers(name):
    """Zeros, outliers, infinities and NaN are stored as the codec says; NaN shows at its own request only."""
    step = coded(make_step(make_spec(4, 2), [(50, 1), (40, 1), (60, 20)], 16), PAIRS[name])
    for x in (step.k, step.v):
        x[1], x[2, 0], x[3, 1, 5], x[4, 0] = 0.0, 1e-42, 1e4, 0.5
    agree(step, 1e-4)
    step.k[3, 1, 5], step.v[5, 0, 2] = torch.inf, -torch.inf
    copy = replace(step.storage, k={n: p.clone() for n, p in step.storage.k.items()})
    CpuKernel().store(step.k, step.v, step.storage, step.plan)
    ReferenceKernel().store(step.k, step.v, copy, step.plan)
    assert bits(step.storage.k) == bits(copy.k)
    step.k[3, 1, 5] = step.v[5, 0, 2] = step.v[0, 1, 3] = torch.nan
    kernel = CpuKernel()
    kernel.store(step.k, step.v, step.storage, step.plan)
    out = kernel.attend(step.q, step.storage, step.plan)
    assert out[0, 2:, 3].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize("name", FAST)
def test_tiles_of_a_prefill(monkeypatch, name):
    monkeypatch.setattr(cpu_prefill, "TILE_Q", 16)
    monkeypatch.setattr(cpu_prefill, "TILE_K", 24)
    agree(coded(make_step(make_spec(4, 2, softcap=4.0), [(150, 100), (60, 60)], 16), PAIRS[name]))


def test_what_is_not_read():
    reasons = lambda codec: CpuKernel().unsupported(make_spec(), (codec, codec), Band(), "cpu", 16)
    for codec in (Int8(symmetric=False), Int8(group_size=8)):
        assert len(reasons(codec)) == 2 and "payload * scale" in reasons(codec)[0]
    odd = Int8()
    odd.values = lambda: Skewed.TABLE
    assert "not int8" in reasons(odd)[0]


@pytest.mark.parametrize("name", cpu_codes.FORMATS)
def test_bits_without_conversions_of_the_processor(name, monkeypatch):
    """Both ways of widening 256 codes."""
    for converts in (True, False):
        if converts and not cpu_bits.converts_halves():
            continue
        with monkeypatch.context() as patch:
            patch.setattr(cpu_bits, "converts_halves", lambda converts=converts: converts)

            def widen(source, target):
                x, y = pointer(name, source), pointer("float32", target)
                for i in range(0, 256, 8):
                    put8(y, i, load8(x, i))

            compiled = cfunc("void(int64, int64)")(widen)
        codes, out = np.arange(256, dtype=np.uint8), np.empty(256, np.float32)
        call = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(compiled.address)
        call(codes.ctypes.data, out.ctypes.data)
        want = cpu_codes.format_values(name).copy()
        if name in cpu_bits.HIDDEN_NAN:
            want[0x7F], want[0xFF] = 480, -480
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(out * np.float32(cpu_codes.FORMATS[name]), want)
        assert out[0] == 0 and np.signbit(out[128]) and not np.signbit(out[0])


E4M3 = "float8_e4m3fn"
PLAIN = {("scatter",), ("attend", *("float32",) * 5)}
CODED = {("encode", "float32", "int8"), ("attend", "float32", "int8", "int8", "float32", "float32")}
FIXED = {("encode", "float32", E4M3), ("attend", "float32", E4M3, E4M3, "float32", "float32")}


@pytest.mark.parametrize(
    "codec, dtype, want",
    [
        (None, "float32", PLAIN),
        (NoCodec(), "float32", PLAIN),
        (Int8(), "float32", CODED),
        (Int8(percentile=95), "float32", CODED - {("encode", "float32", "int8")}),
        (Mixed(Int8(), Int8(), {0: NoCodec()}), "float32", PLAIN | CODED),
        (Fp8(scales={0: 0.5}), "float32", FIXED),
        (Int4(), "float32", set()),
        (Int8(), "float16", set()),
    ],
    ids=["unknown", "none", "int8", "clipped", "mixed", "fixed", "not read", "no dtype"],
)
def test_what_is_compiled_while_weights_load(codec, dtype, want, monkeypatch):
    made = set()
    monkeypatch.setattr(cpu, "callback", lambda *name: made.add(name))
    CpuKernel().warm("cpu", dtype, codec)
    assert made == want
    made.clear()
    CpuKernel().warm("cuda:0", dtype, codec)
    assert not made


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_nothing_is_compiled_for_a_request(codec, monkeypatch):
    """What the steps need is there when the engine is built, and what they do not need is not made."""
    made = {}
    monkeypatch.setattr(native, "_callbacks", made)
    cfg = ["model=random", "model.shape=tiny", "cache=paged", f"cache/codec={codec}", "cache.memory=4MiB", "kernel=cpu"]
    engine = build(compose([*cfg, "engine.max_len=96", "engine.max_step_tokens=64"]))
    assert set(made) == (PLAIN if codec == "none" else CODED) | {("rotate", "float32")}
    before = set(made)
    long = SamplingParams(max_new_tokens=4, ignore_eos=True, n=2, temperature=1.0)
    engine.generate([Request(prompt_tokens=[5] * 70, sampling=long), Request(prompt_tokens=[6] * 3, sampling=long)])
    assert set(made) == before
