"""Attention of a prefill chunk on the CPU: gather what it may see once, then GEMMs in tiles of queries.

No tensor grows with chunk x context x heads: scores exist for one tile of TILE_Q queries (and TILE_K keys) at a time.

A mask is no wall for NaN and infinities: `score + -inf` is NaN for scores of NaN and inf (of values: see `weighing`).
Whether there are any among the keys and values that not all queries of the chunk see is asked once per layer, and only
then the tiles go the careful way.

Shape legend: C new tokens of the request, c of a tile, L visible tokens, l of a tile, S block_size, Hq/Hkv query/KV
heads, G = Hq / Hkv, Dk/Dv sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from kvframe.interfaces import Codec
from kvframe.kernels.weighing import harmless, weigh
from kvframe.storage import LayerStorage
from kvframe.types import LayerSpec

TILE_Q = 256  # queries that attend at once
TILE_K = 1024  # keys at once where scaled_dot_product_attention cannot help
SMALL = 1 << 18  # numbers of a mask that is converted once for all layers
HUGE = 2.0**60  # a number of a key whose scores may overflow
FEW_MORE = 512  # keys that are looked at in less time than it takes to leave them out


@dataclass(slots=True)
class Chunk:
    """The tokens [start, stop) of a step, all of one request.

    Attributes:
        spans: per range of visible positions the ids of its blocks, int64, and the slots to keep of these blocks laid
            end to end: a slice, or indices where blocks are missing.
        tiles: `(first query, last query + 1, first key, last key + 1, mask bool [c, l])`, counted from the first query
            of the chunk and from the first visible key.
        apart: how many of the visible keys, the first ones, meet a second query.
        partly: ranges that hold all visible keys which some query of the chunk may not see; empty: all keys.
    """

    start: int
    stop: int
    spans: list[tuple[torch.Tensor, slice | torch.Tensor]]
    tiles: list[tuple[int, int, int, int, torch.Tensor]]
    apart: int
    partly: list[slice]
    _added: dict = field(default_factory=dict)

    def added(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask of tile i as a summand of scores, 0 or -inf, kept for the next layer; a large one as it is, whose
        conversion costs little beside its tile."""
        if (i, dtype) not in self._added:
            mask = self.tiles[i][-1]
            if mask.numel() <= SMALL:
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
            self._added[i, dtype] = mask
        return self._added[i, dtype]


def make_chunk(
    start: int, stop: int, first: int, table, window: int | None, sinks: int, block_size: int, apart: bool = False
) -> Chunk:
    """Chunk of tokens [start, stop) whose first position is `first`; `table [B]` is the request's; apart: the sinks
    meet a second query.

    With block 4, window 6 and 2 sinks, the queries 13..15 see positions 0..1 and 8..15. The spans are block 0 of the
    table, slots 0:2, and blocks 2 and 3 of the table, slots 0:8.
    """
    end = first + stop - start
    low = 0 if window is None else max(first - window + 1, 0)
    spans, visible = [], []
    for a, b in ((0, min(sinks, low)), (low, end)):
        if a >= b:
            continue
        head = a // block_size  # logical block where the range begins
        logical = np.arange(head, (b - 1) // block_size + 1)
        pos, alive = np.arange(a, b), table[logical] != 0
        if alive.all():
            keep = slice(a - head * block_size, b - head * block_size)
        else:
            pos = pos[alive[pos // block_size - head]]
            rank = np.cumsum(alive) - 1  # number of a logical block among those that are there
            keep = torch.from_numpy(rank[pos // block_size - head] * block_size + pos % block_size)
        spans.append((torch.from_numpy(table[logical[alive]].astype(np.int64)), keep))
        visible.append(pos)
    k_pos = np.concatenate(visible)  # [L], ascending
    tiles = []
    for a in range(first, end, TILE_Q):
        b = min(a + TILE_Q, end)
        left = 0 if sinks or window is None else int(np.searchsorted(k_pos, a - window + 1))
        right = int(np.searchsorted(k_pos, b))
        q, k = np.arange(a, b)[:, None], k_pos[None, left:right]
        mask = k <= q
        if window is not None:
            mask &= (q - k < window) | (k < sinks)
        tiles.append((a - first, b - first, left, right, torch.from_numpy(mask)))
    by_all = k_pos <= first
    if window is not None:
        by_all &= (end - 1 - k_pos < window) | (k_pos < sinks)
    edges = np.flatnonzero(np.diff(by_all, prepend=True, append=True)).tolist()  # of one range, or two under a window
    partly = [slice(*pair) for pair in zip(edges[::2], edges[1::2])] if by_all.sum() >= FEW_MORE else []
    return Chunk(start, stop, spans, tiles, int(np.searchsorted(k_pos, sinks)) if apart else 0, partly)


def prefill(q, out, storage: LayerStorage, chunk: Chunk, sink_q=None) -> None:
    """Fills `out [C, Hq, Dv]` for the queries `q [C, Hq, Dk]` of one chunk; `sink_q [C, Hq, Dk]` meet its sinks."""
    sink_q = sink_q if chunk.apart else None
    spec = storage.spec
    if q.dtype == torch.bfloat16 and not native_bfloat16():  # its GEMM is several times slower than in fp32
        q = q.float()
    k = vectors(storage.codec_k, storage.k, chunk, q.dtype)  # [L, Hkv, D]
    v = vectors(storage.codec_v, storage.v, chunk, q.dtype)
    parts = [(k[part], v[part]) for part in chunk.partly] or [(k, v)]
    careful = not all(harmless(*part) for part in parts)
    q = q.reshape(q.shape[0], spec.kv_heads, -1, spec.k_dim).permute(1, 2, 0, 3)  # [Hkv, G, C, Dk]
    if sink_q is not None:
        sink_q = sink_q.to(q.dtype).reshape(sink_q.shape[0], spec.kv_heads, -1, spec.k_dim).permute(1, 2, 0, 3)
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [Hkv, L, D]
    plain = spec.softcap is None and storage.learned_sinks is None and spec.k_dim == spec.v_dim and sink_q is None
    tile = sdpa_tile if plain else matmul_tile
    for i, (a, b, left, right, mask) in enumerate(chunk.tiles):
        second = None if sink_q is None else (sink_q[:, :, a:b], chunk.apart)
        mask = chunk.added(i, q.dtype) if plain and not careful else mask
        args = q[:, :, a:b], k[:, left:right], v[:, left:right], mask, spec, storage.learned_sinks, second
        place = out[a:b].view(b - a, spec.kv_heads, -1, spec.v_dim).permute(1, 2, 0, 3)  # [Hkv, G, c, Dv]
        place.copy_(careful_tile(tile, *args) if careful else tile(*args))


def vectors(codec: Codec, planes: dict[str, torch.Tensor], chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    """Visible vectors of a chunk, `[L, Hkv, D]` in `dtype`: codes are decoded here, while the chunk attends."""
    gathered = {name: gather(plane, chunk) for name, plane in planes.items()}
    return gathered["payload"].to(dtype) if codec.plain else codec.decode(gathered, dtype)


def gather(plane: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Visible vectors of a chunk: `plane [N, S, Hkv, D]` -> `[L, Hkv, D]`; no copy where they lie in one block."""
    parts = [
        (plane[int(blocks[0])] if len(blocks) == 1 else plane.index_select(0, blocks).flatten(0, 1))[keep]
        for blocks, keep in chunk.spans
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@cache
def native_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def sdpa_tile(q, k, v, mask, spec: LayerSpec, learned_sinks=None, second=None) -> torch.Tensor:
    """`q [Hkv, G, c, D]`, `k, v [Hkv, l, D]`, `mask [c, l]` (bool, or see Chunk.added) -> `[Hkv, G, c, D]`. KV heads
    stand where a batch would."""
    k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))  # [Hkv, G, l, D], no copy
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)


def matmul_tile(q, k, v, mask, spec: LayerSpec, learned_sinks=None, second=None, careful=False) -> torch.Tensor:
    """The same with softcap, learned sinks and Dk != Dv: online softmax over tiles of TILE_K keys, in fp32.

    `second` is `(sink_q [Hkv, G, c, Dk], n)`: other queries for the first n keys. careful: not all of v need be finite.
    """
    hkv, G, c, _ = q.shape
    flat = q.reshape(hkv, G * c, -1)  # [Hkv, G c, Dk]
    sink_q, sinks = (None, 0) if second is None else (second[0].reshape(flat.shape), second[1])
    if learned_sinks is None:
        top, total = q.new_full((hkv, G, c, 1), -1e30, dtype=torch.float32), 0.0
    else:  # one more score, without a value
        top, total = learned_sinks.float().view(hkv, G, 1, 1).expand(-1, -1, c, 1), 1.0
    acc = q.new_zeros(hkv, G, c, spec.v_dim, dtype=torch.float32)
    for a in range(0, k.shape[1], TILE_K):
        b = min(a + TILE_K, k.shape[1])
        s = torch.bmm(flat, k[:, a:b].transpose(1, 2))
        if a < sinks:
            s[..., : sinks - a] = torch.bmm(sink_q, k[:, a : min(b, sinks)].transpose(1, 2))
        s = s.float().view(hkv, G, c, b - a).mul_(spec.scale)
        if spec.softcap is not None:
            s = s.div_(spec.softcap).tanh_().mul_(spec.softcap)
        s.masked_fill_(~mask[:, a:b], float("-inf"))
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p = s.sub_(new).exp_()
        shrink = torch.exp(top - new)
        total = total * shrink + p.sum(-1, keepdim=True)
        p, part = p.to(v.dtype), v[:, a:b]
        more = weigh(p, part, mask[:, a:b]) if careful else torch.bmm(p.view(hkv, G * c, -1), part)
        acc = acc * shrink + more.view(hkv, G, c, -1)
        top = new
    return acc / total


def careful_tile(tile, q, k, v, mask, spec: LayerSpec, learned_sinks=None, second=None) -> torch.Tensor:
    """What `tile` answers, where k and v may hold NaN, infinities and keys whose scores overflow: these reach the
    queries that see them only. The others get the tile's answer for zeros in these places, bit by bit what finite
    numbers there would give.
    """
    wild = ~((k.abs() < HUGE).all(-1) & v.isfinite().all(-1)).all(0)  # [l]
    zeros = (x.masked_fill(wild[:, None], 0.0) for x in (k, v))
    out = tile(q, *zeros, mask, spec, learned_sinks, second)
    sees = (mask & wild).any(1)  # [c]
    if sees.any():
        second = None if second is None else (second[0][:, :, sees], second[1])
        x = matmul_tile(q[:, :, sees], k, v, mask[sees], spec, learned_sinks, second, careful=True)
        out[:, :, sees] = x.to(out.dtype)
    return out
