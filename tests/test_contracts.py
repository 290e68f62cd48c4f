"""Every built-in part and composition under exactly the contract suites that other packages subclass."""

from __future__ import annotations

import importlib.util

import pytest
from kvframe_plugins.fp8 import Fp8
from kvframe_plugins.int4 import Int4
from kvframe_plugins.int8 import Int8
from kvframe_plugins.mixed import Mixed
from kvframe_plugins.no_codec import NoCodec

from kvframe.testing import CodecContract

CODECS = {
    "none": (NoCodec, {}),
    "int8": (Int8, {"bound": 0.004}),
    "int8 asymmetric": (lambda: Int8(symmetric=False), {"bound": 0.004}),
}

class TestCodecs(CodecContract):
    @pytest.fixture(autouse=True, params=CODECS)
    def codec(self, request):
        self.factory, options = CODECS[request.param]
        for name, value in options.items():
            setattr(self, name, value)

    def make(self):
        return self.factory()

from kvframe_plugins.half_life import HalfLife
from kvframe_plugins.lfu import LFU
from kvframe_plugins.lru import LRU
from kvframe_plugins.contiguous import Contiguous
from kvframe_plugins.paged import Paged
from kvframe_plugins.radix import RadixIndex
from kvframe_plugins.no_index import NoIndex
from kvframe_plugins.sliding_window import SlidingWindow
from kvframe_plugins.model_retention import ModelRetention
from kvframe.testing import EvictionContract, IndexContract, LayoutContract, RetentionContract
from kvframe.testing.parts import *
from kvframe.testing.trie import TrieIndex

def variants(contract, cases):
    class Test(contract):
        @pytest.fixture(autouse=True, params=cases)
        def factory(self, request):
            self.make_one = cases[request.param]
        def make(self):
            return self.make_one()
    return Test

TestEvictions = variants(EvictionContract, {"lru": LRU, "lfu": LFU, "half": HalfLife, "oldest": Oldest})
TestIndexes = variants(IndexContract, {"radix": RadixIndex, "none": NoIndex, "trie": TrieIndex, "unkept": Unkept})
TestLayouts = variants(LayoutContract, {"paged": Paged, "contiguous": Contiguous, "blocks": Blocks, "big": lambda: Blocks(64)})
TestRetentions = variants(RetentionContract, {"model": ModelRetention, "sw": lambda: SlidingWindow(12, 3), "sw0": lambda: SlidingWindow(12, 0), "c": lambda: SlidingWindow(12,3,"cache"), "band": Band, "band7": lambda: Band(7,2, False)})

from kvframe.testing import KernelContract
from kvframe.kernels.cpu import CpuKernel
from kvframe.kernels.reference import ReferenceKernel
class TestKernels(variants(KernelContract, {"reference": ReferenceKernel, "cpu": CpuKernel})):
    pass

from kvframe.testing import KVCacheContract
from dict_cache import DictCache
class TestDict(KVCacheContract):
    def make(self, context):
        return DictCache(context)

from strategies import COMPOSITIONS, context_for
from kvframe.config import build_cache, compose
SMALL = {"contiguous": 2, "paged-1": 150, "paged-16": 10, "paged-64": 4}
KL = {"window": 0.03, "window+sinks": 0.03, "model": None}
import functools
@functools.cache
def config(name, blocks):
    return compose([*COMPOSITIONS[name], f"cache.num_blocks={blocks}"])
class TestCompositions(KVCacheContract):
    @pytest.fixture(autouse=True, params=COMPOSITIONS)
    def composition(self, request):
        self.name = request.param
        self.bound = KL[self.name.split()[-1]]
    def make(self, context):
        blocks = SMALL[self.name.split()[0]]
        return build_cache(config(self.name, blocks), context)
