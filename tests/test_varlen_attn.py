"""The kernel `varlen_attn` over a stand-in for torch's function (tests/stand_ins), and over the real one on a GPU.

The stand-in knows fp32, so that all of the contract's steps and tiny models reach the kernel.
"""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.attention.varlen as module
from kvframe_plugins import varlen_attn as plugin
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.varlen_attn import VarlenAttnKernel
from library_engines import check, engine_of
from stand_ins import varlen as stand_in

from kvframe.kernels import library
from kvframe.testing import KernelContract
from kvframe.testing.parts import Band
from kvframe.testing.steps import make_spec, make_step

REAL = module.varlen_attn


def test_the_stand_in_has_the_arguments_of_this_torch():
    if plugin.missing_arguments():
        pytest.skip("this torch has no block tables")
    real, mine = inspect.signature(REAL).parameters, inspect.signature(stand_in.varlen_attn).parameters
    assert [(p.name, p.kind, p.default) for p in real.values()] == [(p.name, p.kind, p.default) for p in mine.values()]


@pytest.fixture
def standing_in(monkeypatch):
    """The stand-in for FlashAttention-2, and the kernel takes a CPU for its device."""
    monkeypatch.setattr(module, "varlen_attn", stand_in.varlen_attn)
    monkeypatch.setattr(library, "wrong_device", lambda device: [])
    monkeypatch.setattr(library, "DTYPES", ("float32", "bfloat16", "float16"))
    monkeypatch.setattr(stand_in, "DTYPES", {torch.float32, torch.bfloat16, torch.float16})
    monkeypatch.setattr(stand_in, "implementation", None)
    stand_in.ran.clear()


@pytest.fixture
def third(standing_in, monkeypatch):
    """FlashAttention-3 is activated."""
    monkeypatch.setattr(stand_in, "implementation", "FA3")
    monkeypatch.setattr(plugin, "implementation", lambda: "FA3")


@pytest.mark.usefixtures("standing_in")
class TestVarlenAttnKernel(KernelContract):
    sizes = (256,)

    def make(self):
        return VarlenAttnKernel()


@pytest.mark.usefixtures("third")
class TestFlashAttention3(KernelContract):
    sizes = (16, 4, 1, 64)

    def make(self):
        return VarlenAttnKernel()


LARGE = {
    "paged": ["cache=paged", "cache.layout.block_size=256"],
    "radix": ["cache=radix", "cache.layout.block_size=256", "cache.num_blocks=20"],
    "contiguous": ["cache=contiguous"],
}
SMALL = {
    "paged": ["cache=paged"],
    "radix": ["cache=radix", "cache.layout.block_size=8", "cache.num_blocks=120"],
    "contiguous": ["cache=contiguous"],
}


@pytest.mark.parametrize("cache", LARGE)
def test_tokens_equal_ref(standing_in, cache):
    check(engine_of("llama", VarlenAttnKernel(), LARGE[cache], max_len=512))
    assert stand_in.ran


@pytest.mark.parametrize("cache", SMALL)
def test_tokens_equal_ref_with_blocks_of_any_size(third, cache):
    check(engine_of("llama", VarlenAttnKernel(), SMALL[cache]))


def test_samples_that_share_a_block(third):
    check(engine_of("llama", VarlenAttnKernel(), ["cache=paged"], max_requests=14), samples=2)


def test_tables_name_pages_of_the_request_and_page_0_only(standing_in):
    step = make_step(make_spec(4, 2), [(300, 1), (700, 3), (20, 20)], 512)
    todo = plugin._todo(step.plan, 0, 512)
    blocks = step.plan.host.groups[0].tables
    assert todo.tables.dtype == torch.int32
    assert todo.tables.tolist() == [
        [2 * blocks[0, 0], 2 * blocks[0, 0] + 1, 0, 0],
        [2 * blocks[1, 0], 2 * blocks[1, 0] + 1, 2 * blocks[1, 1], 0],
        [2 * blocks[2, 0], 0, 0, 0],
    ]
    assert todo.starts.tolist() == [0, 300, 1000, 1020]
    assert len(todo.dirty) == 256 + (512 - 300) + (768 - 700) + (256 - 20)


@pytest.mark.usefixtures("third")
def test_the_stand_in_leaks_where_the_kernel_must_not_look():
    step = make_step(make_spec(4, 2), [(17, 1)])
    kernel = VarlenAttnKernel()
    kernel.clean = lambda storage, slots: None
    assert bool(step.run(kernel).isnan().any())


# -- the real one ----------------------------------------------------------------------------------------------


def ready() -> bool:
    spec = make_spec(8, 2, 128, 128, dtype="bfloat16")
    return not VarlenAttnKernel().unsupported(spec, (NoCodec(), NoCodec()), Band(), "cuda:0", 256)


@pytest.mark.gpu
@pytest.mark.skipif(not ready(), reason="a CUDA device is missing, or this torch has no block tables")
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("dim", (64, 80, 128, 256))
def test_steps_of_the_real_one(dim, dtype):
    """Decode steps and mixed ones in poisoned storage, with each number of heads."""
    kernel = VarlenAttnKernel()
    for heads in ((4, 4), (6, 2), (7, 1), (16, 2)):
        for size in (256, 512):
            for requests in ([(1, 1), (300, 1), (17, 1)], [(70, 30), (1, 1), (33, 33), (600, 3), (257, 1)]):
                step = make_step(make_spec(*heads, dim, dim, dtype=dtype), requests, size, device="cuda:0")
                got = step.run(kernel).cpu().double()
                torch.testing.assert_close(got, step.wanted(), atol=2e-2, rtol=2e-2)
