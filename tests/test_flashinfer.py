"""The kernel `flashinfer` over a stand-in for its library (tests/stand_ins), and over the real one where it can run.

The stand-in has no limit of head sizes and knows fp32, so that the contract's steps and tiny models reach the kernel.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from kvframe_plugins import flashinfer as plugin
from kvframe_plugins.flashinfer import FlashInferKernel
from kvframe_plugins.flashinfer.wrappers import Turns
from kvframe_plugins.no_codec import NoCodec
from library_engines import check, engine_of
from stand_ins import flashinfer as stand_in

from kvframe.kernels import library
from kvframe.testing import KernelContract
from kvframe.testing.parts import Band
from kvframe.testing.steps import make_spec, make_step

WIDE = range(1, 257)


@pytest.fixture
def standing_in(monkeypatch):
    """The stand-in is installed, and the kernel takes a CPU for its device."""
    monkeypatch.setattr(stand_in, "__spec__", importlib.machinery.ModuleSpec("flashinfer", None))
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(library, "wrong_device", lambda device: [])
    monkeypatch.setattr(plugin, "no_compiler", lambda: [])
    monkeypatch.setattr(plugin, "SIZES", WIDE)
    monkeypatch.setattr(stand_in, "SIZES", WIDE)
    monkeypatch.setattr(library, "DTYPES", ("float32", "bfloat16", "float16"))
    monkeypatch.setattr(stand_in, "DTYPES", {torch.float32, torch.bfloat16, torch.float16})
    stand_in.planned.clear()
    stand_in.ran.clear()


@pytest.mark.usefixtures("standing_in")
class TestFlashInferKernel(KernelContract):
    def make(self):
        return FlashInferKernel(workspace_mib=1)


@pytest.mark.usefixtures("standing_in")
class TestBlocksOfOtherSizes(KernelContract):
    """Pages are pieces of blocks, and blocks that 16 does not divide are cut otherwise."""

    sizes = (24, 7, 100, 256)

    def make(self):
        return FlashInferKernel("auto", workspace_mib=1)


CACHES = {
    "paged": ["cache=paged"],
    "slots": ["cache=paged", "cache.layout.block_size=1"],
    "large blocks": ["cache=paged", "cache.layout.block_size=64"],
    "radix": ["cache=radix", "cache.layout.block_size=8", "cache.num_blocks=120"],
    "contiguous": ["cache=contiguous"],
}
WINDOW = ["cache/retention=sliding_window", "cache.retention.window=12", "cache.retention.sinks=0"]


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_equal_ref(standing_in, cache):
    check(engine_of("llama", FlashInferKernel(workspace_mib=1), CACHES[cache]))
    assert set(stand_in.ran) == {"BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"}


@pytest.mark.parametrize("cache", ("paged", "radix", "contiguous"))
def test_tokens_equal_ref_under_a_window(standing_in, cache):
    engine = engine_of("llama", FlashInferKernel(workspace_mib=1), [*CACHES[cache], *WINDOW])
    check(engine, rule=engine.cache.parts.retention)


@pytest.mark.parametrize("arch", ("mistral", "gemma2"))
def test_tokens_equal_ref_where_the_model_has_windows_and_softcaps(standing_in, arch):
    check(engine_of(arch, FlashInferKernel(workspace_mib=1), CACHES["radix"], chunk=64))


def test_samples_that_share_a_block(standing_in):
    check(engine_of("llama", FlashInferKernel(workspace_mib=1), CACHES["paged"], max_requests=14), samples=2)


def test_a_step_is_planned_once_for_all_layers_of_a_kind(standing_in):
    kernel = FlashInferKernel(workspace_mib=1)
    step, window = (make_step(make_spec(8, 2), [(40, 1), (17, 1)], rule=rule) for rule in (Band(), Band(24)))
    for _ in range(3):
        step.run(kernel)
    assert len(stand_in.planned) == 1 and len(stand_in.ran) == 3
    window.run(kernel)
    assert len(stand_in.planned) == 2
    chunk = make_step(make_spec(8, 2), [(40, 1), (17, 3)])
    chunk.run(kernel)
    assert stand_in.planned[2:] == ["BatchPrefillWithPagedKVCacheWrapper"]


def test_layers_of_several_kinds_take_turns(standing_in):
    """Of one plan: other heads, another scale, another group; plans of one kind do not replace another's."""
    kernel, steps = FlashInferKernel(workspace_mib=1), []
    for heads, scale in (((8, 2), 0.3), ((4, 4), 0.3), ((8, 2), 0.1)):
        steps.append(make_step(make_spec(*heads, scale=scale), [(40, 1), (17, 1)], seed=3))
        steps[-1].plan = steps[0].plan
    for step in (*steps, *steps):
        torch.testing.assert_close(step.run(kernel).double(), step.wanted(), atol=1e-5, rtol=1e-5)
    assert len(stand_in.planned) == 3


def test_groups_of_heads_for_which_cuda_cores_have_no_kernel(standing_in):
    step = make_step(make_spec(10, 2), [(40, 1)])
    torch.testing.assert_close(step.run(FlashInferKernel(workspace_mib=1)).double(), step.wanted(), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("standing_in")
def test_the_stand_in_leaks_where_the_kernel_must_not_look():
    step = make_step(make_spec(4, 2), [(17, 1)])
    kernel = FlashInferKernel(workspace_mib=1)
    kernel.clean = lambda storage, slots: None
    assert bool(step.run(kernel).isnan().any())


# -- the real one ----------------------------------------------------------------------------------------------


def ready() -> bool:
    spec = make_spec(8, 2, 128, 128, dtype="bfloat16")
    return not FlashInferKernel().unsupported(spec, (NoCodec(), NoCodec()), Band(), "cuda:0", 16)


@pytest.mark.gpu
@pytest.mark.skipif(not ready(), reason="flashinfer, its compiler or a CUDA device is missing")
class TestRealFlashInfer:
    def test_the_stand_in_has_its_arguments(self):
        import flashinfer

        for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
            real, mine = (inspect.signature(getattr(m, name).__init__).parameters for m in (flashinfer, stand_in))
            assert set(mine) <= set(real)

    @pytest.mark.parametrize(
        "dim, dtype, softcap, backend",
        [
            (128, "bfloat16", None, "fa2"),
            (128, "bfloat16", None, "auto"),
            (128, "bfloat16", 5.0, "fa2"),
            (64, "float16", None, "fa2"),
            (256, "bfloat16", None, "fa2"),
        ],
    )
    def test_steps(self, dim, dtype, softcap, backend):
        """Decode steps and mixed ones in poisoned storage, with each number of heads and mask. Each case compiles."""
        kernel = FlashInferKernel(backend)
        for heads in ((4, 4), (6, 2), (8, 2), (7, 1), (16, 2)):
            for rule in (Band(), Band(24), Band(1)):
                for size in (16, 1, 48):
                    for requests in ([(1, 1), (300, 1), (17, 1)], [(70, 30), (1, 1), (33, 33), (300, 3), (129, 1)]):
                        spec = make_spec(*heads, dim, dim, dtype=dtype, softcap=softcap)
                        step = make_step(spec, requests, size, rule, device="cuda:0")
                        got = step.run(kernel).cpu().double()
                        torch.testing.assert_close(got, step.wanted(), atol=2e-2, rtol=2e-2)


def test_two_wrappers_take_turns_with_plans():
    """A step is planned while the one before it runs, and its plan lies in host memory of the wrapper."""

    class Planned:
        kind = SimpleNamespace(device=torch.device("cpu"))

        def plan(self, number):
            self.number = number

    turns = Turns(Planned)
    one, two, three = (turns.plan(n) for n in (1, 2, 3))
    assert one is three and one is not two and (two.number, three.number) == (2, 3)
