"""Root mean square norms of bf16 rows in one pass (numba), instead of six operations of torch.

    out = x / sqrt(mean(x ** 2) + eps) * (w + offset)        offset: 0, or 1 where a model stores w - 1 (Gemma)

Sums are fp32, the result is rounded once.

    args [NARGS] int64      index  name     meaning
                            0      (not used)
                            1      NEXT     counter: next piece of PIECE rows
                            2      ROWS, N  number of rows, numbers of a row (a multiple of 8)
                            4..    X, OUT, W (addresses), EPS, OFFSET (float64 bits)

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from kvframe.kernels import native

ROWS, N, X, OUT, W, EPS, OFFSET = range(2, 9)
NARGS = 9
PIECE = 8  # rows
ALONE = 32  # rows that one thread has done before another one would be awake


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """`x [..., N]`, `weight [N]`, both bf16 on the host, N a multiple of 8 -> `[..., N]`."""
    x = x if x.is_contiguous() else x.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // n
    args = (ctypes.c_int64 * NARGS)()
    struct.pack_into("7q2d", args, 0, 0, 0, rows, n, x.data_ptr(), out.data_ptr(), weight.data_ptr(), eps, offset)
    threads = min(native.threads(), -(-rows // ALONE))
    native.run(native.callback("norm"), ctypes.addressof(args), threads)
    return out


def norm_plain(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The same in torch."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)
