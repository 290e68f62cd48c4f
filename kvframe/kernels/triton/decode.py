"""The decode kernel: requests with one query each, their contexts cut into parts that are read side by side.

One program has one request, one KV head and one part of `split` keys. The G query heads that share the KV head are the
rows of its tile, filled up to 16 for the tensor cores, so each key is read once. Parts are cut by position, and what a
program computes depends on its request only; `reduce` adds the parts up in a fixed order. So a request's output is bit
by bit the same whoever else is in the batch, and however many parts the longest neighbour has.

Which part is program i? Without a window, part i. With one only parts that may hold something visible get a program:
those with sinks, then those of the window. With split 256, window 300, 4 sinks, a request of 1300 tokens:

    position   0 .. 255 | 256 .. 511 | 512 .. 767 | 768 .. 1023 | 1024 .. 1279 | 1280 .. 1299
    visible    0 .. 3   |            |            | 1000 ..     | all          | all
    program    0        |            |            | 1           | 2            | 3

first part of the window = (1300 - 300) // 256 = 3; program i >= 1 has part 3 + i - 1.

Under a codec that seals, the keys of the query's own group are read from its tail (see open_tile.py), by the programs
that have their positions.

Shape legend: R requests that decode, P parts, Hq/Hkv heads, G = Hq / Hkv, Dk/Dv sizes, DK/DV padded, M rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe.kernels.triton.launch import NUMBERS, Launch, casts_float8, interpreted
from kvframe.kernels.triton.layer import Layer, padded
from kvframe.kernels.triton.open_tile import attend_open_tile
from kvframe.kernels.triton.tile import attend_tile

LOG2E = 1.4426950408889634


@triton.jit(do_not_specialize=["columns", "parts"])
def decode_kernel(
    q, q_token, q_head, second, s_token, s_head, tables, columns, lengths, starts, rows,
    k, k_scale, k_table, k_fixed, k_zero, v, v_scale, v_table, v_fixed, v_zero, scale, softcap,
    tail_rows, k_tail, v_tail, acc_out, most_out, total_out, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    SINKS: tl.constexpr, SOFTCAP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
    K_NUMBER: tl.constexpr, V_NUMBER: tl.constexpr, K_BITS: tl.constexpr, K_SPAN: tl.constexpr, K_GROUP: tl.constexpr,
    V_BITS: tl.constexpr, V_SPAN: tl.constexpr, V_GROUP: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid: rows, KV heads, parts. `columns` of a table; `rows`: the requests, or None for all. `tail_rows` int32 [R]:
    of each request in k_tail and v_tail `[P, G, Hkv, D]`; all None without a codec that seals."""
    row, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r = row
    if rows is not None:
        r = tl.load(rows + row)
    length = tl.load(lengths + r)
    part = i
    low = 0
    if WINDOW:
        low = tl.maximum(length - WINDOW, 0)
        before: tl.constexpr = (SINKS + SPLIT - 1) // SPLIT
        if i >= before:
            part = tl.maximum(low // SPLIT, before) + i - before
    begin = part * SPLIT
    if begin >= length:
        return
    end = tl.minimum(begin + SPLIT, length)
    if WINDOW:  # no tiles without a visible key
        if end <= low:
            end = tl.minimum(end, SINKS)
        elif begin >= SINKS:
            begin = tl.maximum(begin, low // N * N)

    token = tl.load(starts + r)
    g, d = tl.arange(0, M), tl.arange(0, DK)
    heads = head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < K_DIM)[None, :]
    at = token.to(tl.int64) * q_token + heads[:, None] * q_head + d[None, :]
    query = tl.load(q + at, mask=inside, other=0.0).to(K_NUMBER)  # [M, DK]
    other = None
    if second is not None:
        at = token.to(tl.int64) * s_token + heads[:, None] * s_head + d[None, :]
        other = tl.load(second + at, mask=inside, other=0.0).to(K_NUMBER)

    acc = tl.zeros([M, DV], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    q_pos = tl.zeros([M], tl.int32) + (length - 1)
    table = tables + r.to(tl.int64) * columns
    sealed = end
    if K_GROUP > 1 or V_GROUP > 1:  # tiles before this position hold codes only
        k_own, v_own = (length - 1) // K_GROUP * K_GROUP, (length - 1) // V_GROUP * V_GROUP
        sealed = tl.minimum(tl.minimum(k_own, v_own) // N * N, end)
    for start in range(begin, sealed, N):
        acc, most, total = attend_tile(
            acc, most, total, query, other, q_pos, length - 1, length - 1, start, table, head, scale, softcap,
            k, k_scale, k_table, k_fixed, k_zero, v, v_scale, v_table, v_fixed, v_zero,
            HEADS, BLOCK, WINDOW, SINKS, SOFTCAP, K_DIM, V_DIM, DK, DV, N, K_KIND, V_KIND, K_NUMBER, V_NUMBER,
            K_BITS, K_SPAN, K_GROUP, V_BITS, V_SPAN, V_GROUP, True, False, HARDWARE, WIDE,
        )  # fmt: skip
    if K_GROUP > 1 or V_GROUP > 1:
        tail = tl.load(tail_rows + r)
        for start in range(tl.maximum(begin, sealed), end, N):
            acc, most, total = attend_open_tile(
                acc, most, total, query, other, q_pos, length - 1, length - 1, start, table, head, scale, softcap,
                k, k_scale, k_table, k_fixed, k_zero, k_tail, tail * K_GROUP - k_own,
                v, v_scale, v_table, v_fixed, v_zero, v_tail, tail * V_GROUP - v_own,
                HEADS, BLOCK, WINDOW, SINKS, SOFTCAP, K_DIM, V_DIM, DK, DV, N, K_KIND, V_KIND, K_NUMBER, V_NUMBER,
                K_BITS, K_SPAN, K_GROUP, V_BITS, V_SPAN, V_GROUP, False, HARDWARE, WIDE,
            )  # fmt: skip

    out = (row.to(tl.int64) * parts + i) * (HEADS * GROUP) + heads  # [M]
    tl.store(most_out + out, most, mask=g < GROUP)
    tl.store(total_out + out, total, mask=g < GROUP)
    e = tl.arange(0, DV)
    mask = (g < GROUP)[:, None] & (e < V_DIM)[None, :]
    tl.store(acc_out + out[:, None] * V_DIM + e[None, :], acc, mask=mask)


def attention_args(q, second, layer: Layer, tables, lengths, starts) -> dict:
    """What the decode and the prefill kernel both take."""
    args = {"q": q, "q_token": q.stride(0), "q_head": q.stride(1), "second": second,
            "s_token": 0 if second is None else second.stride(0), "s_head": 0 if second is None else second.stride(1),
            "tables": tables, "columns": tables.stride(0), "lengths": lengths, "starts": starts,
            "scale": layer.scale, "softcap": layer.softcap}  # fmt: skip
    for name, side in (("k", layer.k), ("v", layer.v)):
        args |= {name: side.payload, f"{name}_scale": side.scale, f"{name}_table": side.table,
                 f"{name}_fixed": float(side.fixed), f"{name}_zero": side.zero}  # fmt: skip
    return args


def attention_meta(kernel, layer: Layer, device: torch.device) -> dict:
    numbers = layer.k.number(layer.dtype, weighed=False), layer.v.number(layer.dtype, weighed=True)
    return {
        "HEADS": layer.kv_heads, "GROUP": layer.group, "BLOCK": layer.block_size, "WINDOW": layer.window,
        "SINKS": layer.sinks, "SOFTCAP": layer.softcap != 0, "K_DIM": layer.k.dim, "V_DIM": layer.v.dim,
        "DK": padded(layer.k.dim), "DV": padded(layer.v.dim), "K_KIND": layer.k.kind, "V_KIND": layer.v.kind,
        "K_NUMBER": NUMBERS[numbers[0]], "V_NUMBER": NUMBERS[numbers[1]], "HARDWARE": casts_float8(device),
        "WIDE": interpreted(kernel), "K_BITS": layer.k.bits, "K_SPAN": layer.k.span, "K_GROUP": layer.k.group,
        "V_BITS": layer.v.bits, "V_SPAN": layer.v.span, "V_GROUP": layer.v.group,
    }  # fmt: skip


def start(q, second, layer: Layer, tables, lengths, starts, rows, n: int, parts: int, tail_rows=None):
    """-> Launch, and `acc`, `most`, `total` that it fills."""
    tiles, heads = layer.decode_tiles(), layer.q_heads
    acc = q.new_empty(n, parts, heads, layer.v.dim, dtype=torch.float32)
    most, total = (q.new_empty(n, parts, heads, dtype=torch.float32) for _ in range(2))
    args = attention_args(q, second, layer, tables, lengths, starts)
    for name, side in (("k", layer.k), ("v", layer.v)):
        args[f"{name}_tail"] = None if side.tail is None else side.tail.plane
    args["tail_rows"] = tail_rows if layer.seals else None
    args |= {"rows": rows, "acc_out": acc, "most_out": most, "total_out": total, "parts": parts}
    meta = attention_meta(decode_kernel, layer, q.device)
    meta |= {"SPLIT": layer.split, "M": tiles.rows, "N": tiles.keys}
    return Launch(decode_kernel, (n, layer.kv_heads, parts), args, meta, tiles.warps, tiles.stages), acc, most, total


def decode(
    q: torch.Tensor, second: torch.Tensor | None, layer: Layer, tables: torch.Tensor, lengths: torch.Tensor,
    starts: torch.Tensor, rows: torch.Tensor | None, n: int, parts: int, tail_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What each part of n requests' contexts adds.

    Args:
        q, second: [T, Hq, Dk], last stride 1; second: queries for keys < sinks, or None.
        tables, lengths, starts: of the step, see GroupPlan and StepPlan.
        rows: int32 [n], the requests with one query each; None: all n of them.
        parts: programs of the longest context, see Layer.most_parts.
        tail_rows: int32 [R], `rows` of the step; needed under a codec that seals.
    Returns: acc [n, P, Hq, Dv], most [n, P, Hq], total [n, P, Hq] in float32, see tile.py. Parts that a request does
        not have are not written.
    """
    launch, *out = start(q, second, layer, tables, lengths, starts, rows, n, parts, tail_rows)
    launch.run()
    return tuple(out)


def decode_plain(q, second, layer: Layer, tables, lengths, starts, rows, n: int, parts: int, tail_rows=None):
    """The same in plain torch; what a request does not have is 0, and -inf as `most`."""
    acc = q.new_zeros(n, parts, layer.q_heads, layer.v.dim, dtype=torch.float32)
    most = acc.new_full((n, parts, layer.q_heads), float("-inf"))
    total = torch.zeros_like(most)
    for row, r in enumerate(range(n) if rows is None else rows.tolist()):
        length, t = int(lengths[r]), int(starts[r])
        sinks = -(-layer.sinks // layer.split)
        first = max(max(length - layer.window, 0) // layer.split, sinks) if layer.window else 0
        for i in range(layer.parts(length)):
            part = i if not layer.window or i < sinks else first + i - sinks
            pos = torch.arange(part * layer.split, min((part + 1) * layer.split, length))
            if layer.window:
                pos = pos[(pos >= length - layer.window) | (pos < layer.sinks)]
            block = tables[r].cpu()[pos // layer.block_size].long()
            pos, slots = pos[block != 0], (block * layer.block_size + pos % layer.block_size)[block != 0]
            if not len(pos):
                continue
            raw = None if tail_rows is None else tails_plain(layer, int(tail_rows[r]), length)
            q_pos = torch.tensor([length - 1])
            k, v = (seen_plain(layer, kind, q_pos, pos, slots.to(q.device), raw) for kind in "kv")
            s = scores_plain(q[t : t + 1], None if second is None else second[t : t + 1], layer, pos, k)
            s = s[0]  # [Hq, L]
            most[row, i] = s.amax(-1)
            top = most[row, i].where(most[row, i] != float("-inf"), 0.0)
            p = torch.exp2(s - top[:, None])
            total[row, i] = p.sum(-1)
            acc[row, i] = torch.einsum("hl,lhd->hd", p, v[0])
    return acc, most, total


def tails_plain(layer: Layer, row: int, length: int) -> dict[str, tuple[int, torch.Tensor]]:
    """For K and V that seal: where the group of the last token begins, and its vectors."""
    found = {}
    for kind, side in (("k", layer.k), ("v", layer.v)):
        if side.tail is not None:
            found[kind] = (length - 1) // side.group * side.group, side.tail.plane[row]
    return found


def seen_plain(layer: Layer, kind: str, q_pos, pos, slots, raw) -> torch.Tensor:
    """What queries at `q_pos [C]` see of K or V at `pos [L]`: `[C, L, Hq, D]`. raw: as `tails_plain` answers it."""
    side = getattr(layer, kind)
    numbers, scale = side.numbers(slots)
    seen = (numbers * scale)[None].expand(len(q_pos), *numbers.shape)
    if side.group > 1:
        first, vectors = raw[kind]
        own = q_pos[:, None] // side.group == pos[None, :] // side.group  # [C, L]
        vectors = vectors[(pos - first).clamp(0, len(vectors) - 1).to(slots.device)].float()
        seen = torch.where(own[..., None, None].to(slots.device), vectors[None], seen)
    return seen.repeat_interleave(layer.group, dim=2)


def scores_plain(q, second, layer: Layer, pos, k) -> torch.Tensor:
    """`q [C, Hq, Dk]` and keys `k [C, L, Hq, Dk]` -> scores in base 2 `[C, Hq, L]`."""
    s = torch.einsum("chd,clhd->chl", q.float(), k)
    if second is not None:
        s = torch.where((pos < layer.sinks).to(q.device), torch.einsum("chd,clhd->chl", second.float(), k), s)
    s = s * layer.scale
    if layer.softcap:
        s = layer.softcap * torch.tanh(s / layer.softcap)
    return s * LOG2E
