"""4-bit codes as KIVI makes them, and the codecs of bitsandbytes: what comes back, and what a vector depends on."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attending import Attending, some_layers, with_storage
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_plugins.bitsandbytes import BNB8, NF4
from kvframe_plugins.int4 import SCALES, Int4, pack, toward, unpack
from test_cache import control

from kvframe.config import build_cache, compose
from kvframe.errors import IncompatibleCacheError, MissingPackageError, OptionError
from kvframe.interfaces import CacheContext
from kvframe.memory import layer_token_bytes
from kvframe.testing.walker import Walker
from kvframe.types import LayerSpec

LAYER = LayerSpec(0, 4, 2, 64, 64, 0.125, dtype="bfloat16")
installed = importlib.util.find_spec("bitsandbytes") is not None
needs_library = pytest.mark.skipif(not installed, reason="bitsandbytes is not installed")
LIBRARY = [NF4, BNB8]


def both(**options):
    key = Int4(**options)
    return key.for_layer(LAYER, "k"), key.for_layer(LAYER, "v")


def steps_of(codec, planes, shape) -> torch.Tensor:
    """The scale of every number, as large as `x`."""
    scale = planes["scale"].float()
    if planes["scale"].dim() == 3:  # [n, Hkv, D]
        return scale[:, None].expand(shape)
    return scale.repeat_interleave(codec.value_group, -1)[..., : shape[-1]]


numbers = st.floats(-1000, 1000) | st.floats(-1e-3, 1e-3) | st.sampled_from([0.0, 100.0, 60000.0])


@given(
    data=st.data(), bits=st.sampled_from([2, 4, 8]), group=st.sampled_from([2, 4, 32]), dim=st.sampled_from([4, 8, 20]),
    value_group=st.sampled_from([3, 8, 32]), scales=st.sampled_from(SCALES), kind=st.sampled_from([0, 1]),
    centre=st.sampled_from([0.0, 100.0, -3.0]), spread=st.sampled_from([0.0, 1e-6, 0.01, 1.0, 300.0]),
)  # fmt: skip
@settings(max_examples=120, deadline=None)
def test_no_number_is_further_than_half_a_scale(data, bits, group, dim, value_group, scales, kind, centre, spread):
    codec = both(bits=bits, group=group, value_group=value_group, scale_dtype=scales)[kind]
    shape, seed = (2, group, 2, dim), data.draw(st.integers(0, 1 << 16))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread + centre
    for value in data.draw(st.lists(numbers, max_size=3)):
        x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = value
    planes = codec.encode(x)
    for name, spec in codec.planes(dim).items():
        lead = (2, 2) if spec.per == "group" else shape[:3]
        assert planes[name].shape == (*lead, *spec.shape) and str(planes[name].dtype) == f"torch.{spec.dtype}"
    back = codec.decode(planes, torch.float32)
    limit = steps_of(codec, planes, shape) / 2
    assert bool(((back - x).abs() <= limit * (1 + 1e-5) + x.abs() * 1e-6).all())
    assert bool((limit <= (x.max() - x.min() + x.abs().max() / 64) / ((1 << bits) - 1) + 1e-7).all()), (
        "scales are tight"
    )


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", [0, 1], ids=["keys", "values"])
def test_special_values_hurt_who_shares_their_scale_and_nobody_else(kind, scales):
    """Of a key its channel of the group, of a value its part of one token and head."""
    codec, x = (
        both(group=4, scale_dtype=scales)[kind],
        torch.randn(3, 4, 2, 64, generator=torch.Generator().manual_seed(0)),
    )
    plain, hurt = codec.decode(codec.encode(x), torch.float32), torch.zeros_like(x, dtype=torch.bool)
    hurt[(1, slice(None), 1, 40) if kind == 0 else (1, 2, 1, slice(32, 64))] = True
    for value in (float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e30, 60000.0, 0.0):
        bad = x.clone()
        bad[1, 2, 1, 40] = value
        back = codec.decode(codec.encode(bad), torch.float32)
        assert torch.equal(back[~hurt], plain[~hurt]), "others are as they were"
        if value != value:
            assert bool(back[hurt].isnan().all()), "a NaN shows"
        else:
            assert bool(back.isfinite().all())
            end = min(2.0**126, 65504.0 if scales == "float16" else 2.0**126)
            want = max(min(value, end), -end)
            assert float(back[1, 2, 1, 40]) == pytest.approx(want, rel=0.05, abs=0.3), (
                "it counts as the end of the range"
            )
    constant = torch.full((1, 4, 2, 64), 2.5)
    assert torch.equal(codec.decode(codec.encode(constant), torch.float32), constant)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("kind", [0, 1], ids=["keys", "values"])
def test_no_finite_number_comes_back_as_anything_else(kind, scales, bits):
    """All sizes that float32, bfloat16 and float16 have, both signs within one scale."""
    codec = both(group=4, bits=bits, scale_dtype=scales)[kind]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        info = torch.finfo(dtype)
        sizes = torch.logspace(-40, 38, 2 * 4 * 64, dtype=torch.float64).clamp(max=info.max).to(dtype)
        x = torch.stack([sizes, -sizes.flip(0), sizes * torch.tensor([1, -1]).repeat(256)]).view(3, 4, 2, 64)
        x[:, 0, 0, 0], x[:, 1, 0, 0], x[0, :, :, 5] = info.max, -info.max, info.max
        assert bool(x.isfinite().all())
        for back in (codec.decode(codec.encode(x), dtype), codec.decode(codec.encode(x), torch.float32)):
            assert bool(back.isfinite().all())


def test_rounding_away_from_and_towards_zero():
    x = torch.cat([torch.randn(4000) * s for s in (1e-9, 1e-6, 1.0, 1e4)] + [torch.tensor([0.0, 65504.0, -65504.0])])
    for name in SCALES:
        dtype = getattr(torch, name)
        limit = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        for up in (False, True):
            y = toward(limit, dtype, up)
            assert torch.equal(y.to(dtype).float(), y) and bool((y >= limit if up else y <= limit).all())
            assert bool(((y - limit).abs() <= limit.abs() / 64 + 1e-7).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing(bits):
    codes = torch.randint(0, 1 << bits, (3, 5, 16), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, 16 * bits // 8) and torch.equal(unpack(packed, bits), codes)
    assert pack(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 4).tolist() == [0x21, 0x43]


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache, most",
    [
        ("int4", 0.33),
        pytest.param("nf4", 0.29, marks=needs_library),
        pytest.param("bnb8", 0.54, marks=needs_library),
    ],  # fmt: skip
)
def test_bytes_per_token_of_the_presets(cache, most):
    context = CacheContext((LAYER,), max_requests=2)
    built = build_cache(compose([f"cache={cache}"]), context)
    assert layer_token_bytes(built.codec, LAYER) / (2 * 64 * 2 * 2) <= most
    for kind in ("k", "v"):
        codec = built.codec.for_layer(LAYER, kind)
        x = torch.randn(5, codec.group, 2, 64) if codec.group > 1 else torch.randn(5, 2, 64)
        found = sum(plane.nbytes for plane in codec.encode(x).values())
        units = {"group": 5, "token": 5 * codec.group}
        assert found == sum(units[p.per] * p.nbytes("bfloat16") * 2 for p in codec.planes(64).values())


# -- what a user can get wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [("bits", 3), ("group", 7), ("group", 0), ("group", True), ("value_group", 0),
    ("scale_dtype", "int8"), ("bits", "four")])  # fmt: skip
def test_options_of_int4(name, value):
    with pytest.raises(OptionError, match=rf"^{name}={value!r} cannot be used\n  valid: .*\n  fix: {name}=\w+$"):
        Int4(**{name: value})


def test_heads_that_do_not_fill_their_bytes():
    layers = (LayerSpec(0, 2, 1, 15, 8, 1.0),)
    for codec in ["int4", *(["nf4"] if installed else [])]:
        with pytest.raises(IncompatibleCacheError, match="heads of 15 numbers do not fill theirs: cache[./]codec"):
            build_cache(compose(["cache=int4", f"cache/codec={codec}"]), CacheContext(layers))
    build_cache(compose(["cache=int4", "cache.codec.bits=8", "cache.num_blocks=2"]), CacheContext(layers))


@pytest.mark.parametrize("codec", LIBRARY)
def test_the_library_is_missing(codec, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"(nf4|bnb8) needs .*\n  fix: pip install bitsandbytes"):
        codec()


def test_block_sizes_of_the_library():
    with pytest.raises(OptionError, match=r"block=32 cannot be used\n  valid: 64, 128"):
        BNB8(32)
    with pytest.raises(OptionError, match=r"block=48"):
        NF4(48)


# -- bitsandbytes --------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("dim", [8, 64, 80, 128])
@pytest.mark.parametrize("codec", LIBRARY)
def test_vectors_depend_on_nobody_else(codec, dim):
    codec, x = codec(), torch.randn(6, 3, dim, generator=torch.Generator().manual_seed(1))
    planes = codec.encode(x)
    for name, spec in codec.planes(dim).items():
        assert planes[name].shape == (6, 3, *spec.shape) and planes[name].dtype == getattr(torch, spec.dtype)
    back = codec.decode(planes, torch.float32)
    assert back.shape == x.shape
    worst = {4: 0.16, 8: 0.025}[codec.bits]  # half the widest gap between two levels
    for start in range(0, dim, codec.block):
        part = slice(start, start + codec.block)
        largest = x[..., part].abs().amax(-1, keepdim=True)
        assert bool(((back - x)[..., part].abs() <= worst * largest).all())
    for i in (0, 5):  # alone, beside an outlier, in bf16 as far as bf16 tells
        alone = codec.encode(x[i : i + 1])
        loud = x.clone()
        loud[(i + 1) % 6] = 1e4
        for name, plane in codec.encode(loud).items():
            assert torch.equal(plane[i], planes[name][i]) and torch.equal(alone[name][0], planes[name][i])
    assert codec.decode(codec.encode(x[:0]), torch.bfloat16).shape == (0, 3, dim)
    assert codec.decode(planes, torch.bfloat16).dtype == torch.bfloat16


@needs_library
@pytest.mark.parametrize("codec", ["nf4", "bnb8"])
def test_the_library_in_a_cache(codec):
    cache = with_storage(["cache=radix", f"cache/codec={codec}", "cache.num_blocks=12"], some_layers((None,)))
    walker = Walker(cache, seed=3)
    walker.shadow = Attending(cache)
    walker.walk(40)
    assert cache.stats().groups[0].tail_pool == 0


def test_control_plane_needs_no_tensor():
    cache = control(["cache=int4", "cache.num_blocks=4"])
    assert cache.unit == 32 and cache.storage is None and not cache.exact
