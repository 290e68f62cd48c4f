"""Every built-in part and composition under exactly the contract suites that other packages subclass. The plain parts
of kvframe.testing, and a cache that is nothing but a dict, go through them as well."""

from __future__ import annotations

import functools
import importlib.util

import pytest
from dict_cache import DictCache
from kvframe_plugins.bitsandbytes import BNB8, NF4
from kvframe_plugins.contiguous import Contiguous
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.half_life import HalfLife
from kvframe_plugins.int4 import Int4
from kvframe_plugins.int8 import Int8
from kvframe_plugins.lfu import LFU
from kvframe_plugins.lru import LRU
from kvframe_plugins.mixed import Mixed
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.no_codec import NoCodec
from kvframe_plugins.no_index import NoIndex
from kvframe_plugins.paged import Paged
from kvframe_plugins.radix import RadixIndex
from kvframe_plugins.sliding_window import SlidingWindow
from strategies import COMPOSITIONS
from test_kernel_codes import PAIRS

from kvframe.config import build_cache, compose
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing import (
    CodecContract,
    EvictionContract,
    IndexContract,
    KernelContract,
    KVCacheContract,
    LayoutContract,
    RetentionContract,
)
from kvframe.testing.codecs import Eights, Sealed
from kvframe.testing.parts import Band, Blocks, Oldest, Stripes, Unkept, Verbatim
from kvframe.testing.trie import TrieIndex

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
WINDOW = ["cache/retention=sliding_window", "cache.retention.window=9"]
HALF = {"low": 2.0**-10, "high": 60000.0}  # where float16 scales are normal numbers that do not saturate
# name -> how it is made, and what its author declares
CODECS = {
    "none": (NoCodec, {}),
    "int8": (Int8, {"bound": 0.004}),
    "int8 asymmetric": (lambda: Int8(symmetric=False), {"bound": 0.004}),
    "int8 groups": (lambda: Int8(group_size=8), {"bound": 0.004}),
    "int8 half scales": (lambda: Int8(scale_dtype="float16"), {"bound": 0.004, "low": 2.0**-7, "high": 8e6}),
    "int8 clipped": (lambda: Int8(percentile=90), {"bound": 1.0}),
    "int8 all options": (lambda: Int8(False, 75.0, 4, "float16"), {"bound": 0.8, "low": 2.0**-7, "high": 8e6}),
    "e4m3": (Fp8, {"bound": 0.036}),
    "e5m2": (lambda: Fp8("e5m2"), {"bound": 0.0715}),
    "e4m3 fixed": (lambda: Fp8(scales=0.02), {"bound": 0.063, "low": 0.02 * 2**-6, "high": 0.02 * 448}),
    "e5m2 fixed": (lambda: Fp8("e5m2", scales=0.02), {"bound": 0.126, "low": 0.02 * 2**-14, "high": 0.02 * 57344}),
    "int4": (lambda: Int4(group=4), {"bound": 0.067, **HALF}),
    "int2": (lambda: Int4(bits=2, group=4), {"bound": 0.34, **HALF}),
    "int4 8 bits": (lambda: Int4(bits=8, group=2), {"bound": 0.005, "low": 2.0**-7, "high": 60000.0}),
    "int4 bfloat16 scales": (lambda: Int4(group=4, scale_dtype="bfloat16"), {"bound": 0.069}),
    "int4 float32 scales": (lambda: Int4(group=32, scale_dtype="float32"), {"bound": 0.067}),
    "mixed": (lambda: Mixed(Int8(), Fp8()), {"bound": {"k": 0.004, "v": 0.036}}),
    "nf4": pytest.param((NF4, {"bound": 0.16}), marks=needs_library),
    "bnb8": pytest.param((BNB8, {"bound": 0.0075}), marks=needs_library),
    "plain 8 bits": (Eights, {"bound": 0.004}),
    "plain sealed": (Sealed, {"bound": 0.004}),
    "plain verbatim": (Verbatim, {}),
}
RETENTIONS = {
    "model": ModelRetention,
    "window": lambda: SlidingWindow(12, 0),
    "window and sinks": lambda: SlidingWindow(12, 3),
    "window and sinks, positions of the cache": lambda: SlidingWindow(12, 3, "cache"),
    "one token": lambda: SlidingWindow(1, 0),
    "plain band": Band,
    "plain stripes": Stripes,
}
LAYOUTS = {
    "contiguous": (Contiguous, False),
    "paged": (Paged, False),
    "paged 5": (lambda: Paged(5), True),
    "plain": (Blocks, False),
}
INDEXES = {
    "none": (NoIndex, LRU),
    "radix": (RadixIndex, LRU),
    "radix, lfu": (RadixIndex, LFU),
    "radix, half_life": (RadixIndex, HalfLife),
    "plain": (TrieIndex, Oldest),
    "plain none": (Unkept, Oldest),
}
EVICTIONS = {"lru": LRU, "lfu": LFU, "half_life": HalfLife, "plain": Oldest}
# overrides beside cache/codec=int4, and the declared distance
SEALING = {
    "contiguous": (["cache=contiguous", "cache.codec.group=10", "cache.num_blocks=2"], 0.0004),
    "radix": (["cache=radix", "cache.codec.group=4", "cache.num_blocks=10"], 0.0004),
    "radix window": (["cache=radix", "cache.codec.group=4", "cache.num_blocks=10", *WINDOW], 0.1),
    "paged": (["cache=paged", "cache.codec.group=8", "cache.layout.block_size=8", "cache.num_blocks=20"], 0.0004),
}
BLOCKS = {"contiguous": 2, "paged-1": 150, "paged-16": 10, "paged-64": 4}  # one long request and a half


def cases(table: dict) -> list:
    return [
        pytest.param(*case.values, marks=case.marks, id=name)
        if hasattr(case, "values")
        else pytest.param(case, id=name)
        for name, case in table.items()
    ]


class TestCodecs(CodecContract):
    @pytest.fixture(autouse=True, params=cases(CODECS))
    def codec(self, request):
        self.factory, declared = request.param
        for name, value in declared.items():
            setattr(self, name, value)

    def make(self):
        return self.factory()


class TestRetentions(RetentionContract):
    @pytest.fixture(autouse=True, params=cases(RETENTIONS))
    def retention(self, request):
        self.factory = request.param

    def make(self):
        return self.factory()


class TestLayouts(LayoutContract):
    @pytest.fixture(autouse=True, params=cases(LAYOUTS))
    def layout(self, request):
        self.factory, self.chosen = request.param

    def make(self):
        return self.factory()


class TestIndexes(IndexContract):
    @pytest.fixture(autouse=True, params=cases(INDEXES))
    def index(self, request):
        self.factory, self.eviction = request.param

    def make(self):
        return self.factory()


class TestEvictions(EvictionContract):
    @pytest.fixture(autouse=True, params=cases(EVICTIONS))
    def policy(self, request):
        self.factory = request.param

    def make(self):
        return self.factory()


class TestReferenceKernel(KernelContract):
    def make(self):
        return ReferenceKernel()


class TestCpuKernel(KernelContract):
    bitwise = True

    def codecs(self):
        return {"verbatim": (NoCodec(), NoCodec()), **PAIRS}

    def make(self):
        return CpuKernel()


@functools.cache
def config(*overrides: str):
    return compose(list(overrides))


class TestCompositions(KVCacheContract):
    @pytest.fixture(autouse=True, params=COMPOSITIONS)
    def composition(self, request):
        layout, _, retention = request.param.split()
        self.overrides = [*COMPOSITIONS[request.param], f"cache.num_blocks={BLOCKS[layout]}"]
        self.bound = None if retention == "model" else 0.05

    def make(self, context):
        return build_cache(config(*self.overrides), context)


class TestSealing(TestCompositions):
    """Codecs that encode whole groups of tokens."""

    @pytest.fixture(autouse=True, params=SEALING)
    def composition(self, request):
        overrides, self.bound = SEALING[request.param]
        self.overrides = [*overrides, "cache/codec=int4"]


class TestDictCache(KVCacheContract):
    def make(self, context):
        return DictCache(context)
