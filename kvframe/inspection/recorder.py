"""Looks over an engine's shoulder and writes down each step, as plain dicts and lists that JSON can hold.

It knows the interface of a KVCache (`plan`, `admit`, `release`, `stats`). Block states, reference counts and the index
are there for what kvframe composes of parts; of a cache of its own kind only what its plans say.

A step (`blocks` are ids, `group` counts the layer groups from 0):

    step, tokens            number of the forward, tokens that it computed
    admitted                [{id, prompt, hit}]: requests that were let in, their tokens, and how many were cached
    requests                [{id, start, new, groups: [{table, marks, wrote, read, read_bytes}]}] of the forward:
                            positions start .. start + new; `table` during it; `marks` per entry, see `_marks`;
                            `wrote` [[block, first slot, slots]]; `read` [[position, position]] half-open ranges that
                            some query saw
    copies                  [{group, source, destination, slots}] that ran before the forward
    evicted                 [{group, blocks}] that the index gave up to make room
    dropped                 [{id, group, blocks}] that retention found dead after the forward
    finished, preempted     ids
    pools                   [{name, block_size, block_bytes, free, live, shared, cached, states}] after the step
    tree                    the index's nodes, after the step (see kvframe.types.IndexNode)
    stats                   bytes: reserved, used, evictable, tail
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvframe.engine import Engine
from kvframe.outputs import Event

BYTES = ("reserved", "used", "evictable", "tail")


class Recorder:
    """Records the forwards of an engine. Build it before the first step; it stays until the engine goes."""

    def __init__(self, engine: Engine):
        self.engine, self.cache = engine, engine.cache
        engine.ahead = False  # the plan of a step is made within it
        self.pools = getattr(self.cache, "pools", ())
        self.index = getattr(self.cache, "index", None)
        self._number, self._ends = -1, [0] * len(self.pools)
        self._fresh()
        _after(self.cache, "plan", self._planned)
        _after(self.cache, "admit", self._admitted)
        if self.index is not None:
            _after(self.index, "evict", self._gave_up)
        _after(self.cache, "release", lambda _, request: self._released.append(_name(request)))

    def _fresh(self) -> None:
        self._plan, self._batch = None, []
        self._hits: list[dict] = []
        self._released: list[str] = []
        self._evicted: list[dict] = []
        self._marked: list[list[str]] = []

    # -- what the cache is asked -----------------------------------------------------------------------------

    def _admitted(self, hit: int | None, request) -> None:
        if hit is not None:
            self._hits.append({"id": _name(request), "prompt": len(request.tokens), "hit": hit})

    def _gave_up(self, gone, *_) -> None:
        self._evicted += [{"group": g, "blocks": ids.tolist()} for g, ids in enumerate(gone) if len(ids)]

    def _planned(self, plan, batch) -> None:
        host = plan if plan.host is None else plan.host
        self._plan, self._batch = host, list(batch)
        self._marked = [[self._marks(g, row) for row in group.tables] for g, group in enumerate(host.groups)]

    def _marks(self, g: int, table: np.ndarray) -> list[str]:
        """Of each block of a table: "" its own, "x3" held by three, "'" behind it: the index has it, "-" gone."""
        if g >= len(self.pools):
            return ["" if block else "-" for block in table]
        pool = self.pools[g]
        return [
            (f"x{pool.refs[b]}" if pool.refs[b] > 1 else "") + ("'" if pool.published[b] else "") if b else "-"
            for b in table
        ]

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, events: Sequence[Event]) -> dict[str, Any] | None:
        """What happened since the last call; None when nothing was computed."""
        if self._plan is None:
            return None
        plan, batch, self._stats = self._plan, self._batch, self.cache.stats()
        finished = [_name_of(event) for event in events if event.output is not None]
        self._number += 1
        record = {
            "step": self._number,
            "tokens": int(plan.query_starts[-1]),
            "admitted": self._hits,
            "requests": [self._request(r, _name(request), n) for r, (request, n) in enumerate(batch)],
            "copies": [
                {"group": g, "source": int(a), "destination": int(b), "slots": int(n)}
                for g, moves in enumerate(plan.copies)
                for a, b, n in moves
            ],
            "evicted": self._evicted,
            "dropped": self._dropped(),
            "finished": finished,
            "preempted": [name for name in self._released if name not in finished],
            "pools": [self._pool(g) for g in range(len(self.pools))],
            "tree": self._tree(),
            "stats": {name: self._stats.total(name) for name in BYTES},
        }
        self._fresh()
        return record

    def _request(self, r: int, name: str, n: int) -> dict[str, Any]:
        plan = self._plan
        start, stop = int(plan.query_starts[r]), int(plan.query_starts[r + 1])
        positions = plan.positions[start:stop]
        groups = []
        for g, group in enumerate(plan.groups):
            size, context = self._block_size(g), int(group.context_lens[r])
            table = group.tables[r][: -(-context // size)]
            read = self._read(g, table, positions, context, size)
            groups.append(
                {
                    "table": table.tolist(),
                    "marks": self._marked[g][r][: len(table)],
                    "wrote": _runs_of_slots(group.slots[start:stop], size),
                    "read": [[int(run[0]), int(run[-1]) + 1] for run in _runs(read)],
                    "read_bytes": int(len(read) * self._token_bytes(g)),
                }
            )
        return {"id": name, "start": int(positions[0]), "new": n, "groups": groups}

    def _read(self, g: int, table: np.ndarray, positions: np.ndarray, context: int, size: int) -> np.ndarray:
        """Positions that some query of the step saw."""
        k_pos = np.arange(context)
        rules = getattr(self.cache, "rules", None)
        seen = np.ones(context, dtype=bool)
        if rules is not None:
            seen = np.asarray(rules[g].visible(positions[:, None], k_pos[None, :])).any(axis=0)
        return k_pos[seen & (table[k_pos // size] != 0)]

    def _dropped(self) -> list[dict]:
        """Blocks that were in a table during the forward and are not any more, of requests that go on."""
        tables, found = getattr(self.cache, "tables", None), []
        for r, (request, _) in enumerate(self._batch):
            if tables is None or request.id not in tables:
                continue
            for g, group in enumerate(self._plan.groups):
                now = tables.view(tables[request.id], g)
                before = group.tables[r][: len(now)]
                gone = before[(before != 0) & (now == 0)]
                if len(gone):
                    found.append({"id": _name(request), "group": g, "blocks": gone.tolist()})
        return found

    def _pool(self, g: int) -> dict[str, Any]:
        """`states`: one letter per block id from 1 up to the last one that was ever taken: f free, l live, s shared
        (more than one holder), c cached (the index has it, nobody holds it)."""
        pool, stats = self.pools[g], self._stats.groups[g]
        last = max(self._pool_end(g), 1)
        refs, published = pool.refs[1 : last + 1], pool.published[1 : last + 1]
        states = np.where(refs > 1, "s", np.where(refs == 1, "l", np.where(published, "c", "f")))
        return {
            "name": stats.name,
            "block_size": stats.block_size,
            "block_bytes": stats.block_bytes,
            "blocks": pool.num_blocks,
            "free": int(pool.free),
            "live": int(pool.live),
            "shared": int((pool.refs > 1).sum()),
            "cached": int(pool.cached),
            "states": "".join(states),
        }

    def _pool_end(self, g: int) -> int:
        """The highest block id that has been in use: pools hand out low ids first."""
        pool = self.pools[g]
        used = np.flatnonzero((pool.refs > 0) | pool.published)
        planned = max((int(table.max(initial=0)) for table in self._plan.groups[g].tables), default=0)
        self._ends[g] = max(self._ends[g], planned, int(used.max(initial=0)))
        return self._ends[g]

    def _tree(self) -> list[dict[str, Any]]:
        return [
            {
                "parent": node.parent,
                "start": node.start,
                "tokens": node.tokens.tolist(),
                "blocks": [ids.tolist() for ids in node.blocks],
                "held": [[int(self.pools[g].refs[i]) for i in ids] for g, ids in enumerate(node.blocks)],
                "salt": node.salt,
                "facts": dict(node.facts),
            }
            for node in (self.index.nodes() if self.index is not None else ())
        ]

    def _block_size(self, g: int) -> int:
        return self._stats.groups[g].block_size

    def _token_bytes(self, g: int) -> float:
        group = self._stats.groups[g]
        return group.block_bytes / group.block_size


def _name(request: Any) -> str:
    """What a user calls a request of a cache: the engine's have a name beside the id that is unique."""
    return getattr(request, "name", request.id)


def _name_of(event: Event) -> str:
    return event.id if event.sample == 0 else f"{event.id}, sample {event.sample}"


def _after(target: Any, name: str, tell: Callable) -> None:
    """`tell(result, *arguments)` is called after each call of a method of this one object."""
    method = getattr(target, name)

    def told(*arguments):
        result = method(*arguments)
        tell(result, *arguments)
        return result

    setattr(target, name, told)


def _runs(positions: np.ndarray) -> list[np.ndarray]:
    """Ascending numbers, cut wherever one is left out."""
    return np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1) if len(positions) else []


def _runs_of_slots(slots: np.ndarray, size: int) -> list[list[int]]:
    """`[block, first slot within it, number]` of slots in the order in which they are written."""
    found: list[list[int]] = []
    for slot in slots.tolist():
        block, at = divmod(slot, size)
        if found and found[-1][0] == block and found[-1][1] + found[-1][2] == at:
            found[-1][2] += 1
        else:
            found.append([block, at, 1])
    return found
