"""Rotary embeddings of a few tokens in one pass (numba), instead of seven operations of torch.

    out = x * cos + [-x2 | x1] * sin        x = [x1 | x2], halves of a head

Each product and the sum are rounded to the dtype as torch rounds them, so results are the same bit by bit.

    args [NARGS] int64      index  name        meaning
                            0      (not used)
                            1      NEXT        counter: next token
                            2..    T, H, D     tokens, heads, size of a head (a multiple of 16)
                            5..    X, X_T, X_H           address; numbers between tokens, between heads
                            8..    COS, SIN, C_T, S_T    addresses [T, D]; numbers between tokens
                            12     OUT                   address [T, H, D]

Source: Su et al., RoFormer, 2021; halves as GPT-NeoX has them.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from kvframe.kernels import native

T, H, D, X, X_T, X_H, COS, SIN, C_T, S_T, OUT = range(2, 13)
NARGS = 13
ALONE = 1 << 14  # numbers that one thread has turned before another one would be awake


def can_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Are these `x [1, H, T, D]`, `cos [1, 1, T, D]` and `sin` alike, in a dtype and of a size that `rotate` takes?"""
    fine = x.dim() == 4 and len(x) == 1 and cos.shape == sin.shape == (1, 1, *x.shape[2:]) and not x.shape[3] % 16
    known = x.dtype in (torch.bfloat16, torch.float32) and x.dtype is cos.dtype is sin.dtype
    return fine and known and x.device.type == "cpu"


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [1, H, T, D]`, `cos [1, 1, T, D]`, `sin [1, 1, T, D]` -> `[1, H, T, D]`, heads of a token side by side.

    Only for what `can_rotate` takes: nothing is checked here.
    """
    _, heads, tokens, size = x.shape
    x, cos, sin = (y if y.stride(3) == 1 else y.contiguous() for y in (x, cos, sin))
    out = torch.empty(1, tokens, heads, size, dtype=x.dtype)
    args = (ctypes.c_int64 * NARGS)()
    struct.pack_into(
        "13q", args, 0, 0, 0, tokens, heads, size, x.data_ptr(), x.stride(2), x.stride(1), cos.data_ptr(),
        sin.data_ptr(), cos.stride(2), sin.stride(2), out.data_ptr(),
    )  # fmt: skip
    threads = native.threads(out.numel() > ALONE)
    name = "bfloat16" if x.dtype is torch.bfloat16 else "float32"
    native.run(native.callback("rotate", name), ctypes.addressof(args), min(threads, tokens))
    return out.transpose(1, 2)


def rotate_plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same in torch."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin
