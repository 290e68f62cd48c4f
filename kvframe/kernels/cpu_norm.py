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

from kvframe.kernels import cpu

NEXT, ROWS, N, X, OUT, W, EPS, OFFSET = range(1, 9)
NARGS = 9
PIECE = 8  # rows
ALONE = 32  # rows that one thread has done before another one would be awake


def norm_function(stamp: int):
    """The C callback."""
    from numba import float32

    from kvframe.kernels.cpu_vector import (
        add8,
        f32,
        fetch_add,
        fma,
        load,
        load8,
        mul8,
        pointer,
        put8,
        shift,
        splat,
        sum_of,
    )  # fmt: skip

    def norm(address):
        a, _stamp = pointer("int64", address), stamp
        n, rows, reals = load(a, N), load(a, ROWS), pointer("float64", address)
        w, eps, offset = pointer("bfloat16", load(a, W)), load(reals, EPS), splat(float32(load(reals, OFFSET)))
        while True:
            piece = fetch_add(a, NEXT, 1)
            if piece * PIECE >= rows:
                return
            stop = (piece + 1) * PIECE if (piece + 1) * PIECE < rows else rows
            for r in range(piece * PIECE, stop):
                x, out = shift(pointer("bfloat16", load(a, X)), r * n), shift(pointer("bfloat16", load(a, OUT)), r * n)
                s0, s1 = splat(f32(0.0)), splat(f32(0.0))
                for i in range(0, n // 16 * 16, 16):
                    y, z = load8(x, i), load8(x, i + 8)
                    s0, s1 = fma(y, y, s0), fma(z, z, s1)
                for i in range(n // 16 * 16, n, 8):
                    y = load8(x, i)
                    s0 = fma(y, y, s0)
                scale = splat(float32(1.0 / (sum_of(add8(s0, s1)) / n + eps) ** 0.5))
                for i in range(0, n, 8):
                    put8(out, i, mul8(mul8(load8(x, i), scale), add8(load8(w, i), offset)))

    return norm


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """`x [..., N]`, `weight [N]`, both bf16 on the host, N a multiple of 8 -> `[..., N]`."""
    x = x if x.is_contiguous() else x.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // n
    args = (ctypes.c_int64 * NARGS)()
    struct.pack_into("7q2d", args, 0, 0, 0, rows, n, x.data_ptr(), out.data_ptr(), weight.data_ptr(), eps, offset)
    threads = min(torch.get_num_threads(), -(-rows // ALONE)) if cpu.team() is not None else 1
    cpu.run(cpu.callback("norm"), ctypes.addressof(args), threads)
    return out


def norm_plain(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The same in torch."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + offset)).to(x.dtype)
