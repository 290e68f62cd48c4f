"""Int8: eight bits per channel, and a scale per token and KV head.

    symmetric      x ~ scale * code               code in -127..127, scale = max|x| / 127
    asymmetric     x ~ zero + scale * (code + 128)    code in -128..127, zero = min x, scale = (max x - min x) / 255

A vector is encoded from itself alone: a huge number costs the precision of its own vector (of its group of channels)
and of no other. Codes are nearest, ties to even, so that |error| <= scale / 2 unless clipped. A row of zeros
comes back as zeros, and an asymmetric row of one number as that number. An infinity counts as the largest number that
the scale can stand for. Eight bits have no NaN: it makes the scale, and thereby the vector, NaN.

Source: Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339), for vector-wise scales; percentiles clip as in
Wu et al., "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602). Shape legend: D size of a vector, g
channels of a group, n = D / g.
"""

from __future__ import annotations

from kvframe.errors import ConfigError
from kvframe.interfaces import Codec
from kvframe.types import PlaneSpec

PEAK = 127.0
LEAST = 2.0**-126  # smallest normal float32
MOST = 2.6793883890187504e36  # the largest float32 whose product with PEAK is finite
FAR = 2.0**126  # asymmetric: numbers beyond it count as this one, so that no difference overflows
HALF_LEAST, HALF_MOST = 2.0**-24, 65504.0
SCALES = ("float32", "float16")


class Int8(Codec):
    """Symmetric or asymmetric integers with vector-wise scales.

    Args:
        symmetric: False stores the smallest number as a zero point (float32) and uses all 256 codes.
        percentile: how much of a vector's numbers, in percent from the smallest size up, the scale must reach; what is
            larger is clipped. 100 clips nothing.
        group_size: channels that share a scale; None: all of the vector.
        scale_dtype: float32, or float16, rounded up so that the bound stands; what exceeds 8.3e6 is clipped then.
    Raises: ConfigError for a value that cannot be.
    """

    exact = False

    def __init__(self, symmetric: bool = True, percentile: float = 100, group_size=None, scale_dtype: str = "float32"):
        number = isinstance(percentile, int | float) and not isinstance(percentile, bool)
        size = group_size is None or (type(group_size) is int and group_size >= 1)
        rules = (
            ("symmetric", symmetric, isinstance(symmetric, bool), ["true", "false"], "true"),
            ("percentile", percentile, number and 0 < percentile <= 100, ["a number in (0, 100]"], "100"),
            ("group_size", group_size, size, ["null", "an integer >= 1"], "null"),
            ("scale_dtype", scale_dtype, scale_dtype in SCALES, SCALES, "float32"),
        )  # fmt: skip
        for name, value, fine, options, fix in rules:
            if not fine:
                raise ConfigError(
                    f"cache.codec.{name}={value!r} cannot be used", options=options, fix=f"cache.codec.{name}={fix}"
                )
        self.symmetric, self.percentile = symmetric, percentile
        self.group_size, self.scale_dtype = group_size, scale_dtype
        self.affine = symmetric and group_size is None
        self.peak = PEAK if self.affine and percentile == 100 and scale_dtype == "float32" else None

    def conflicts(self, others):
        """Vectors whose size is not a multiple of the group."""
        sizes = {dim for layer in others.layers for dim in (layer.k_dim, layer.v_dim)}
        bad = [] if self.group_size is None else sorted(dim for dim in sizes if dim % self.group_size)
        return [
            f"group_size={self.group_size} does not divide head size {dim}: cache.codec.group_size=null" for dim in bad
        ]

    def planes(self, dim):
        n = 1 if self.group_size is None else dim // self.group_size
        found = {"payload": PlaneSpec((dim,), "int8"), "scale": PlaneSpec((n,), self.scale_dtype)}
        if not self.symmetric:
            found["zero"] = PlaneSpec((n,), "float32")
        return found

    def encode(self, x):
        import torch

        groups = x.float().unflatten(-1, (-1, self.group_size or x.shape[-1]))  # [..., Hkv, n, g]
        if self.symmetric:
            scale = self._scale(self._reach(groups.abs()) / PEAK)  # [..., Hkv, n, 1]
            codes = torch.round(groups / scale.float()).clamp(-PEAK, PEAK)
            more = {}
        else:
            groups = groups.clamp(-FAR, FAR)
            zero = -self._reach(-groups)
            scale = self._scale((self._reach(groups) - zero) / 255.0)
            codes = torch.round((groups - zero) / scale.float()).clamp(0.0, 255.0) - 128.0
            more = {"zero": zero.squeeze(-1)}
        codes = torch.nan_to_num(codes).to(torch.int8).flatten(-2)
        return {"payload": codes, "scale": scale.squeeze(-1), **more}

    def _reach(self, x):
        """`x [..., g]` -> `[..., 1]`: the largest number, or the one that `percentile` of all numbers do not exceed."""
        import torch

        if self.percentile == 100:
            return x.amax(-1, keepdim=True)
        ordered = x.sort(-1).values  # NaN comes last
        place = self.percentile / 100 * (x.shape[-1] - 1)
        low = int(place)
        reach, part = ordered[..., low : low + 1], place - low
        if part:
            reach = reach * (1 - part) + ordered[..., low + 1 : low + 2] * part
        return torch.where(ordered[..., -1:].isnan(), ordered[..., -1:], reach)

    def _scale(self, scale):
        """The scale as it is stored: never 0, never infinite, never smaller than asked for (up to 65504 in float16)."""
        import torch

        if self.scale_dtype == "float32":
            return scale.clamp(LEAST, MOST)
        scale = scale.clamp(HALF_LEAST, HALF_MOST)
        half = scale.half()
        up = (half.view(torch.int16) + 1).view(torch.float16)
        return torch.where(half.float() < scale, up, half)

    def decode(self, planes, dtype):
        payload, scale = planes["payload"], planes["scale"].float().unsqueeze(-1)  # scale [..., Hkv, n, 1]
        numbers = payload.float().unflatten(-1, (scale.shape[-2], -1))
        if self.symmetric:
            x = numbers * scale
        else:
            x = (numbers + 128.0) * scale + planes["zero"].unsqueeze(-1)
        return x.flatten(-2).to(dtype)
