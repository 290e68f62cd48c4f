"""Kernels out of libraries: pages, whom they serve, what `kernel=auto` says of them.

What they compute is in test_flashinfer.py and test_varlen_attn.py.
"""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvframe_plugins import varlen_attn
from kvframe_plugins.flashinfer import FlashInferKernel, compiler
from kvframe_plugins.int8 import Int8
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.varlen_attn import VarlenAttnKernel

from kvframe.config import build_kernels, compose
from kvframe.errors import IncompatibleCacheError, OptionError
from kvframe.interfaces import CacheContext
from kvframe.kernels import library
from kvframe.kernels.pages import Pages, first_seen, tail
from kvframe.storage import Storage
from kvframe.testing.parts import Band, Stripes
from kvframe.testing.steps import make_spec, make_step
from kvframe.types import GroupPlan

PLAIN = (NoCodec(), NoCodec())


def spec(**more):
    return make_spec(8, 2, **{"k_dim": 128, "v_dim": 128, "dtype": "bfloat16", **more})


# -- pages -----------------------------------------------------------------------------------------------------


def table(lengths, tables) -> GroupPlan:
    return GroupPlan(None, np.array(tables, np.int32), np.array(lengths, np.int32))


def test_the_drawing():
    group = table([7], [[7, 3]])
    pages = Pages.of(group, 4, 2)
    assert pages.ids.tolist() == [14, 15, 6, 7] and pages.starts.tolist() == [0, 4]
    assert pages.last.tolist() == [1] and pages.tail.tolist() == [15]
    single = Pages.of(group, 4, 1, first=np.array([4]))
    assert single.ids.tolist() == [12, 13, 14] and single.last.tolist() == [1] and not len(single.tail)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    block=st.sampled_from([1, 2, 6, 16, 64]),
    window=st.none() | st.integers(1, 30),
    data=st.data(),
)
def test_pages_list_the_slots_that_are_seen_in_order(lengths, block, window, data):
    page = 1 if window else data.draw(st.sampled_from([p for p in range(1, block + 1) if block % p == 0]))
    new = [data.draw(st.integers(1, n)) for n in lengths]
    rng = np.random.default_rng(0)
    sizes = [-(-n // block) for n in lengths]
    ids = iter(rng.permutation(sum(sizes)) + 1)
    tables = np.zeros((len(lengths), max(sizes)), np.int32)
    for r, size in enumerate(sizes):
        tables[r, :size] = [next(ids) for _ in range(size)]
    group = table(lengths, tables)
    step = make_step(make_spec(), list(zip(lengths, new)), block).plan.host
    first = None if window is None else first_seen(step, group, window)
    found = Pages.of(group, block, page, first)
    for r, (length, chunk) in enumerate(zip(lengths, new)):
        begin = 0 if window is None else max(0, length - chunk - window + 1)
        mine = found.ids[found.starts[r] : found.starts[r + 1]]
        slots = (mine[:, None] * page + np.arange(page)).reshape(-1)
        position = np.arange(begin, length)
        assert slots[: len(position)].tolist() == (tables[r, position // block] * block + position % block).tolist()
        assert len(mine) * page - page + found.last[r] == length - begin and 1 <= found.last[r] <= page
        behind = slots[len(position) :].tolist()
        assert set(behind) <= set(found.tail.tolist())
    assert len(set(found.tail.tolist())) == len(found.tail) == sum(-n % page for n in lengths)
    assert found.tail.tolist() == tail(group, block, page).tolist()


# -- whom they serve -------------------------------------------------------------------------------------------


@pytest.fixture
def fits(monkeypatch):
    """A machine on which both could run."""
    monkeypatch.setattr(library, "wrong_device", lambda device: [])
    monkeypatch.setattr(compiler, "no_compiler", lambda: [])
    monkeypatch.setattr("kvframe_plugins.flashinfer.no_compiler", lambda: [])
    monkeypatch.setattr("kvframe_plugins.flashinfer.PACKAGE", "torch")
    monkeypatch.setattr(varlen_attn, "missing_arguments", list)


BOTH = {"flashinfer": FlashInferKernel, "varlen_attn": VarlenAttnKernel}
RULES = {"full": Band(), "window": Band(24), "sinks": Band(24, 4), "stripes": Stripes()}
SERVED = [
    ("flashinfer", {}, "full", 16),
    ("flashinfer", {"softcap": 30.0, "dtype": "float16"}, "window", 1),
    ("flashinfer", {"k_dim": 64, "v_dim": 64}, "full", 500),
    ("varlen_attn", {}, "full", 256),
    ("varlen_attn", {"k_dim": 80, "v_dim": 80, "dtype": "float16"}, "full", 2048),
]
REFUSED = [
    ("flashinfer", {"k_dim": 80, "v_dim": 80}, "full", 16, "64 or 128 or 256 numbers, not 80"),
    ("flashinfer", {"k_dim": 192, "v_dim": 128}, "full", 16, "not 192 and 128"),
    ("flashinfer", {"dtype": "float32"}, "full", 16, "not float32"),
    ("flashinfer", {"sinks": True}, "full", 16, "learned sinks"),
    ("flashinfer", {}, "sinks", 16, "sinks beside a window, and there are 4"),
    ("flashinfer", {}, "stripes", 16, "a window only"),
    ("varlen_attn", {}, "full", 16, "of 16 (cache.layout.block_size=256)"),
    ("varlen_attn", {}, "window", 256, "no window"),
    ("varlen_attn", {}, "stripes", 256, "full attention only"),
    ("varlen_attn", {"softcap": 30.0}, "full", 256, "softcap"),
    ("varlen_attn", {"k_dim": 12, "v_dim": 12}, "full", 256, "multiple of 8 up to 256, not 12"),
    ("varlen_attn", {"k_dim": 320, "v_dim": 320}, "full", 256, "not 320"),
]


@pytest.mark.parametrize("name, more, rule, size", SERVED)
def test_serves(fits, name, more, rule, size):
    assert BOTH[name]().unsupported(spec(**more), PLAIN, RULES[rule], "cuda:0", size) == []


@pytest.mark.parametrize("name, more, rule, size, word", REFUSED)
def test_does_not_serve(fits, name, more, rule, size, word):
    (reason,) = BOTH[name]().unsupported(spec(**more), PLAIN, RULES[rule], "cuda:0", size)
    assert word in reason


@pytest.mark.parametrize("name", BOTH)
def test_codes_are_not_read(fits, name):
    (reason,) = BOTH[name]().unsupported(spec(), (NoCodec(), Int8()), Band(), "cuda:0", 256)
    assert "not codes (values: Int8)" in reason


def test_devices(monkeypatch):
    wrong = library.wrong_device
    assert "not on cpu" in wrong(torch.device("cpu"))[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in wrong(torch.device("cuda:0"))[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "NVIDIA" in wrong(torch.device("cuda:0"))[0]
    monkeypatch.setattr(torch.version, "hip", None)
    for capability, fine in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        assert (wrong(torch.device("cuda:0")) == []) is fine


# -- what is missing -------------------------------------------------------------------------------------------


def test_flashinfer_is_not_installed(fits, monkeypatch):
    monkeypatch.setattr("kvframe_plugins.flashinfer.PACKAGE", "a_package_that_is_not_there")
    (reason,) = FlashInferKernel().unsupported(spec(), PLAIN, Band(), "cuda:0", 16)
    assert "pip install flashinfer-python" in reason


def test_a_compiler_is_looked_for(monkeypatch, tmp_path):
    for name in ("FLASHINFER_NVCC", "CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "DEFAULT", str(tmp_path / "cuda"))
    (reason,) = compiler.no_compiler()
    assert "nvcc" in reason and "flashinfer-jit-cache" in reason and str(tmp_path / "cuda") in reason
    (tmp_path / "own/bin").mkdir(parents=True)
    (tmp_path / "own/bin/nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "own"))
    assert compiler.no_compiler() == []
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert compiler.no_compiler()
    monkeypatch.setattr(compiler, "COMPILED", "torch")
    assert compiler.no_compiler() == []


def test_an_older_torch_has_no_block_tables(fits, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(library, "wrong_device", lambda device: [])
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value, *, scale=None, window_size=(-1, -1): None)
    (reason,) = VarlenAttnKernel().unsupported(spec(), PLAIN, Band(), "cuda:0", 256)
    assert "no block_table and no seqused_k" in reason and "pip install -U torch" in reason


def test_the_implementation_that_was_activated(fits, monkeypatch):
    ask = lambda size=16: VarlenAttnKernel().unsupported(spec(), PLAIN, Band(), "cuda:0", size)
    monkeypatch.setattr(varlen_attn, "implementation", lambda: "FA3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert ask() == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "FA3 is activated and needs compute capability 9.0, not 8.6" in ask()[0]
    monkeypatch.setattr(varlen_attn, "implementation", lambda: "FA4")
    assert "FA4 is activated" in ask(256)[0] and "restore_flash_attention_impl" in ask(256)[0]


@pytest.mark.parametrize("option", [{"backend": "fa9"}, {"workspace_mib": 0}, {"workspace_mib": True}])
def test_options_that_cannot_be(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        FlashInferKernel(**option)


# -- kernel=auto -----------------------------------------------------------------------------------------------


def test_auto_offers_them_behind_what_was_measured():
    names = [kernel.name for kernel in build_kernels(compose())]
    assert names.index("triton") < names.index("flashinfer") < names.index("varlen_attn") < names.index("cpu")


def test_neither_library_is_imported_before_it_is_used():
    code = (
        "import sys, torch\n"
        "from kvframe_plugins.flashinfer import FlashInferKernel\n"
        "from kvframe_plugins.varlen_attn import VarlenAttnKernel\n"
        "FlashInferKernel(), VarlenAttnKernel()\n"
        "assert 'flashinfer' not in sys.modules and 'torch.nn.attention.varlen' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def allocate(kernels):
    context = CacheContext(layers=(make_spec(4, 2, 8, 8),), kernels=tuple(kernels))
    return Storage.allocate(context, NoCodec(), Band(), {0: 0}, 16, [4])


def test_auto_says_why_they_were_passed_over(caplog):
    with caplog.at_level(logging.INFO, "kvframe.storage"):
        allocate(build_kernels(compose()))
    for name, word in (("flashinfer", "not on cpu"), ("flashinfer", "not float32"), ("varlen_attn", "not on cpu")):
        assert any(f"kernel {name}:" in line and word in line for line in caplog.messages), (name, word)


def test_a_kernel_that_was_asked_for_says_what_it_lacks():
    for name in BOTH:
        with pytest.raises(IncompatibleCacheError, match=f"kernel {name}: .*not on cpu.*\n?.*kernel=auto"):
            allocate(build_kernels(compose([f"kernel={name}"])))
