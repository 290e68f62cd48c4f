"""What can be asked of the `triton` kernel in any process: what it serves, how a step is cut, what it needs.

The kernels themselves are tried in processes of their own, see test_triton_interpreter.py and test_triton_compiled.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.int4 import Int4
from kvframe_plugins.int8 import Int8
from kvframe_plugins.no_codec import NoCodec

from kvframe.config import build_kernels, compose
from kvframe.kernels.triton import kernel as module
from kvframe.kernels.triton.kernel import TritonKernel
from kvframe.kernels.triton.layer import Layer, padded
from kvframe.kernels.triton.work import work
from kvframe.testing.codecs import Sealed
from kvframe.testing.parts import Band
from kvframe.testing.steps import make_spec, make_step

PLAIN = (NoCodec(), NoCodec())


@pytest.fixture
def device(monkeypatch):
    """A device that the kernel takes for one of its own."""
    monkeypatch.setattr(module, "_wrong_device", lambda device: [])
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)


def test_serves(device):
    for dtype in ("float32", "bfloat16", "float16"):
        for codecs in (
            PLAIN,
            (Int4(), Int4().for_layer(None, "v")),
            (Int8(), Fp8()),
            (NoCodec(), Fp8("e5m2")),
            (Int8(scale_dtype="float16"), Int8()),
        ):
            spec = make_spec(8, 2, 192, 128, dtype=dtype, softcap=30.0, sinks=True)
            assert TritonKernel().unsupported(spec, codecs, Band(24, 5), "cuda:0", 16) == []


@pytest.mark.parametrize(
    "more, codecs, rule, word",
    [
        ({"dtype": "float64"}, PLAIN, Band(), "float64"),
        ({"k_dim": 576}, PLAIN, Band(), "576"),
        ({}, PLAIN, Band(kernel_mask=False), "mask"),
        ({}, (Sealed(), NoCodec()), Band(), "as a range of steps only (Codec.ranged)"),
        ({}, (NoCodec(), Int8(symmetric=False)), Band(), "something else (values: Int8)"),
    ],
)
def test_does_not_serve(device, more, codecs, rule, word):
    (reason,) = TritonKernel().unsupported(make_spec(**more), codecs, rule, "cuda:0", 16)
    assert word in reason


def test_devices(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    wrong = module._wrong_device
    assert "not on cpu" in wrong(torch.device("cpu"))[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in wrong(torch.device("cuda:0"))[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, fits in (((7, 5), False), ((8, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert (wrong(torch.device("cuda:0")) == []) is fits
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert wrong(torch.device("cpu")) == [] and "not on cuda:0" in wrong(torch.device("cuda:0"))[0]


def test_not_installed(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    reasons = TritonKernel().unsupported(make_spec(), PLAIN, Band(), "cuda:0", 16)
    assert any("pip install" in reason for reason in reasons)


def test_is_offered_first_and_does_not_import_triton():
    assert [kernel.name for kernel in build_kernels(compose(["cache=paged"]))][0] == "triton"
    code = "import sys, kvframe.kernels.triton.kernel as k; k.TritonKernel(); assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("rule", [Band(), Band(1), Band(300, 4), Band(256, 256), Band(700, 600)], ids=str)
def test_parts_hold_all_that_is_visible(rule):
    """The parts that get a program, from the last token's mask alone."""
    layer, most = Layer.of(make_step(make_spec(), [(1, 1)], 16, rule).storage), 0
    for length in range(1, 2600, 7):
        visible = rule.visible(torch.tensor([length - 1]).numpy(), torch.arange(length).numpy())
        touched = {int(k) // layer.split for k in visible.nonzero()[0]}
        # a part of sinks has a program also where sinks end before it is full
        assert len(touched) <= layer.parts(length) <= len(touched) + 1
        most = max(most, layer.parts(length))
        assert most <= layer.most_parts(length)
    assert layer.most_parts(2600) <= most + 1


def test_work_of_a_step():
    step = make_step(make_spec(6, 2), [(40, 1), (50, 20), (33, 1), (20, 20)], 16)
    found = work(step.plan, group=3, tile=16)
    assert found.rows.tolist() == [0, 2] and found.decoding == 2
    pairs = found.tiles.tolist()
    assert sorted(pairs) == [[r, begin] for r in (1, 3) for begin in (0, 16, 32, 48)]
    assert pairs[0] == [1, 48] and pairs[-1] == [3, 0]  # most keys first
    alone = work(make_step(make_spec(6, 2), [(40, 1), (33, 1)], 16).plan, 3, 16)
    assert (alone.rows, alone.decoding, alone.tiles) == (None, 2, None)


def test_padded():
    assert [padded(n) for n in (1, 16, 17, 80, 128, 192)] == [16, 16, 32, 128, 128, 256]
