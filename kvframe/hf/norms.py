"""Root mean square norms of a bf16 model on a CPU as one compiled pass each (`kvframe.kernels.cpu_norm`).

Which modules are such norms is found by what they do, not by their names: a module without children whose only
parameter is one weight [N] is called on a few rows, small ones among them so that eps shows, and its answer is held
against the formula under each small number among its attributes.
"""

from __future__ import annotations

import torch
from torch import nn

from kvframe.hf import opaque
from kvframe.kernels.cpu_norm import norm, norm_plain

NEAR = 2**-6  # of the largest number: two roundings to bf16


def pack(module: nn.Module) -> int:
    """Gives the norms of a bf16 model their compiled form; answers how many. A second call changes nothing."""
    found = 0
    for part in module.modules():
        form = form_of(part)
        if form is not None:
            part.forward = forward_of(part, *form)
            found += 1
    return found


def unpack(module: nn.Module) -> None:
    for part in module.modules():
        if getattr(vars(part).get("forward"), "is_norm", False):
            del part.forward


def form_of(part: nn.Module) -> tuple[float, float] | None:
    """(eps, offset) of a root mean square norm; None: it is none, or not one that the kernel takes."""
    parameters = dict(part.named_parameters())
    if list(parameters) != ["weight"] or list(part.children()) or "forward" in vars(part):
        return None
    weight = parameters["weight"]
    if weight.dtype is not torch.bfloat16 or weight.device.type != "cpu" or weight.dim() != 1:
        return None
    if len(weight) % 8 or not weight.is_contiguous():
        return None
    x = torch.randn(1, 4, len(weight), generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([1.0, 30.0, 1e-2, 1e-3])[:, None]).bfloat16()
    try:
        with torch.inference_mode():
            wanted = part(x)
    except Exception:  # it wants other arguments
        return None
    if not isinstance(wanted, torch.Tensor) or wanted.shape != x.shape or wanted.dtype is not x.dtype:
        return None
    numbers = [value for value in vars(part).values() if isinstance(value, float) and 0 < value < 1e-2]
    for eps in numbers:
        for offset in (0.0, 1.0):
            if all(_near(row, other) for row, other in zip(norm_plain(x, weight.detach(), eps, offset)[0], wanted[0])):
                return eps, offset
    return None


def _near(row: torch.Tensor, other: torch.Tensor) -> bool:
    row, other = row.float(), other.float()
    return bool((row - other).abs().max() <= NEAR * other.abs().max())


def forward_of(part: nn.Module, eps: float, offset: float):
    weight, own = part.weight, part.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.bfloat16 or torch.compiler.is_compiling():  # a graph makes one pass of it by itself
            return own(x)
        return opaque.one(norm, x, weight, eps, offset)

    forward.is_norm = True
    return forward
