"""Linear layers on CPUs without bf16 instructions.

There a bf16 matrix product of torch is up to eight times slower than the same one in fp32, and a product with one
row is bound by the bytes of the weights, where bf16 is the faster one. So each `nn.Linear` keeps its bf16 weight and
gets an fp32 copy; a call takes the copy from MANY rows on. Either way products are summed in fp32 and rounded to bf16
once.

Shape legend: M rows, I input size, O output size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

log = logging.getLogger(__name__)

MANY = 5  # rows from which the fp32 copy is faster (SmolLM2: bf16 wins at 4 rows, fp32 at 6)
SHARE = 0.5  # of the free memory that the copies may take


def native_bf16() -> bool:
    """Does this CPU multiply bf16 matrices at the speed of its memory?"""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(module: nn.Module) -> int:
    """Gives the linear layers of a bf16 model on such a CPU their fp32 copies.

    Answers the bytes of the copies: 0 when they would not help (another device or dtype, a CPU with bf16
    instructions) or would take more than half of the free memory.
    """
    layers = [part for part in module.modules() if type(part) is nn.Linear and wants_copy(part.weight)]
    weights = {part.weight.data_ptr(): part.weight for part in layers}  # tied weights once
    size = sum(4 * weight.numel() for weight in weights.values())
    if not layers or native_bf16():
        return 0
    from kvframe.memory import free_memory

    if size > SHARE * free_memory("cpu"):
        log.warning("linear layers stay in bf16, which is slow on this CPU: fp32 copies would take %d bytes", size)
        return 0
    copies = {pointer: weight.detach().float() for pointer, weight in weights.items()}
    for part in layers:
        part.forward = packed_forward(part, copies[part.weight.data_ptr()])
    return size


def wants_copy(weight: torch.Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and weight.device.type == "cpu"


def packed_forward(part: nn.Linear, copy: torch.Tensor):
    """`forward` of a linear layer with an fp32 `copy [O, I]` of its weight: `x [..., I]` -> `[..., O]`."""
    weight, bias = part.weight, part.bias
    wide_bias = None if bias is None else bias.detach().float()

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() < MANY * x.shape[-1] or x.dtype is not torch.bfloat16:
            return F.linear(x, weight, bias)
        return F.linear(x.float(), copy, wide_bias).to(torch.bfloat16)

    return forward


def unpack(module: nn.Module) -> None:
    """Takes the copies away again."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__dict__.pop("forward", None)


@contextmanager
def unpacked(module: nn.Module) -> Iterator[None]:
    """Inside the block linear layers multiply as torch does; afterwards with the copies again that they had."""
    layers = [part for part in module.modules() if type(part) is nn.Linear]
    packed = [(part, vars(part)["forward"]) for part in layers if "forward" in vars(part)]
    unpack(module)
    try:
        yield
    finally:
        for part, forward in packed:
            part.forward = forward
