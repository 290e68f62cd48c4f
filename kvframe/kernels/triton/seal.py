"""The seal kernel: K or V of a step under a codec that seals (see kvframe.tails), groups encoded where they are full.

One program has one group of tokens of one request and one KV head. With G = 4, a request of 6 tokens that gets 5 (t in
the tail, n new):

    position   4 5 6 7 | 8 9 10         tiles of the request: groups at 4 and 8
               t t n n | n n n -        4..7 is full: encoded into its block (CODES)
    raw        t t n n   n n n          what queries of a chunk see of their own groups (RAW)
    tail                 8 9 10 -       the group of the last token (TAIL)

A decode step is one launch (CODES and TAIL; there is one group per request, and the tail is all that its query sees).
Steps with chunks are two: CODES and RAW for all groups, then TAIL, since a group at the end lies where the one at the
beginning is read.

Shape legend: T tokens of a step, R requests, P rows of tails, G sealing group, Hkv KV heads, D size of a vector, B
bytes of its codes, PER codes of a byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe.kernels.triton.launch import Launch
from kvframe.kernels.triton.layer import padded
from kvframe.kernels.triton.ranged import entry, factors, pack, ranged_codes
from kvframe.kernels.triton.sides import FAR, Side
from kvframe.kernels.triton.work import Groups


@triton.jit
def encode(x, there, d, payload, scale, zero, slots, head, most, HEADS: tl.constexpr, BLOCK: tl.constexpr,
           GROUP: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, SPAN: tl.constexpr,
           PER: tl.constexpr):  # fmt: skip
    """The numbers `d [B, PER]` of a full group, `x [G, B, PER]` at `slots [G]` where `there [G]`."""
    dtype: tl.constexpr = scale.dtype.element_ty
    inside = there[:, None, None] & (d < D)[None, :, :]
    none = x != x
    low = tl.where(inside & (none == 0), x, float("inf"))
    high = tl.where(inside & (none == 0), x, float("-inf"))
    bad = (inside & none).to(tl.int32)
    places = slots * HEADS + head  # [G]
    if SPAN == 0:
        scales, zeros = factors(
            tl.min(low, axis=0), tl.max(high, axis=0), tl.max(bad, axis=0) > 0, most, dtype, BITS
        )  # [B, PER]
        at = (tl.min(tl.where(there, entry(slots, BLOCK, GROUP), 1 << 60), axis=0) * HEADS + head) * D + d
        tl.store(scale + at, scales.to(dtype), mask=d < D)
        tl.store(zero + at, zeros.to(dtype), mask=d < D)
        codes = ranged_codes(x, tl.broadcast_to(scales[None], x.shape), tl.broadcast_to(zeros[None], x.shape), BITS)
    else:
        parts: tl.constexpr = (D + SPAN - 1) // SPAN
        scales, zeros = tl.zeros_like(x), tl.zeros_like(x)
        for i in range(0, parts):
            mine = (d // SPAN == i)[None, :, :]
            lows = tl.min(tl.min(tl.where(mine, low, float("inf")), axis=2), axis=1)
            highs = tl.max(tl.max(tl.where(mine, high, float("-inf")), axis=2), axis=1)
            bads = tl.max(tl.max(tl.where(mine, bad, 0), axis=2), axis=1) > 0
            its, least = factors(lows, highs, bads, most, dtype, BITS)  # [G]
            tl.store(scale + places * parts + i, its.to(dtype), mask=there)
            tl.store(zero + places * parts + i, least.to(dtype), mask=there)
            scales = tl.where(mine, its[:, None, None], scales)
            zeros = tl.where(mine, least[:, None, None], zeros)
        codes = ranged_codes(x, scales, zeros, BITS)
    b = tl.arange(0, codes.shape[1])
    at = payload + places[:, None] * (D // PER) + b[None, :]
    tl.store(at, pack(codes, BITS, PER), mask=there[:, None] & (b < D // PER)[None, :])


@triton.jit(do_not_specialize=["columns"])
def seal_kernel(
    x, x_token, x_head, tables, columns, lengths, starts, tail_rows, tiles, base,
    payload, scale, zero, most, tail, raw,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr,
    SPAN: tl.constexpr, G: tl.constexpr, B: tl.constexpr, PER: tl.constexpr, CODES: tl.constexpr, RAW: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """Grid: groups, KV heads. `tiles` int32 [n, 2]: request and position of a group's first token, or None: the group
    of the last token of each request. `base` int32 [R]: the token at position p is raw vector base + p."""
    r = tl.program_id(0)
    head = tl.program_id(1)
    if tiles is not None:
        r = tl.load(tiles + tl.program_id(0) * 2)
    length = tl.load(lengths + r)
    if length == 0:  # a row of padding
        return
    token = tl.load(starts + r)
    past = length - (tl.load(starts + r + 1) - token)
    begin = (length - 1) // GROUP * GROUP
    if tiles is not None:
        begin = tl.load(tiles + tl.program_id(0) * 2 + 1)
    j = tl.arange(0, G)
    pos = begin + j
    there = (j < GROUP) & (pos < length)
    new = there & (pos >= past)
    d = tl.arange(0, B)[:, None] * PER + tl.arange(0, PER)[None, :]  # [B, PER]
    inside = (d < D)[None, :, :]
    at = (token + pos - past).to(tl.int64) * x_token + head * x_head
    vectors = tl.load(x + at[:, None, None] + d[None, :, :], mask=new[:, None, None] & inside, other=0.0)  # [G, B, PER]
    held = tl.load(tail_rows + r).to(tl.int64) * GROUP + j
    held = tail + (held * HEADS + head)[:, None, None] * D + d[None, :, :]
    if CODES or RAW:
        old = (there & (pos < past))[:, None, None]
        whole = tl.where(old, tl.load(held, mask=old & inside, other=0.0), vectors)
    if RAW:
        at = (tl.load(base + r).to(tl.int64) + pos) * HEADS + head
        tl.store(raw + at[:, None, None] * D + d[None, :, :], whole, mask=there[:, None, None] & inside)
    if CODES:
        if begin + GROUP <= length:
            block = tl.load(tables + r.to(tl.int64) * columns + begin // BLOCK).to(tl.int64)
            slots = block * BLOCK + begin % BLOCK + j
            encode(whole.to(tl.float32), there, d, payload, scale, zero, slots, head, most,
                   HEADS, BLOCK, GROUP, D, BITS, SPAN, PER)  # fmt: skip
    if TAIL:
        tl.store(held, vectors, mask=new[:, None, None] & inside)


def starts_of(x, side: Side, block_size: int, tables, lengths, starts, tail_rows, groups: Groups | None, raw):
    """-> the Launches of a step, in their order; arguments as in `seal`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    heads, per, size = side.payload.shape[2], 8 // side.bits, padded(side.dim)
    args = {
        "x": x, "x_token": x.stride(0), "x_head": x.stride(1), "tables": tables, "columns": tables.stride(0),
        "lengths": lengths, "starts": starts, "tail_rows": tail_rows, "base": groups and groups.base,
        "payload": side.payload, "scale": side.scale, "zero": side.zero, "most": float(side.most),
        "tail": side.tail.plane, "raw": raw,
    }  # fmt: skip
    meta = {
        "HEADS": heads, "BLOCK": block_size, "GROUP": side.group, "D": side.dim, "BITS": side.bits, "SPAN": side.span,
        "G": 1 << (side.group - 1).bit_length(), "B": size // per, "PER": per,
    }  # fmt: skip
    warps = min(16, max(4, meta["G"] * size // 1024))  # so many numbers lie in registers

    def launch(codes: bool, tail: bool, tiles: torch.Tensor | None = None) -> Launch:
        grid = len(lengths if tiles is None else tiles), heads
        modes = {"CODES": codes, "RAW": tiles is not None, "TAIL": tail}
        return Launch(seal_kernel, grid, args | {"tiles": tiles}, meta | modes, warps)

    if groups is None:
        return [launch(codes=True, tail=True)]
    return [launch(codes=True, tail=False, tiles=groups.tiles), launch(codes=False, tail=True)]


def seal(
    x: torch.Tensor, side: Side, block_size: int, tables: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor,
    tail_rows: torch.Tensor, groups: Groups | None = None, raw: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Takes a step's keys or values.

    Args:
        x: [T, Hkv, D]. tables, lengths, starts, tail_rows: of the step, see GroupPlan and StepPlan (`rows`).
        groups: which groups get a token; None where every request gets one token.
        raw: [n, Hkv, D] with n = groups.starts[-1], filled; None with `groups` None.
    """
    for launch in starts_of(x, side, block_size, tables, lengths, starts, tail_rows, groups, raw):
        launch.run()


def seal_plain(x, side: Side, block_size: int, tables, lengths, starts, tail_rows, groups=None, raw=None) -> None:
    """The same in plain torch."""
    size, tail = side.group, side.tail.plane
    for r, length in enumerate(lengths.tolist()):
        if not length:
            continue
        token, stop, row = int(starts[r]), int(starts[r + 1]), int(tail_rows[r])
        past = length - (stop - token)
        first = past // size * size
        whole = torch.cat([tail[row, : past - first], x[token:stop].to(tail.dtype)])  # positions first .. length - 1
        for begin in range(first, length - size + 1, size):
            block = int(tables[r, begin // block_size])
            encode_plain(whole[begin - first :][:size].float(), side, block, begin % block_size)
        if raw is not None:
            at = int(groups.base[r])
            raw[at + first : at + length] = whole
        begin = max((length - 1) // size * size, past)
        tail[row, begin % size : (length - 1) % size + 1] = x[token + begin - past : stop].to(tail.dtype)


def encode_plain(x: torch.Tensor, side: Side, block: int, offset: int) -> None:
    """The definition of kvframe.types.Ranged for a full group `x [G, Hkv, D]`, float32."""
    dtype, levels, span = side.scale.dtype, (1 << side.bits) - 1, side.span or 1
    missing = -x.shape[-1] % span
    parts = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], missing)], -1).unflatten(-1, (-1, span))
    axis = 0 if side.span == 0 else -1
    low, high = (f(axis, keepdim=True).clamp(-side.most, side.most) for f in (parts.amin, parts.amax))
    zero = _toward(low, dtype, -torch.inf).to(x.device)
    scale = _toward((high - zero) / levels, dtype, torch.inf).to(x.device)
    steps = (parts.clamp(-FAR, FAR) - zero) / scale.clamp(min=2.0**-126)
    codes = steps.round().nan_to_num(0.0).clamp(0, levels).to(torch.uint8).flatten(-2)[..., : x.shape[-1]]
    shifts = torch.arange(0, 8, side.bits, dtype=torch.uint8, device=x.device)
    packed = (codes.unflatten(-1, (-1, 8 // side.bits)) << shifts).sum(-1).to(torch.uint8)
    side.payload[block, offset : offset + side.group] = packed
    for plane, values in ((side.scale, scale), (side.zero, zero)):
        if side.span == 0:
            plane[block, offset // side.group] = values[0, ..., 0].to(dtype)
        else:
            plane[block, offset : offset + side.group] = values[..., 0].to(dtype)


def _toward(x: torch.Tensor, dtype: torch.dtype, end: float) -> torch.Tensor:
    """float32 x rounded to dtype, in the direction of `end`."""
    near, x, most = x.cpu().to(dtype), x.cpu(), torch.finfo(dtype).max
    wrong = near.float() > x if end < 0 else near.float() < x
    return torch.where(wrong, torch.nextafter(near, torch.full_like(near, end)), near).float().clamp(-most, most)
