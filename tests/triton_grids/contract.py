"""What every kernel promises, of the `triton` kernel. Run by test_triton_interpreter.py."""

from __future__ import annotations

import torch
from kvframe_plugins.int4 import Int4
from kvframe_plugins.no_codec import NoCodec
from test_kernel_codes import PAIRS

from kvframe.kernels.triton.kernel import TritonKernel
from kvframe.testing.contracts.kernel import KernelContract

USED = ("int8", "e4m3", "e5m2", "table", "v only", "two")


class TestTritonKernel(KernelContract):
    bitwise = True
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def codecs(self):
        return {"verbatim": (NoCodec(), NoCodec()), **{name: PAIRS[name] for name in USED}}

    def sealed(self):
        keys, few = Int4(group=8), Int4(bits=2, group=6, value_group=5, scale_dtype="bfloat16")
        return {
            "int4": (keys, keys.for_layer(None, "v")),
            "groups that differ": (keys, few.for_layer(None, "v")),
            "keys only": (Int4(bits=8, group=4, scale_dtype="float32"), PAIRS["int8"][1]),
        }

    def make(self):
        return TritonKernel()
