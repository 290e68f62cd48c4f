"""What every kernel promises, of the `triton` kernel. Run by test_triton_interpreter.py."""

from __future__ import annotations

import torch
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

    def make(self):
        return TritonKernel()
