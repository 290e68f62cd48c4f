"""Linear layers in the form that this CPU multiplies fastest.

Layers that multiply the same x become one product (see `products`), of weights that oneDNN has packed for it once. On
a CPU without bf16 instructions torch multiplies bf16 matrices up to eight times slower than fp32 ones, so there the
packed copy is fp32; a product of few rows is bound by the bytes of the weights, and reads the bf16 ones where they lie
(`kvframe.kernels.cpu_linear`). Either way products are summed in fp32 and rounded to the model's dtype once.

    model   CPU                rows    weights
    bf16    bf16 instructions  all     packed bf16
    bf16    none               1-32    as they are, bf16
                               33-     packed fp32
    fp32                       all     packed fp32

Shape legend: M rows, I input size, O output size of a layer, S of all layers of a product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from kvframe.hf.products import Multiply, Product, sets, stacked
from kvframe.kernels.cpu_linear import ROWS, FewRows

log = logging.getLogger(__name__)

SHARE = 0.5  # of the free memory that the copies may take
HINT = 16  # rows for which oneDNN chooses the layout of packed weights
CHECKED = 3  # rows of the product that is tried before any layer is changed


def native_bf16() -> bool:
    """Does this CPU multiply bf16 matrices at the speed of its memory?"""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(module: nn.Module, run: Callable[[], None] = lambda: None) -> int:
    """Gives the linear layers of a bf16 or fp32 model on a CPU their products.

    Args:
        run: a forward of the module, which shows who multiplies the same tensor; by default each is alone.

    Answers the bytes of the packed copies: 0 when there are none (another device or dtype) or when they would take more
    than half of the free memory, and the layers are left as they are.
    """
    found = [parts for parts in sets(module, run) if all(wants_copy(part.weight) for part in parts)]
    weights = {part.weight.data_ptr(): part.weight for parts in found for part in parts}  # tied ones once
    size = sum(weight.numel() * packed_dtype(weight.dtype).itemsize for weight in weights.values())
    if not found:
        return 0
    from kvframe.memory import free_memory

    if size > SHARE * free_memory("cpu"):
        log.warning("linear layers stay as they are, which is slower: copies would take %d bytes", size)
        return 0
    made: dict[tuple[int, ...], Multiply] = {}
    places = [tuple(part.weight.data_ptr() for part in parts) for parts in found]
    for place, parts in zip(places, found):
        if place not in made:
            made[place] = product(parts, packed_dtype(parts[0].weight.dtype))
            if len(made) == 1 and not right(made[place], parts):
                log.warning("linear layers stay as they are: packed weights give other results on this CPU")
                return 0
    for place, parts in zip(places, found):
        Product(parts, made[place])
    return size


def wants_copy(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float32) and weight.device.type == "cpu"


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.bfloat16 and native_bf16() else torch.float32


def product(parts: list[nn.Linear], dtype: torch.dtype) -> Multiply:
    """`x [..., I]` -> `[..., S]`, with a copy of the weights in `dtype`."""
    many, own = packed(parts, dtype), parts[0].weight.dtype
    if dtype is own:
        return many
    layers = [(part.weight.detach(), None if part.bias is None else part.bias.detach()) for part in parts]
    wide = lambda x: many(x.float()).to(own)
    if not FewRows.can(layers):
        return wide
    return ByRows(FewRows(layers), wide)


@contextmanager
def light(module: nn.Module) -> Iterator[None]:
    """Inside the block forwards of a few tokens take no longer than reading the weights; no copies are made."""
    changed = []
    for part in module.modules():
        if type(part) is not nn.Linear or "forward" in vars(part) or not wants_copy(part.weight):
            continue
        layer = part.weight.detach(), None if part.bias is None else part.bias.detach()
        if packed_dtype(part.weight.dtype) is not part.weight.dtype and FewRows.can([layer]):
            Product([part], ByRows(FewRows([layer]), part.forward))
            changed.append(part)
    try:
        yield
    finally:
        for part in changed:
            del part.forward


class ByRows:
    """A product that few rows go through in one way, and many in another."""

    def __init__(self, few: FewRows, many: Multiply):
        self.few, self.many, self._most = few, many, ROWS * few.inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(x) if x.numel() <= self._most else self.many(x)


def packed(parts: list[nn.Linear], dtype: torch.dtype) -> Multiply:
    weight = stacked((part.weight for part in parts), dtype)
    bias = None if parts[0].bias is None else stacked((part.bias for part in parts), dtype)
    if not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight, bias)
    there = torch.ops.mkldnn._reorder_linear_weight(weight, HINT)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, there, bias, "none", [], "")


def right(multiply: Multiply, parts: list[nn.Linear]) -> bool:
    """Does it multiply as torch does?"""
    own = parts[0].weight.dtype
    x = torch.randn(1, CHECKED + ROWS, parts[0].in_features, generator=torch.Generator().manual_seed(0)).to(own)
    allowed = 2**-6 if own is torch.bfloat16 else 1e-4
    for rows in (1, CHECKED, CHECKED + ROWS):
        found = multiply(x[:, :rows]).float()
        wanted = torch.cat([F.linear(x[:, :rows].float(), p.weight.float(), _float(p.bias)) for p in parts], -1)
        if not (found - wanted).abs().max() <= allowed * wanted.abs().max():
            return False
    return True


def _float(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def unpack(module: nn.Module) -> None:
    """Takes the products away again."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__dict__.pop("forward", None)
