"""The arithmetic under `sampling.py`: best tokens, filters and the inverse CDF, row by row over a batch.

Shape legend: R rows, V vocabulary, K best tokens of a row, C candidates.

One order is used everywhere: z descending, id ascending. Weights are integers, so every sum is exact: the paths below
(few candidates, buckets, full sort) give the same token, and no row sees its neighbours.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 128  # ids that are reduced together before a search goes on inside one block
FEW, FEW_BLOCK = 128, 32  # candidates that are tried before a filter looks at the whole vocabulary
BUCKETS, PER_NAT = 2048, 64  # histogram over z in (-32, 0]; weights are 0 below z = -30.5


def best(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value [R] and its lowest id [R] per row of y [R, V]; NaN wins. On CPU faster than torch.argmax."""
    tops = per_block(y, "amax")  # [R, V / BLOCK]
    block = tops.argmax(1, keepdim=True)  # argmax answers the first of equal values
    ids = (block * BLOCK + torch.arange(BLOCK, device=y.device)).clamp_(max=y.shape[1] - 1)
    offset = y.gather(1, ids).argmax(1, keepdim=True)
    return tops.gather(1, block)[:, 0], (block * BLOCK + offset)[:, 0]


def top(y: torch.Tensor, k: int) -> torch.Tensor:
    """Ids [R, k] of the k best tokens of y [R, V] in the one order (torch.topk leaves the order of ties open).

    The k best tokens lie in the k blocks whose maxima are best: a token outside them has k better ones.
    """
    tops = per_block(y, "amax", FEW_BLOCK)  # [R, V / FEW_BLOCK]
    blocks = _top_of(tops, torch.arange(tops.shape[1], device=y.device), min(k, tops.shape[1]))
    ids = (blocks[:, :, None] * FEW_BLOCK + torch.arange(FEW_BLOCK, device=y.device)).flatten(1)  # [R, k * FEW_BLOCK]
    values = y.gather(1, ids.clamp(max=y.shape[1] - 1)).masked_fill_(ids >= y.shape[1], -torch.inf)
    return _top_of(values, ids, k)


def _top_of(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k best values [R, n]: topk over one integer per token, (float as ordered integer, -id)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return 0xFFFFFFFF - ((bits * 2**32 + (0xFFFFFFFF - ids)).topk(k, dim=1)[0] & 0xFFFFFFFF)


def weights(z: torch.Tensor, vocab: int) -> torch.Tensor:
    """int64 weights floor(exp(z) * 2**bits), bits such that the sum over a vocabulary stays under 2**62."""
    return z.exp().mul_(2.0 ** _bits(vocab)).long()


def draw(z: torch.Tensor, u: torch.Tensor, knobs: torch.Tensor) -> torch.Tensor:
    """Draw one token per row.

    Args:
        z: [R, V] float32, (y - max y) / temperature.
        u: [R] float64 in [0, 1).
        knobs: [R, 3] float64: top_k, top_p, min_p (0, 1, 0 are off). All on one device.

    Returns:
        [R] int64.
    """
    if z.device.type != "cpu":  # the plain way needs no answer from the device in between
        return pick(filter_(weights(z, z.shape[1]), z, knobs, trim_plain_), u)
    k, p, _ = knobs.unbind(1)
    counted = (k > 0) & (k <= FEW)  # FEW candidates are surely enough
    tokens = torch.empty(len(z), dtype=torch.int64)
    w = None if counted.all() else weights(z, z.shape[1])  # [R, V]
    todo = ~counted
    if (counted | (p < 1)).any():
        total = torch.zeros(len(z), dtype=torch.int64) if w is None else w.sum(1)
        tokens, done = _draw_few(z, total, u, knobs, counted)
        todo = ~done
    if todo.any():
        # all rows where that saves copies: a row that is done gets the same token again
        rows = slice(None) if 2 * int(todo.sum()) > len(todo) else todo.nonzero()[:, 0]
        tokens[rows] = pick(filter_(w[rows], z[rows], knobs[rows], trim_buckets_), u[rows])
    return tokens


def _draw_few(z, total, u, knobs, counted) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` from the FEW best tokens of each row: tokens [R], and bool [R] where the filters end inside them."""
    k, p, min_p = knobs[:, :, None].unbind(1)  # [R, 1] each
    ids = top(z, min(FEW, z.shape[1]))  # [R, K]
    w = weights(z.gather(1, ids), z.shape[1])
    w.masked_fill_(counted[:, None] & (torch.arange(w.shape[1]) >= k), 0)
    cumulative = w.cumsum(1)
    target = _nucleus(p[:, 0], torch.where(counted, cumulative[:, -1], total))
    done = counted | ((k[:, 0] == 0) & (cumulative[:, -1] >= target))
    w.masked_fill_(cumulative - w >= target[:, None], 0)
    w.masked_fill_(w < _least(min_p, z.shape[1]), 0)
    ids, order = ids.sort(1)
    return ids.gather(1, pick(w.gather(1, order), u)[:, None])[:, 0], done


def filter_(w: torch.Tensor, z: torch.Tensor, knobs: torch.Tensor, trim_) -> torch.Tensor:
    """Set w [R, V] to 0 where a filter drops the token; `trim_` is trim_plain_ or trim_buckets_. A row without a
    filter aims higher than everything, so nothing of it is dropped."""
    k, p, min_p = knobs.unbind(1)
    cpu = z.device.type == "cpu"  # elsewhere a question to the device costs more than a filter that does nothing
    if not cpu or (k > 0).any():
        trim_(w, z, w.clamp(max=1), torch.where(k > 0, k, z.shape[1] + 1).long())
    if not cpu or (p < 1).any():
        trim_(w, z, w, _nucleus(p, w.sum(1)))
    if not cpu or (min_p > 0).any():
        w.masked_fill_(w < _least(min_p, z.shape[1])[:, None], 0)
    return w


def trim_plain_(w: torch.Tensor, z: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> None:
    """Set w to 0 outside the shortest prefix, in the one order, whose mass is >= target.

    Args:
        w: [R, V] int64; z: [R, V] float32; mass: [R, V] int64, 0 where w is 0; target: [R] int64.
    """
    order = torch.sort(z, dim=1, descending=True, stable=True)[1]  # [R, V]
    mass = mass.gather(1, order)
    late = mass.cumsum(1) - mass >= target[:, None]  # the mass before me is already enough
    w.masked_fill_(torch.zeros_like(late).scatter_(1, order, late), 0)


def trim_buckets_(w: torch.Tensor, z: torch.Tensor, mass: torch.Tensor, target: torch.Tensor) -> None:
    """`trim_plain_` on CPU without a sort over V: a histogram of the mass over z finds the one bucket where the prefix
    ends, and only the C tokens in that bucket are sorted. Bucket b holds z in (-(b + 1) / PER_NAT, -b / PER_NAT].

    Example: mass per bucket 5 3 4 1, target 9 -> cumulative 5 8 12 13 -> the prefix ends in bucket 2: bucket 3 goes,
    and bucket 2, sorted, keeps the tokens with less than 9 - 8 before them.
    """
    bucket = (z * -PER_NAT).clamp_(max=BUCKETS - 1).long()  # [R, V]
    sums = torch.zeros(len(z), BUCKETS, dtype=torch.int64).scatter_add_(1, bucket, mass).cumsum(1)  # [R, BUCKETS]
    edge = (sums < target[:, None]).sum(1, keepdim=True)  # [R, 1]; BUCKETS where all of it is too little
    bounds = edge.numpy().astype(np.float32) / -PER_NAT
    most = z.numpy() > bounds - np.float32(1 / PER_NAT)  # [R, V] bucket <= edge; numpy's masks are 7 times faster here
    flat = torch.from_numpy(np.flatnonzero(most & (z.numpy() <= bounds)))  # candidates: bucket == edge
    row = flat // z.shape[1]
    count = row.bincount(minlength=len(z))
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]  # position of a candidate in its row
    cand_z = torch.full((len(z), max(1, int(count.max()))), -torch.inf)  # [R, C]
    cand_mass = torch.zeros(cand_z.shape, dtype=torch.int64)
    cand_z[row, place], cand_mass[row, place] = z.view(-1)[flat], mass.view(-1)[flat]
    order = torch.sort(cand_z, dim=1, descending=True, stable=True)[1]
    cand_mass = cand_mass.gather(1, order)
    late = cand_mass.cumsum(1) - cand_mass + _before(sums, edge) >= target[:, None]
    late = torch.zeros_like(late).scatter_(1, order, late)[row, place]
    np.multiply(w.numpy(), most, out=w.numpy())
    w.view(-1)[flat[late]] = 0


def pick(w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """First id [R], in id order, whose cumulative weight exceeds floor(u * total); w [R, V] int64, u [R] float64."""
    sums = per_block(w, "sum").cumsum(1)  # [R, V / BLOCK]
    target = torch.minimum((u * sums[:, -1]).long(), sums[:, -1] - 1)[:, None]  # [R, 1]; u close to 1 may round up
    block = (sums <= target).sum(1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    ids = block * BLOCK + torch.arange(BLOCK, device=w.device)  # [R, BLOCK]
    part = w.gather(1, ids.clamp(max=w.shape[1] - 1)).masked_fill_(ids >= w.shape[1], 0)
    offset = (part.cumsum(1) + _before(sums, block) <= target).sum(1)
    return (block[:, 0] * BLOCK + offset).clamp_(max=w.shape[1] - 1)


def per_block(t: torch.Tensor, reduce: str, size: int = BLOCK) -> torch.Tensor:
    """[R, V] -> [R, ceil(V / size)] by the method `reduce` ("amax", "sum") over blocks of `size` ids."""
    full = t.shape[1] // size * size
    parts = [t[:, :full].unflatten(1, (-1, size))] if full else []
    parts += [t[:, None, full:]] if full < t.shape[1] else []
    return torch.cat([getattr(part, reduce)(2) for part in parts], 1)


def _before(sums: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Inclusive cumulative sums [R, n] -> the sum [R, 1] of everything before `index` [R, 1]."""
    return sums.gather(1, (index - 1).clamp(min=0)).masked_fill_(index == 0, 0)


def _nucleus(p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Weight [R] that a nucleus must hold: ceil(p * total), at least 1; more than there is where p is 1 (off)."""
    return torch.where(p < 1, (p * total).ceil().long().clamp(min=1), total + 1)


def _least(min_p: torch.Tensor, vocab: int) -> torch.Tensor:
    return (min_p * 2.0 ** _bits(vocab)).ceil().long()


def _bits(vocab: int) -> int:
    return min(44, 62 - vocab.bit_length())
