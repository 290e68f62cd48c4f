"""Int8 and Fp8 by themselves: how far decoded numbers are off, to the step, and special values. What every codec
promises is tried in test_contracts.py.

Shape legend: n vectors, D size.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.fp8.formats import FORMATS
from kvframe_plugins.int8 import Int8

from kvframe.errors import OptionError
from kvframe.interfaces import Parts
from kvframe.types import LayerSpec

LAYER = LayerSpec(0, 4, 2, 64, 64, 0.125)
INT8 = {
    "int8": {},
    "asymmetric": {"symmetric": False},
    "groups": {"group_size": 8},
    "halves": {"scale_dtype": "float16"},
    "clipped": {"percentile": 90},
    "all": {"symmetric": False, "percentile": 75.0, "group_size": 4, "scale_dtype": "float16"},
}
CODECS = {name: Int8(**options) for name, options in INT8.items()} | {
    "e4m3": Fp8(),
    "e5m2": Fp8("e5m2"),
    "fixed e4m3": Fp8(scales=0.02).for_layer(LAYER, "k"),
    "fixed e5m2": Fp8("e5m2", scales={0: {"k": 0.02, "v": 3e-4}}).for_layer(LAYER, "v"),
}
numbers = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-10, 10, width=32) | st.just(0.0)
vectors = st.lists(st.lists(numbers, min_size=16, max_size=16), min_size=1, max_size=4)


def spread(x, n: int) -> torch.Tensor:
    """`[..., groups]` -> `[..., n]`: the number of the group of each channel."""
    return x.float().repeat_interleave(n // x.shape[-1], -1)


@pytest.mark.parametrize("name", INT8)
@given(rows=vectors)
@settings(max_examples=60, deadline=None)
def test_error_of_integers_is_half_a_step(name, rows):
    codec, x = CODECS[name], torch.tensor(rows)
    if codec.scale_dtype == "float16":
        x = x.clamp(-8e6, 8e6)
    planes = codec.encode(x)
    scale, got = spread(planes["scale"], 16), codec.decode(planes, torch.float32)
    if codec.percentile < 100:  # what is clipped comes back as the end of the range
        low = spread(planes["zero"], 16) if "zero" in planes else -127 * scale
        x = torch.maximum(torch.minimum(x, low + (255 if "zero" in planes else 254) * scale), low)
    size = torch.maximum(x.abs(), got.abs()) + (spread(planes["zero"], 16).abs() if "zero" in planes else 0)
    assert ((got - x).abs() <= scale / 2 * (1 + 1e-6) + 4e-7 * size).all()


@pytest.mark.parametrize("percentile", [99, 97.5, 60, 0.5])
@pytest.mark.parametrize("size", [1, 2, 16])
def test_percentiles_are_those_of_numpy(percentile, size):
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    x[3, 4], x[4], x[5, 0] = 1e30, 0.0, torch.nan
    parts = x.view(40, -1, size).numpy().astype(np.float64)
    scale = Int8(percentile=percentile, group_size=size).encode(x)["scale"].numpy()
    want = np.clip(np.percentile(np.abs(parts), percentile, axis=-1) / 127, 2.0**-126, 2.6793883890187504e36)
    np.testing.assert_allclose(scale, want, rtol=1e-6)
    if percentile > 50:
        planes = Int8(False, percentile, size).encode(x)
        low, high = (np.percentile(parts, p, axis=-1) for p in (100 - percentile, percentile))
        np.testing.assert_allclose(planes["zero"].numpy(), low, rtol=1e-5, atol=1e-6)
        steps = np.maximum((high - low) / 255, 2.0**-126)
        np.testing.assert_allclose(planes["scale"].numpy(), steps, rtol=1e-4, atol=1e-8)


def test_what_float16_holds_comes_back_finite_in_float16():
    """The scale is rounded up, so its last code stands for a little more than the largest number there is."""
    x = torch.tensor([[65504.0, -65504.0, 1.0, 0.0]])
    for codec in (codec for codec in CODECS.values() if isinstance(codec, Int8)):
        if codec.group_size in (None, 4):
            assert bool(codec.decode(codec.encode(x), torch.float16).isfinite().all())


@pytest.mark.parametrize("name", FORMATS)
@given(rows=vectors, fixed=st.none() | st.sampled_from([1e-3, 1.0, 7e5]))
@settings(max_examples=60, deadline=None)
def test_error_of_floats_is_half_an_ulp(name, rows, fixed):
    format, x = FORMATS[name], torch.tensor(rows)
    codec = Fp8(name, scales=fixed).for_layer(LAYER, "k")
    planes = codec.encode(x)
    scale = planes.get("scale", torch.tensor(fixed or 1.0))
    got = codec.decode(planes, torch.float32)
    want = (x / scale).clamp(-format.largest, format.largest)  # in units of the format
    exponent = torch.frexp(want.abs()).exponent - 1
    ulp = torch.exp2((exponent.clamp(min=1 - format.bias) - format.mantissa).float())
    assert ((got / scale - want).abs() <= ulp / 2 * (1 + 1e-6) + 1e-6 * want.abs()).all()


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_torch(name):
    """Every float16 and bfloat16, and float32 numbers at and around every edge between two codes."""
    format, dtype = FORMATS[name], getattr(torch, FORMATS[name].dtype)
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    values = torch.from_numpy(format.values()[np.isfinite(format.values())])
    edges = (values[:, None] + values[None, :]).flatten() / 2
    near = [torch.nextafter(edges, torch.tensor(x)) for x in (-torch.inf, torch.inf)]
    random = torch.from_numpy(
        np.random.default_rng(0).integers(-(2**31), 2**31, 1_000_000, dtype=np.int64).astype("i4")
    )
    parts = [every.view(torch.float16).float(), every.view(torch.bfloat16).float(), edges, *near]
    x = torch.cat([*parts, random.view(torch.float32)]).clamp(-format.largest, format.largest)
    assert x.isnan().any()
    assert torch.equal(format.encode_bits(x), x.to(dtype).view(torch.uint8))
    assert torch.equal(format.encode(x), format.encode_bits(x))
    codes = torch.arange(256, dtype=torch.uint8)
    for decode in (format.decode, format.decode_bits):
        torch.testing.assert_close(decode(codes), codes.view(dtype).float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(format.decode_bits(codes).signbit(), codes.view(dtype).float().signbit())


@pytest.mark.parametrize("name", CODECS)
def test_special_values(name):
    codec = CODECS[name]
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    plain = codec.decode(codec.encode(x), torch.float32)
    x[1], x[2], x[3, 9], x[4, 2], x[5, 3] = 0.0, -2.5, 1e30, torch.nan, torch.inf
    got = codec.decode(codec.encode(x), torch.float32)
    for row in (0, 6, 7):
        assert torch.equal(got[row], plain[row])
    assert (got[1] == 0).all() and not got[3].isnan().any() and got[4, 2].isnan()
    assert got[:4].isfinite().all() and not got[5:].isnan().any()
    if codec.fixed is None and name not in ("all", "clipped"):
        torch.testing.assert_close(got[2], x[2], rtol=1e-3, atol=0)
    if isinstance(codec, Fp8):  # a NaN is a code of its own channel
        assert int(got[4].isnan().sum()) == 1
        assert got[5, 3] == codec.peak * codec.encode(x).get("scale", torch.full((8, 1), codec.fixed or 1.0))[5, 0]


@pytest.mark.parametrize("name", ["int8", "halves", "e4m3", "e5m2", "fixed e4m3"])
def test_half_of_the_bytes_of_bf16(name):
    """At head size 64: 64 codes and a scale against 128 bytes."""
    assert sum(plane.nbytes("bfloat16") for plane in CODECS[name].planes(64).values()) <= 0.54 * 128


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Int8(symmetric="no"), "symmetric='no' cannot be used"),
        (lambda: Int8(percentile=0), "percentile=0 cannot be used\n  valid: a number in (0, 100]"),
        (lambda: Int8(percentile=True), "percentile=True cannot be used"),
        (
            lambda: Int8(False, 50),
            "percentile=50 cannot be used\n  valid: a number in (50, 100]\n  fix: percentile=100",
        ),
        (lambda: Int8(False, 10.5), "percentile=10.5 cannot be used\n  valid: a number in (50, 100]"),
        (lambda: Int8(group_size=0), "group_size=0 cannot be used"),
        (lambda: Int8(scale_dtype="bfloat16"), "scale_dtype='bfloat16' cannot be used"),
        (lambda: Fp8("e3m4"), "format='e3m4' does not exist\n  valid: e4m3, e5m2\n  fix: format=e4m3"),
        (lambda: Fp8(scales=0), "scales=0 cannot be used"),
        (lambda: Fp8(scales=float("nan")), "scales=nan cannot be used"),
        (lambda: Fp8(scales="/nowhere/calib.json"), "scales='/nowhere/calib.json' cannot be read: No such file"),
        (lambda: Fp8(scales={"a": 1.0}), "names layer 'a'"),
        (lambda: Fp8(scales={1.5: 1.0}), "names layer 1.5"),
        (lambda: Fp8(scales={1: 1.0, "1": 2.0}), "names layer '1'\n  valid: an integer >= 0, once"),
        (lambda: Fp8(scales={0: {"k": 1.0}}), "has ['k'] for layer 0\n  valid: a number, k and v"),
        (lambda: Fp8(scales={0: {"k": 1.0, "v": "x"}}), "has 'x' as v of layer 0\n  valid: a number > 0"),
    ],
)
def test_values_that_cannot_be(make, words):
    with pytest.raises(OptionError) as error:
        make()
    text = str(error.value)
    assert words in text and "\n  valid: " in text and "\n  fix: " in text


@pytest.mark.parametrize("scales, words", [({1: 1.0}, "has no scale for layer 0; it has layers: 1"),
    ({0: 1.0, 1: 1.0, 4: 1.0}, "names layer 4, the model has 0 .. 1")])  # fmt: skip
def test_fixed_scales_of_another_model(scales, words):
    """A conflict, told with all others; keys and values of a layer that stores nothing need no scale."""
    codec, layers = Fp8(scales=scales), (LAYER, LayerSpec(1, 4, 2, 64, 64, 0.125, kv_source=0))
    parts = Parts(*[None] * 5, layers, 96, 16, stored=((LAYER, "k", 64), (LAYER, "v", 64)))
    fix = "cache.codec.scales=null, or kvframe calibrate out=calib.json and then cache.codec.scales=calib.json"
    assert codec.conflicts(parts) == [f"cache.codec.scales={scales} {words}: {fix}"]
    assert codec.for_layer(layers[1], "k").group == 1, "there is an answer for every layer"
    assert not Fp8(scales={0: 1.0}).conflicts(parts)


def test_calibration_file(tmp_path):
    """Largest sizes become scales of the format; a layer that saw only zeros has a scale too."""
    file = tmp_path / "calib.json"
    file.write_text(json.dumps({"layers": {"0": {"k": 44.8, "v": 0.0}}, "model": "x", "tokens": 5}))
    codec = Fp8(scales=str(file))
    assert codec.for_layer(LAYER, "k").fixed == pytest.approx(0.1)
    assert codec.for_layer(LAYER, "v").fixed > 0
    assert codec.for_layer(LAYER, "k") is codec.for_layer(LAYER, "k")
    file.write_text("[]")
    with pytest.raises(OptionError, match="no calibration file"):
        Fp8(scales=str(file))
