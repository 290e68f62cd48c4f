"""The two float8 formats: bits to numbers and back, in plain integer operations that run on every device.

Encoding rounds to nearest, ties to even. A float32 has 23 bits behind the point; of these m stay. Adding a little less
than half of what is cut, and one more when the last bit that stays is odd, carries where it must round up:

    e4m3, 1.1875 = 1.0011000...    1.001|1000...  + 0.000|0111... + odd 1    ->  1.010
          1.0625 = 1.0001000...    1.000|1000...  + 0.000|0111... + even 0   ->  1.000

Below the smallest normal number all steps are equal. Adding the number whose last bit is worth one step makes float32
round there, and the bits of the sum count the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

NAN = 0x7F


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        name, dtype: here and in torch. mantissa: bits; bias: of the exponent. largest: number.
        most_scale: the largest float32 whose product with `largest` is finite.
        infinite: the highest exponent means infinity and NaN (else only all ones is NaN).
    """

    name: str
    dtype: str
    mantissa: int
    bias: int
    largest: float
    most_scale: float
    infinite: bool

    def values(self) -> np.ndarray:
        """float32 [256]: the number of each code."""
        return _values(self)

    def encode(self, x):
        """float32 in [-largest, largest] or NaN -> uint8 codes, same shape."""
        if x.device.type == "cpu":  # the same bits from torch, several times faster; see tests/test_fp8.py
            import torch

            return x.to(getattr(torch, self.dtype)).view(torch.uint8)
        return self.encode_bits(x)

    def encode_bits(self, x):
        """The same by integer operations."""
        import torch

        m, bias = self.mantissa, self.bias
        bits = x.contiguous().view(torch.int32)
        size, sign = bits & 0x7FFFFFFF, (bits >> 24) & 0x80
        odd = (size >> (23 - m)) & 1
        normal = ((size + ((1 << (22 - m)) - 1) + odd) >> (23 - m)) - ((127 - bias) << m)
        step = torch.tensor(2.0 ** (24 - bias - m), dtype=torch.float32, device=x.device)
        fine = (size.view(torch.float32) + step).view(torch.int32) - step.view(torch.int32)
        code = torch.where(size < ((128 - bias) << 23), fine, normal)
        code = torch.where(size > 0x7F800000, NAN, code)
        return (code | sign).to(torch.uint8)

    def decode(self, codes):
        """uint8 codes -> float32, same shape."""
        import torch

        if codes.device.type == "cpu":
            return codes.contiguous().view(getattr(torch, self.dtype)).float()
        return self.decode_bits(codes)

    def decode_bits(self, codes):
        """The same through the table of 256 values."""
        import torch

        return torch.tensor(self.values(), device=codes.device)[codes.long()]


@cache
def _values(format: Format) -> np.ndarray:
    m, codes = format.mantissa, np.arange(256)
    exponent, fraction = (codes & 0x7F) >> m, (codes & ((1 << m) - 1)) / (1 << m)
    size = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - format.bias), fraction * 2.0 ** (1 - format.bias))
    if format.infinite:
        size = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), size)
    else:
        size = np.where((codes & 0x7F) == NAN, np.nan, size)
    values = np.where(codes < 128, size, -size).astype(np.float32)
    values.flags.writeable = False
    return values


FORMATS = {
    "e4m3": Format("e4m3", "float8_e4m3fn", 3, 7, 448.0, 7.595588094610019e35, False),
    "e5m2": Format("e5m2", "float8_e5m2", 2, 15, 57344.0, 5.934053198914077e33, True),
}
