"""The store kernel: encodes K and V of a step's tokens and writes them to their slots, in one launch.

One program has a few tokens of one KV head, K or V. With 6 tokens, 4 in a program, and slots [35, 36, 90, 7, 8, 0]:

    program (0, h, 0)   tokens 0..3, keys of head h      to slots 35 36 90 7, as in load.py
    program (1, h, 1)   tokens 4 5 - -, values of head h to slots 8 and 0 (the null block: padding)

Codes are those that `Codec.peak` promises: scale = max|x| / peak within its limits, the code nearest to x / scale, ties
to even. Divisions are exact (`div_rn`): the plain ones of a GPU are off by a bit now and then.

Shape legend: T tokens, Hkv heads, D size of a vector, P the power of two it is padded to, n tokens of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe.kernels.triton import sides
from kvframe.kernels.triton.bits import float8_codes
from kvframe.kernels.triton.launch import Launch
from kvframe.kernels.triton.layer import Layer, padded
from kvframe.kernels.triton.load import E4M3, INT8, PLAIN, place

FEW, MANY, TOKENS = 4, 16, 64  # tokens of a program, up to TOKENS tokens of a step and behind
LEAST = tl.constexpr(2.0**-126)  # smallest normal float32


@triton.jit
def put(x, token_stride, head_stride, tokens, there, slots, head, payload, scale, fixed, peak, most,
        HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """One head's vectors of `tokens [n]` to `slots [n]`, where `there [n]`."""
    d = tl.arange(0, P)
    mask = there[:, None] & (d < D)[None, :]
    where = tokens.to(tl.int64) * token_stride + head * head_stride
    vector = tl.load(x + where[:, None] + d[None, :], mask=mask, other=0)  # [n, P]
    places = place(slots, head, HEADS)
    at = payload + places[:, None] * D + d[None, :]
    if KIND == PLAIN:
        tl.store(at, vector.to(payload.dtype.element_ty), mask=mask)
    else:
        vector = vector.to(tl.float32)
        size, none = tl.abs(vector), vector != vector
        if scale is None:
            divisor = tl.full(tokens.shape, 1.0, tl.float32) * fixed
        else:
            largest = tl.max(tl.where(none, 0.0, size), axis=1)  # [n]
            divisor = tl.div_rn(largest, tl.full(tokens.shape, 1.0, tl.float32) * peak)
            divisor = tl.minimum(tl.maximum(divisor, LEAST), most)
            if KIND == INT8:  # eight bits have no NaN: the scale says it
                divisor = tl.where(tl.max(none.to(tl.int32), axis=1) > 0, float("nan"), divisor)
            tl.store(scale + places, divisor, mask=there)
        steps = tl.div_rn(vector, tl.broadcast_to(divisor[:, None], vector.shape))
        numbers = tl.where(steps > peak, peak, tl.where(steps < -peak, -peak, steps))
        if KIND == INT8:
            whole = (numbers + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: float32 has no bits behind the point there
            codes = tl.where(whole != whole, 0.0, whole).to(tl.int8)
        elif KIND == E4M3:
            codes = float8_codes(numbers, vector, 3, 7)
        else:
            codes = float8_codes(numbers, vector, 2, 15)
        tl.store(at, codes, mask=mask)


@triton.jit(do_not_specialize=["count"])
def store_kernel(
    k, k_token, k_head, v, v_token, v_head, slots, count,
    k_payload, k_scale, k_fixed, k_peak, k_most, v_payload, v_scale, v_fixed, v_peak, v_most,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, TOKENS: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of tokens, KV heads, keys and values. `count` tokens; strides in numbers. ONLY: 0 keys, 1 values, 2
    both."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    there = tokens < count
    where = tl.load(slots + tokens, mask=there, other=0)
    kind = tl.program_id(2)
    if ONLY < 2:
        kind = ONLY
    if kind == 0:
        put(k, k_token, k_head, tokens, there, where, head, k_payload, k_scale, k_fixed, k_peak, k_most,
            HEADS, K_DIM, DK, K_KIND)  # fmt: skip
    else:
        put(v, v_token, v_head, tokens, there, where, head, v_payload, v_scale, v_fixed, v_peak, v_most,
            HEADS, V_DIM, DV, V_KIND)  # fmt: skip


def start(k: torch.Tensor, v: torch.Tensor, layer: Layer, slots: torch.Tensor, only: int = 2) -> Launch:
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    tokens = FEW if k.shape[0] <= TOKENS else MANY
    args = {
        "k": k, "k_token": k.stride(0), "k_head": k.stride(1), "v": v, "v_token": v.stride(0), "v_head": v.stride(1),
        "slots": slots, "count": k.shape[0],
    }  # fmt: skip
    for name, side in (("k", layer.k), ("v", layer.v)):
        args |= {f"{name}_payload": side.payload, f"{name}_scale": side.scale, f"{name}_fixed": float(side.fixed),
                 f"{name}_peak": float(side.peak or 1.0), f"{name}_most": float(side.most)}  # fmt: skip
    meta = {
        "HEADS": layer.kv_heads, "K_DIM": layer.k.dim, "V_DIM": layer.v.dim, "DK": padded(layer.k.dim),
        "DV": padded(layer.v.dim), "K_KIND": layer.k.kind, "V_KIND": layer.v.kind, "TOKENS": tokens,
        "ONLY": only,
    }  # fmt: skip
    return Launch(store_kernel, (-(-k.shape[0] // tokens), layer.kv_heads, 2 if only == 2 else 1), args, meta)


def store(k: torch.Tensor, v: torch.Tensor, layer: Layer, slots: torch.Tensor, only: int = 2) -> None:
    """Codes of `k [T, Hkv, Dk]` and `v [T, Hkv, Dv]` to `slots [T]`; both sides must be `written`. only: 0 keys, 1
    values, 2 both."""
    start(k, v, layer, slots, only).run()


def store_plain(k: torch.Tensor, v: torch.Tensor, layer: Layer, slots: torch.Tensor, only: int = 2) -> None:
    """The same in plain torch."""
    for x, side in ((k, layer.k), (v, layer.v))[slice(None) if only == 2 else slice(only, only + 1)]:
        payload = side.payload.view(-1, *side.payload.shape[2:])
        if side.kind == sides.PLAIN:
            payload[slots] = x.to(payload.dtype)
            continue
        x = x.float()
        if side.scale is None:
            scale = torch.tensor(side.fixed, dtype=torch.float32, device=x.device)
        else:
            largest = x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)
            scale = (largest / side.peak).clamp(2.0**-126, side.most)
            if side.kind == sides.INT8:
                scale = scale.where(~x.isnan().any(-1, keepdim=True), float("nan"))
            side.scale.view(-1, *side.scale.shape[2:])[slots] = scale
        numbers = (x / scale).clamp(-side.peak, side.peak)
        if side.kind == sides.INT8:
            payload[slots] = numbers.round().nan_to_num().to(torch.int8)
        else:
            dtype = torch.float8_e4m3fn if side.kind == sides.E4M3 else torch.float8_e5m2
            payload[slots] = numbers.to(dtype).view(torch.uint8)
