"""Fp8: eight-bit floating point numbers, under a scale per token and KV head or a fixed one per layer.

    format  bits         largest  smallest normal  steps
    e4m3    s eeee mmm   448      2 ** -6          1/8 of a power of two; no infinity, NaN is all ones
    e5m2    s eeeee mm   57344    2 ** -14         1/4 of a power of two

    x ~ scale * value(code)       scale = max|x| / largest, or fixed; code nearest to x / scale, ties to even

What is too large becomes the largest number, infinities too; NaN stays NaN, at its own channel. With a
fixed scale no scale is stored.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433). Shape legend: D size of a vector.
"""

from __future__ import annotations

import numpy as np
from kvframe_plugins.fp8 import scales as fixed_scales
from kvframe_plugins.fp8.formats import FORMATS, Format

from kvframe.errors import OptionError
from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec

LEAST = 2.0**-126  # smallest normal float32


class Fp8(Codec):
    """Float8 codes of one format.

    Args:
        format: e4m3 or e5m2.
        scales: None: one scale per token and KV head. Else the fixed scale of all layers (a number), of each layer
            (a mapping of layer index to a number, or to {k: number, v: number}), or a file of `kvframe calibrate`.
    Raises: OptionError for a value that cannot be.
    """

    exact = False
    affine = True

    def __init__(self, format: str = "e4m3", scales=None):
        if not isinstance(format, str) or format not in FORMATS:
            raise OptionError("format", format, "does not exist", options=FORMATS, fix="{name}=e4m3")
        self.format: Format = FORMATS[format]
        self.peak = self.format.largest
        self.scales = fixed_scales.read(scales, self.peak)
        self._bound: dict[tuple[int, str], Fp8] = {}

    def for_layer(self, layer, kind):
        scale = None if self.scales is None or self.fixed is not None else self.scales.of(layer.index, kind)
        if scale is None:  # there is none to bind, or none for this layer: a conflict
            return self
        if (layer.index, kind) not in self._bound:
            bound = Fp8(self.format.name)
            bound.scales, bound.fixed = self.scales, scale
            self._bound[layer.index, kind] = bound
        return self._bound[layer.index, kind]

    def conflicts(self, others):
        """Fixed scales that are not those of the model."""
        stored = {layer.index for layer, _, _ in others.stored}
        return [] if self.scales is None else list(self.scales.conflicts(stored, len(others.layers), others.codec_key))

    def values(self):
        return self.format.values()

    def planes(self, dim):
        found = {"payload": PlaneSpec((dim,), "uint8")}
        if self.scales is None:
            found["scale"] = PlaneSpec((1,), "float32")
        return found

    def encode(self, x):
        import torch

        x, found = x.float(), {}
        if self.scales is None:
            sizes = x.abs().nan_to_num(nan=0.0, posinf=float("inf"))
            found["scale"] = (sizes.amax(-1, keepdim=True) / self.peak).clamp(LEAST, self.format.most_scale)
            scale = found["scale"]
        else:
            assert self.fixed is not None, "a codec with fixed scales encodes through for_layer"
            scale = torch.tensor(self.fixed, dtype=torch.float32, device=x.device)
        numbers = (x / scale).clamp(-self.peak, self.peak)
        return {"payload": self.format.encode(numbers), **found}

    def decode(self, planes, dtype):
        numbers = self.format.decode(planes["payload"])
        if self.scales is None:
            return numbers.mul_(planes["scale"]).to(dtype)
        return numbers.mul_(float(np.float32(self.fixed))).to(dtype)
