"""Tails: the open groups of sealing codecs in full precision, on the device (see kvframe.sealing for the rule).

Shape legend: T tokens of a step, G sealing group, n full groups, Hkv KV heads, D size of a vector, P rows (requests
that may run), N blocks, S block_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvframe.interfaces import Codec
from kvframe.types import StepPlan


@dataclass(frozen=True)
class Raw:
    """What a step's queries may see in full precision, of one layer and kind: of each request the tokens from the
    beginning of the group that was open before the step to the last one. A query's own group is always within.

    Attributes:
        vectors: [n, Hkv, D]. starts: int64 [R + 1] on the host; request r's are `vectors[starts[r] : starts[r + 1]]`.
    """

    vectors: torch.Tensor
    starts: np.ndarray

    def of(self, r: int) -> torch.Tensor:
        return self.vectors[int(self.starts[r]) : int(self.starts[r + 1])]


@dataclass
class Tail:
    """The open groups of one layer and kind, and what a step touches of them.

    Attributes:
        plane: [P, G, Hkv, D] in the model's dtype; the token at position p of a request is at `[row, p % G]`. After
            `store` a row holds the group of the step's last token, also where that token has closed it.
        raw: what a step with chunks has to see besides; None where every request got one token, since the plane has
            it all. There from `store` until the last layer that reads it has attended.
        plan: the step that was stored last.
    """

    plane: torch.Tensor
    raw: Raw | None = None
    plan: StepPlan | None = None

    @classmethod
    def allocate(cls, codec: Codec, rows: int, heads: int, dim: int, dtype: torch.dtype, device) -> Tail | None:
        """None for a codec that does not seal."""
        if codec.group == 1:
            return None
        return cls(torch.empty(rows, codec.group, heads, dim, dtype=dtype, device=device))

    def of(self, plan: StepPlan, r: int) -> torch.Tensor:
        """`[t, Hkv, D]` of request r of a step that has been stored: from the beginning of the group that was open
        before the step to the last token."""
        assert self.plan is plan, "attend before store, after the last layer that reads it, or of another step"
        if self.raw is not None:
            return self.raw.of(r)
        position = int(plan.host.positions[int(plan.host.query_starts[r])])
        return self.plane[int(plan.host.rows[r]), : position % self.plane.shape[1] + 1]

    def forget(self) -> None:
        """Everybody has read `raw`."""
        self.raw, self.plan = None, None


def raw_starts(plan: StepPlan, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each request: the position where the group of `size` tokens begins that was open before the step (int64 [R]),
    and `Raw.starts`. `plan` on the host, `lengths`: after the step."""
    first = plan.positions[plan.query_starts[:-1]] // size * size
    return first, np.concatenate([[0], np.cumsum(lengths - first)])


def store(x: torch.Tensor, codec: Codec, planes: dict, tail: Tail, plan: StepPlan, group: int, block_size: int) -> None:
    """Takes a step's `x [T, Hkv, D]`: seals every group that is full now, and keeps the last one in the tail.

    With G = 4, a request of 6 tokens that gets 5 (t marks what was in the tail, n what is new):

        position    4 5 6 7 | 8 9 10        raw = t t n n | n n n
                    t t n n | n n n         the first group is encoded into the blocks, the last three go to the tail

    Args:
        group: index of the layer group in the plan.
    """
    host, size = plan.host, codec.group
    tables, lengths = host.groups[group].tables, np.asarray(host.groups[group].context_lens)
    firsts, starts = raw_starts(host, lengths, size)
    raws, full, where, last = [], [], [], []
    for r, row in enumerate(host.rows.tolist()):
        start, stop = int(host.query_starts[r]), int(host.query_starts[r + 1])
        first, length = int(firsts[r]), int(lengths[r])
        before = int(host.positions[start]) - first
        raw = x[start:stop].to(tail.plane.dtype)
        raw = torch.cat([tail.plane[row, :before], raw]) if before else raw
        raws.append(raw)
        sealed = length // size * size - first
        if sealed:
            full.append(raw[:sealed])
            where.append(group_slots(tables[r], first, first + sealed, size, block_size))
        last.append((row, raw[(length - 1) // size * size - first :]))
    if full:
        codes = codec.encode(torch.cat(full).view(-1, size, *x.shape[1:]))  # of [n, G, Hkv, D]
        groups = torch.from_numpy(np.concatenate(where)).to(x.device)
        for name, code in codes.items():
            view = by_group(planes[name], codec, name, x.shape[-1], block_size)
            view[0][groups // view[1], groups % view[1]] = code.to(planes[name].dtype)
    for row, kept in last:
        tail.plane[row, : len(kept)] = kept
    tail.plan, tail.raw = plan, Raw(torch.cat(raws), starts) if host.max_query > 1 else None


def group_slots(table: np.ndarray, start: int, stop: int, size: int, block_size: int) -> np.ndarray:
    """int64: where the groups of positions start .. stop are, as `block * (S // G) + group within the block`."""
    positions = np.arange(start, stop, size)
    blocks = table[positions // block_size].astype(np.int64)
    assert blocks.all(), "a group would be sealed into the null block"
    return blocks * (block_size // size) + positions % block_size // size


def by_group(plane: torch.Tensor, codec: Codec, name: str, dim: int, block_size: int) -> tuple[torch.Tensor, int]:
    """A plane as `[N, S // G, (G,) Hkv, ...]` (a view), and S // G. Slots behind the last whole group are left out."""
    size, count = codec.group, block_size // codec.group
    if codec.planes(dim)[name].per == "group":
        return plane, count
    return plane[:, : count * size].unflatten(1, (count, size)), count


def gather(codec: Codec, planes: dict, slots: torch.Tensor, dim: int, block_size: int, dtype) -> torch.Tensor:
    """Decoded vectors `[L, Hkv, D]` of sealed slots; each group is read as a whole and decoded once."""
    size, count = codec.group, block_size // codec.group
    where = slots // block_size * count + slots % block_size // size  # [L] the group of each slot
    groups, index = torch.unique(where, return_inverse=True)
    parts = {}
    for name, plane in planes.items():
        view, _ = by_group(plane, codec, name, dim, block_size)
        parts[name] = view[groups // count, groups % count]  # [n, (G,) Hkv, ...]
    vectors = codec.decode(parts, dtype)  # [n, G, Hkv, D]
    return vectors[index, slots % block_size % size]
