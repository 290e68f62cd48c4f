"""The prefill kernel: requests with several new tokens, each tile of queries against all that it may see.

The rows of a tile are pairs of a token and one of the G query heads that share a KV head, so a key that is loaded
serves them all. With G = 3 and tiles of 16 rows, a chunk of 10 tokens (30 rows) has two tiles:

    row    0 1 2 | 3 4 5 | ... | 15         tile 0: tokens 0 .. 4 and head 0 of token 5
    token  0     | 1     | ... | 5          row // G;  head = row % G
    tile 1 begins at row 16: token 5, head 1

The keys of a tile whose queries stand at first .. last, in steps of N, with a window and sinks. `low` is the first key
that the query at `first` sees, `up` the first that all see:

    0 .. sinks      |  ..  | low .. up        | up .. first         | first .. last
    all see them    |  --  | some do (edge)   | all see them        | some do (diagonal)

Where all queries see what is loaded, nothing is masked (`whole`): first the keys 0 .. sinks and up .. first,
and then edge and diagonal with a mask per query. All four begin and end at multiples of N, except for the last.

Under a codec that seals, only the keys before the group of `first` are codes for all queries; where that group begins
before the diagonal (or before the sinks end) the diagonal begins there, and its tiles are open ones (see open_tile.py).

Values that are not finite must not touch who does not see them (see tile.py). That would cost every tile registers, so
the kernel is started twice: the first time it multiplies what is there, and flags tiles that got something not finite;
the second time (CAREFUL) tiles without a flag end at once, and the others are computed again with care.

Shape legend: T tokens, R requests, C new tokens of one, Hq/Hkv heads, G = Hq / Hkv, Dk/Dv sizes, M rows, N keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvframe.kernels.triton.decode import attention_args, attention_meta, scores_plain, seen_plain
from kvframe.kernels.triton.launch import Launch
from kvframe.kernels.triton.layer import Layer
from kvframe.kernels.triton.open_tile import attend_open_tile, spoil_open_tile
from kvframe.kernels.triton.tile import LOG2E, attend_tile, spoil_tile
from kvframe.kernels.weighing import weigh


@triton.jit
def masked_start(i, sunk, sunk_open, low, edge, diagonal, N: tl.constexpr):
    """Where the masked tile number i starts: open ones of the sinks, then those of the edge, then the diagonal."""
    start = tl.where(i < sunk_open + edge, low + (i - sunk_open) * N, diagonal + (i - sunk_open - edge) * N)
    return tl.where(i < sunk_open, (sunk + i) * N, start)


@triton.jit(do_not_specialize=["columns"])
def prefill_kernel(
    q, q_token, q_head, second, s_token, s_head, tables, columns, lengths, starts, tiles,
    k, k_scale, k_table, k_fixed, k_zero, v, v_scale, v_table, v_fixed, v_zero, scale, softcap,
    k_raw, k_bases, v_raw, v_bases, learned, out, out_token, out_head, flags,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_NUMBER: tl.constexpr,
    V_NUMBER: tl.constexpr, K_BITS: tl.constexpr, K_SPAN: tl.constexpr, K_GROUP: tl.constexpr, V_BITS: tl.constexpr,
    V_SPAN: tl.constexpr, V_GROUP: tl.constexpr, CAREFUL: tl.constexpr, HARDWARE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles, KV heads. `tiles` int32 [n, 2]: request, first row. `flags` int8 [n, Hkv, M]: written, and read when
    CAREFUL: something in the row is not finite. (A flag per tile is what triton 3.6 cannot compile for sm_100.)"""
    tile, head = tl.program_id(0), tl.program_id(1)
    flag = flags + (tile * HEADS + head) * M + tl.arange(0, M)
    if CAREFUL:
        if tl.max(tl.load(flag).to(tl.int32), axis=0) == 0:
            return
    r = tl.load(tiles + tile * 2)
    begin = tl.load(tiles + tile * 2 + 1)
    token = tl.load(starts + r)
    chunk = tl.load(starts + r + 1) - token
    past = tl.load(lengths + r) - chunk  # position of the first new token
    row = begin + tl.arange(0, M)
    there = row < chunk * GROUP
    q_pos = past + row // GROUP
    first = past + begin // GROUP
    last = past + (tl.minimum(begin + M, chunk * GROUP) - 1) // GROUP

    heads = head * GROUP + row % GROUP
    tokens = (token + row // GROUP).to(tl.int64)
    d = tl.arange(0, DK)
    inside = there[:, None] & (d < K_DIM)[None, :]
    at = tokens[:, None] * q_token + heads[:, None] * q_head + d[None, :]
    query = tl.load(q + at, mask=inside, other=0.0).to(K_NUMBER)  # [M, DK]
    other = None
    if second is not None:
        at = tokens[:, None] * s_token + heads[:, None] * s_head + d[None, :]
        other = tl.load(second + at, mask=inside, other=0.0).to(K_NUMBER)

    acc = tl.zeros([M, DV], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if learned is not None:
        most = tl.load(learned + heads).to(tl.float32) * LOG2E
        total = tl.full([M], 1.0, tl.float32)
    table = tables + r.to(tl.int64) * columns

    OPEN: tl.constexpr = K_GROUP > 1 or V_GROUP > 1
    diagonal = (first + 1) // N * N
    k_base, v_base = 0, 0
    if K_GROUP > 1:
        diagonal = tl.minimum(diagonal, first // K_GROUP * K_GROUP // N * N)
        k_base = tl.load(k_bases + r)
    if V_GROUP > 1:
        diagonal = tl.minimum(diagonal, first // V_GROUP * V_GROUP // N * N)
        v_base = tl.load(v_bases + r)
    low, up, sunk, sunk_open = 0, 0, 0, 0  # starts of tiles; in numbers of tiles: of sinks, whole and open
    if WINDOW:
        low = tl.maximum(first - WINDOW + 1, 0) // N * N
        up = (tl.maximum(last - WINDOW + 1, 0) + N - 1) // N * N
        up = tl.minimum(up, diagonal)
        sunk = tl.minimum((SINKS + N - 1) // N, low // N)
        if OPEN:
            sunk_open = sunk - tl.minimum(sunk, diagonal // N)
            sunk -= sunk_open
        up = tl.maximum(up, low)
        diagonal = tl.maximum(diagonal, up)
    for i in range(0, sunk + (diagonal - up) // N):
        start = tl.where(i < sunk, i * N, up + (i - sunk) * N)
        acc, most, total = attend_tile(
            acc, most, total, query, other, q_pos, first, last, start, table, head, scale, softcap,
            k, k_scale, k_table, k_fixed, k_zero, v, v_scale, v_table, v_fixed, v_zero,
            HEADS, BLOCK, WINDOW, SINKS, SOFTCAP, K_DIM, V_DIM, DK, DV, N, K_KIND, V_KIND, K_NUMBER, V_NUMBER,
            K_BITS, K_SPAN, K_GROUP, V_BITS, V_SPAN, V_GROUP, True, CAREFUL, HARDWARE, WIDE,
        )  # fmt: skip
    edge = (up - low) // N
    masked = sunk_open + edge + (last - diagonal) // N + 1
    for i in range(0, masked):
        start = masked_start(i, sunk, sunk_open, low, edge, diagonal, N)
        if OPEN:
            acc, most, total = attend_open_tile(
                acc, most, total, query, other, q_pos, first, last, start, table, head, scale, softcap,
                k, k_scale, k_table, k_fixed, k_zero, k_raw, k_base,
                v, v_scale, v_table, v_fixed, v_zero, v_raw, v_base,
                HEADS, BLOCK, WINDOW, SINKS, SOFTCAP, K_DIM, V_DIM, DK, DV, N, K_KIND, V_KIND, K_NUMBER, V_NUMBER,
                K_BITS, K_SPAN, K_GROUP, V_BITS, V_SPAN, V_GROUP, CAREFUL, HARDWARE, WIDE,
            )  # fmt: skip
        else:
            acc, most, total = attend_tile(
                acc, most, total, query, other, q_pos, first, last, start, table, head, scale, softcap,
                k, k_scale, k_table, k_fixed, k_zero, v, v_scale, v_table, v_fixed, v_zero,
                HEADS, BLOCK, WINDOW, SINKS, SOFTCAP, K_DIM, V_DIM, DK, DV, N, K_KIND, V_KIND, K_NUMBER, V_NUMBER,
                K_BITS, K_SPAN, K_GROUP, V_BITS, V_SPAN, V_GROUP, False, CAREFUL, HARDWARE, WIDE,
            )  # fmt: skip

    if CAREFUL:
        for i in range(0, masked):
            start = masked_start(i, sunk, sunk_open, low, edge, diagonal, N)
            if OPEN:
                acc = spoil_open_tile(
                    acc, q_pos, first, last, start, table, head, v, v_table, v_scale, v_zero, v_raw, v_base,
                    HEADS, BLOCK, WINDOW, SINKS, V_DIM, DV, N, V_KIND, V_NUMBER, V_BITS, V_SPAN, V_GROUP, HARDWARE,
                    WIDE,
                )  # fmt: skip
            else:
                acc = spoil_tile(
                    acc, q_pos, first, last, start, table, head, v, v_table, v_scale, v_zero,
                    HEADS, BLOCK, WINDOW, SINKS, V_DIM, DV, N, V_KIND, V_NUMBER, V_BITS, V_SPAN, V_GROUP, HARDWARE,
                    WIDE,
                )  # fmt: skip
    else:  # 0 * NaN is NaN: what is not finite shows in every row
        wild = (tl.abs(acc) < float("inf")) == 0
        tl.store(flag, tl.where(there, tl.max(wild.to(tl.int32), axis=1), 0).to(tl.int8))

    e = tl.arange(0, DV)
    result = acc / total[:, None]
    at = out + tokens[:, None] * out_token + heads[:, None] * out_head + e[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=there[:, None] & (e < V_DIM)[None, :])


def start(q, second, layer: Layer, tables, lengths, starts, tiles, out, raw=None) -> tuple[Launch, Launch]:
    """-> the first start and the careful one."""
    sizes = layer.prefill_tiles()
    args = attention_args(q, second, layer, tables, lengths, starts)
    flags = tiles.new_empty(len(tiles), layer.kv_heads, sizes.rows, dtype=torch.int8)
    args |= {"tiles": tiles, "learned": layer.learned, "out": out, "out_token": out.stride(0),
             "out_head": out.stride(1), "flags": flags}  # fmt: skip
    for name in "kv":
        args[f"{name}_raw"], args[f"{name}_bases"] = (raw or {}).get(name, (None, None))
    meta = attention_meta(prefill_kernel, layer, q.device) | {"M": sizes.rows, "N": sizes.keys}
    grid = len(tiles), layer.kv_heads
    first, second = (
        Launch(prefill_kernel, grid, args, meta | {"CAREFUL": careful}, sizes.warps, sizes.stages)
        for careful in (False, True)
    )
    return first, second


def prefill(
    q: torch.Tensor, second: torch.Tensor | None, layer: Layer, tables: torch.Tensor, lengths: torch.Tensor,
    starts: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor,
    raw: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> None:  # fmt: skip
    """Attention of the tokens in `tiles` into `out [T, Hq, Dv]`.

    Args:
        q, second: [T, Hq, Dk], last stride 1; second: queries for keys < sinks, or None.
        tables, lengths, starts: of the step, see GroupPlan and StepPlan.
        tiles: int32 [n, 2], request and first row; `layer.prefill_tiles().rows` rows each.
        raw: for K and V that seal, under "k" and "v": vectors `[n, Hkv, D]` in full precision, and `base` int32 [R]
            (see work.Groups).
    """
    for launch in start(q, second, layer, tables, lengths, starts, tiles, out, raw):
        launch.run()


def prefill_plain(q, second, layer: Layer, tables, lengths, starts, tiles, out: torch.Tensor, raw=None) -> None:
    """The same in plain torch."""
    rows = layer.prefill_tiles().rows
    for r, begin in tiles.tolist():
        t, length = int(starts[r]), int(lengths[r])
        chunk = int(starts[r + 1]) - t
        row = torch.arange(begin, min(begin + rows, chunk * layer.group))
        token = torch.arange(int(row[0]) // layer.group, int(row[-1]) // layer.group + 1)
        q_pos, pos = length - chunk + token, torch.arange(length)
        seen = pos <= q_pos[:, None]
        if layer.window:
            seen &= (q_pos[:, None] - pos < layer.window) | (pos < layer.sinks)
        block = tables[r].cpu()[pos // layer.block_size].long()
        live = seen.any(0) & (block != 0)
        slots = (block * layer.block_size + pos % layer.block_size)[live]
        pos, seen = pos[live], seen[:, live].to(q.device)
        tokens = (t + token).to(q.device)
        own = {kind: (-int(base[r]), vectors) for kind, (vectors, base) in (raw or {}).items()}
        k, v = (seen_plain(layer, kind, q_pos, pos, slots.to(q.device), own) for kind in "kv")
        s = scores_plain(q[tokens], None if second is None else second[tokens], layer, pos, k)
        s = s.masked_fill(~seen[:, None], float("-inf")).transpose(0, 1)  # [Hq, C, L]
        if layer.learned is not None:
            sink = (layer.learned.float() * LOG2E.value)[:, None, None].expand(-1, s.shape[1], 1)
            s = torch.cat([s, sink], -1)
        p = torch.softmax(s * (1 / LOG2E.value), -1)[..., : len(pos)]
        result = torch.stack([weigh(p[:, None, i : i + 1], v[i].transpose(0, 1), seen[i : i + 1])[:, 0, 0]
                              for i in range(len(v))]).to(out.dtype)  # [C, Hq, Dv]  # fmt: skip
        for i in row.tolist():
            for head in range(i % layer.group, layer.q_heads, layer.group):
                out[t + i // layer.group, head] = result[i // layer.group - int(token[0]), head]
