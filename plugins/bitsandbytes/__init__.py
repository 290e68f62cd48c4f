"""Codecs of the library bitsandbytes, to compare with: NF4 and 8-bit blockwise.

Sources: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023 (arXiv:2305.14314) for NF4, the
16 quantiles of a normal distribution; Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022
(arXiv:2110.02861) for the dynamic 8-bit type. Each block of numbers has its largest absolute value as scale (float32).

The library cuts a tensor into blocks of at least 32 (8-bit: 64) numbers, wherever they come from. Here each vector of
a token and head is filled up with zeros to whole blocks, so no block reaches into another token's vector; zeros change
no scale, and their codes are not stored. A NaN makes its block NaN; an infinity counts as the largest float32.

    D = 80, blocks of 64      [64 numbers][16 numbers, 48 zeros]     two scales, 80 codes kept
"""

from __future__ import annotations

import importlib.util
import math

from kvframe.errors import MissingPackageError, OptionError
from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec

PACKAGE = "bitsandbytes"


class Blockwise(Codec):
    """What both codecs share.

    Args:
        block: most numbers that share a scale; of a vector that is shorter there is one block.
    Raises: OptionError for a size that the library does not know; MissingPackageError without the library.
    """

    exact = False
    bits: int
    sizes: tuple[int, ...]

    def __init__(self, block: int = 64):
        if isinstance(block, bool) or not isinstance(block, int) or block not in self.sizes:
            raise OptionError("block", block, options=[str(size) for size in self.sizes], fix="{name}=64")
        if importlib.util.find_spec(PACKAGE) is None:
            raise MissingPackageError(
                f"cache/codec={type(self).__name__.lower()} needs the package {PACKAGE!r}, which is not installed",
                fix=f"pip install {PACKAGE}",
            )
        self.block = block

    def planes(self, dim):
        codes = PlaneSpec((math.ceil(dim * self.bits / 8),), "uint8")
        return {"payload": codes, "absmax": PlaneSpec((math.ceil(dim / self.block),), "float32")}

    def encode(self, x):
        import torch

        lead, dim = x.shape[:-1], x.shape[-1]
        whole = torch.nn.functional.pad(x.float(), (0, -dim % self.block)).contiguous()  # [..., blocks * block]
        kept = math.ceil(dim * self.bits / 8)
        if not whole.numel():
            empty = x.new_empty(*lead, math.ceil(dim / self.block), dtype=torch.float32)
            return {"payload": x.new_empty(*lead, kept, dtype=torch.uint8), "absmax": empty}
        bad = whole.unflatten(-1, (-1, self.block)).isnan().any(-1)  # [..., blocks]; neither type has a code for NaN
        codes, absmax = self.quantize(whole.nan_to_num())
        absmax = absmax.reshape(*lead, -1).masked_fill(bad, float("nan"))
        return {"payload": codes.reshape(*lead, -1)[..., :kept], "absmax": absmax}

    def decode(self, planes, dtype):
        import torch

        codes, absmax = planes["payload"], planes["absmax"].contiguous()
        dim = codes.shape[-1] * 8 // self.bits
        missing = absmax.shape[-1] * self.block * self.bits // 8 - codes.shape[-1]
        codes = torch.nn.functional.pad(codes, (0, missing)).contiguous()  # [..., blocks * block * bits / 8]
        if not codes.numel():
            return torch.empty(*codes.shape[:-1], dim, dtype=dtype, device=codes.device)
        return self.dequantize(codes, absmax)[..., :dim].to(dtype)

    def conflicts(self, others):
        wrong = {dim for _, _, dim in others.stored if dim * self.bits % 8}
        if not wrong:
            return []
        sizes, fix = " and ".join(map(str, sorted(wrong))), others.choose_codec("bnb8")
        return [f"two codes share a byte, and heads of {sizes} numbers do not fill theirs: {fix}"]


class NF4(Blockwise):
    """4-bit NormalFloat of QLoRA through bitsandbytes, blockwise within each token and head."""

    bits = 4
    sizes = (32, 64, 128, 256, 512, 1024, 2048, 4096)

    def quantize(self, whole):
        import bitsandbytes.functional as library

        codes, state = library.quantize_4bit(whole, blocksize=self.block, quant_type="nf4")
        return codes, state.absmax

    def dequantize(self, codes, absmax):
        import bitsandbytes.functional as library
        import torch

        shape = (*codes.shape[:-1], codes.shape[-1] * 2)
        state = library.QuantState(
            absmax=absmax.view(-1),
            shape=torch.Size(shape),
            dtype=torch.float32,
            blocksize=self.block,
            code=library.get_4bit_type("nf4", device=codes.device),
            quant_type="nf4",
        )
        return library.dequantize_4bit(codes.view(-1, 1), state).view(shape)


class BNB8(Blockwise):
    """8-bit dynamic type of bitsandbytes, blockwise within each token and head."""

    bits = 8
    sizes = (64, 128, 256, 512, 1024, 2048, 4096)

    def quantize(self, whole):
        import bitsandbytes.functional as library

        codes, state = library.quantize_blockwise(whole, blocksize=self.block)
        return codes, state.absmax

    def dequantize(self, codes, absmax):
        import bitsandbytes.functional as library

        table = library.create_dynamic_map().to(codes.device)
        return library.dequantize_blockwise(codes, absmax=absmax.view(-1), code=table, blocksize=self.block)
