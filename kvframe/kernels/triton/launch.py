"""Starting a kernel, or compiling it for a device that is not there.

The arguments of a start say everything that a compiler has to know, so both come from one Launch: tests compile ahead
of time exactly what a step would run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from kvframe.kernels.triton import interpreting

NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Attributes:
    kernel: a function of triton.jit. grid: programs per axis.
    args: name -> tensor, int, float or None. meta: name -> constant.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    meta: dict[str, Any]
    warps: int = 4
    stages: int = 2

    def run(self) -> None:
        if 0 in self.grid:
            return
        if interpreted(self.kernel):
            interpreting.mend()
        self.kernel[self.grid](**self.args, **self.meta, num_warps=self.warps, num_stages=self.stages)

    def source(self):
        """What `triton.compile` takes, as if the kernel had been started with these arguments."""
        from triton.compiler import ASTSource

        constants, signature, attrs = dict(self.meta), {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            value = self.args.get(name, self.meta.get(name))
            if name in self.meta or value is None:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
                attrs[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                # sizes that change from step to step are not compiled in: each kind would be compiled anew
                if isinstance(value, int) and value % 16 == 0 and name not in self.kernel.do_not_specialize:
                    attrs[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attrs)

    def compile(self, capability: int):
        """The compiled kernel for sm_<capability>. Needs no device, and no TRITON_INTERPRET."""
        from triton.backends.compiler import GPUTarget

        options = {"num_warps": self.warps, "num_stages": self.stages}
        return triton.compile(self.source(), target=GPUTarget("cuda", capability, 32), options=options)


def interpreted(kernel) -> bool:
    """The kernel was defined under TRITON_INTERPRET=1."""
    return isinstance(kernel, InterpretedFunction)


@functools.cache
def casts_float8(device: torch.device) -> bool:
    """The chip turns e4m3 into numbers by itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
