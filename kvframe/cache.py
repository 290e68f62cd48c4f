"""BlockKVCache: the one place where layout, index, eviction, retention and codec meet.

The life of a request, in calls of the scheduler and the engine:

    admit -> (grow -> plan -> attend per layer -> commit)* -> release

Shape legend: T tokens of a step, R requests, G layer groups, S block_size, B table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvframe import audit, sealing
from kvframe import memory as sizes
from kvframe.blocks import BlockPool
from kvframe.copies import Copies
from kvframe.errors import CapacityError, IncompatibleCacheError
from kvframe.groups import layer_groups
from kvframe.interfaces import (
    CacheContext,
    CacheRequest,
    Codec,
    Eviction,
    Inserted,
    KVCache,
    Layout,
    Parts,
    PrefixIndex,
    Retention,
)
from kvframe.planning import make_plan
from kvframe.tables import Held, Tables
from kvframe.types import CacheStats, LayerSpec, Match, StepPlan


class BlockKVCache(KVCache):
    """A KV cache composed of five parts.

    Args:
        context: the model's layers, the device and the limits; see CacheContext.
        memory: bytes ("2GiB") or a fraction (0.3) of the free memory for the tails of a sealing codec (see
            kvframe.sealing) and the blocks of all layer groups.
        num_blocks: instead of memory, the number of blocks of the neediest layer group; the others scale. Tails come
            on top.
        group_share: layer group name -> share of the memory, instead of the split in proportion to need.

    Raises:
        IncompatibleCacheError: parts that cannot work together, with every reason.
        CapacityError: the memory does not hold one block.
    """

    def __init__(
        self,
        context: CacheContext,
        layout: Layout,
        index: PrefixIndex,
        eviction: Eviction,
        retention: Retention,
        codec: Codec,
        memory=0.3,
        num_blocks: int | None = None,
        group_share: dict | None = None,
    ):
        self.context, self.index, self.codec = context, index, codec
        self.sealed, self.unit = sealing.groups(codec, context.layers), sealing.unit(codec, context.layers)
        self.block_size = layout.block_size(context.max_len, self.unit)
        self.parts = Parts(
            layout,
            index,
            eviction,
            retention,
            codec,
            context.layers,
            context.max_len,
            self.block_size,
            stored=tuple((layer, kind, dim) for layer in context.layers for kind, dim in sealing.kinds(layer)),
        )
        self.rules, self.group_of = layer_groups(retention, context.layers)
        self._refuse_conflicts()
        self.exact = all(part.exact for part in (layout, index, eviction, retention, codec))
        self.unbounded = all(self._limited(layer) for layer in context.layers)
        if not self.unbounded and all(layer.rotary is not None for layer in context.layers):
            self.unbounded_fix = retention.limit_fix
        self._count_bytes()
        longest, chunk = context.max_len, context.max_step_tokens
        self._need = [sizes.live_blocks(rule, longest, chunk, self.block_size) for rule in self.rules]
        blocks = sizes.split(
            block_bytes=self.block_bytes,
            need=self._need,
            names=self.group_names,
            memory=memory,
            num_blocks=num_blocks,
            group_share=group_share,
            useful=None if index.keeps else context.max_requests,
            device=context.device,
            block_size=self.block_size,
            tails=sum(self.tail_bytes) * context.max_requests,
        )
        self.pools = [BlockPool(n) for n in blocks]
        self._capacity = self._longest()
        self.tables = Tables(context.max_requests, len(self.rules))
        index.attach(self.block_size, self.rules, eviction, lambda: self.now())
        self.copies = Copies(self.pools)
        self.storage = None
        if context.kernels is not None:
            from kvframe.storage import Storage

            self.storage = Storage.allocate(context, codec, retention, self.group_of, self.block_size, blocks)
        self._clear_counters()

    @property
    def group_names(self) -> list[str]:
        return [rule.name for rule in self.rules]

    def _count_bytes(self) -> None:
        """Per layer group: bytes of a token (in all, and by sealing group), of a block, and of a request's tails (in
        all, and of one token by sealing group)."""
        codec, layers, n = self.codec, self.context.layers, len(self.rules)
        self.parts_of_token: list[dict[int, float]] = [{} for _ in range(n)]
        self.parts_of_tail: list[dict[int, int]] = [{} for _ in range(n)]
        self.block_bytes, self.tail_bytes = [0] * n, [0] * n
        for layer in layers:
            g = self.group_of[layer.index]
            for group, size in sizes.token_bytes(codec, layer).items():
                self.parts_of_token[g][group] = self.parts_of_token[g].get(group, 0.0) + size
            self.block_bytes[g] += sum(sizes.slot_bytes(codec, layer, self.block_size).values())
            self.tail_bytes[g] += sizes.tail_bytes(codec, layer)
            for group, size in sizes.open_bytes(codec, layer).items():
                self.parts_of_tail[g][group] = self.parts_of_tail[g].get(group, 0) + size
        self.token_bytes = [sum(parts.values()) for parts in self.parts_of_token]

    def _limited(self, layer: LayerSpec) -> bool:
        """No query of the layer looks further back than the model was made for, and positions may go on and on."""
        rule = self.parts.retention.for_layer(layer)
        if layer.rotary is None or not rule.kernel_mask or rule.window is None:
            return False
        if rule.sinks and rule.sink_position(np.zeros(1, dtype=np.int64)) is None:
            return False
        return self.context.trained_len is None or rule.window + rule.sinks <= self.context.trained_len

    def _refuse_conflicts(self) -> None:
        parts = self.parts
        reasons = [
            r
            for p in (parts.layout, parts.index, parts.eviction, parts.retention, parts.codec)
            for r in p.conflicts(parts)
        ] + list(sealing.conflicts(parts))
        if self.block_size < 1:
            reasons.append(f"the layout answers block_size {self.block_size}; it must be at least 1")
        if reasons:
            raise IncompatibleCacheError(dict.fromkeys(reasons))

    # -- control plane ---------------------------------------------------------------------------------------

    def capacity(self) -> int:
        return self._capacity

    def _longest(self) -> int:
        """The longest request that fits alone: the first length whose last token finds no room is one too many."""
        longest = self.context.max_len
        for rule, pool in zip(self.rules, self.pools):
            over = np.flatnonzero(sizes.held_blocks(rule, longest, 1, self.block_size) > pool.num_blocks)
            longest = int(over[0]) if len(over) else longest
        return longest

    def peek(self, request: CacheRequest) -> tuple[int, int]:
        cached = self._match(request).n_tokens
        return cached, self._pending(request, cached)

    def _pending(self, request: CacheRequest, cached: int) -> int:
        """Whole blocks of leading tokens, beyond the cached ones, that a running request has still to compute."""
        tokens, most = request.tokens, 0
        if not self.index.keeps or len(tokens) <= cached + self.block_size:
            return 0
        for held in self.tables.all():
            other = held.request
            computed, stop = self.tables.lengths[held.row], min(len(other.tokens), len(tokens) - 1)
            if not held.publishes or other.salt != request.salt or stop - cached < self.block_size:
                continue
            if len(other.tokens) - computed <= 1 or other.tokens[cached] != tokens[cached]:
                continue  # it decodes, token by token; or it shares nothing more
            differs = np.flatnonzero(other.tokens[:stop] != tokens[:stop])
            shared = int(differs[0]) if len(differs) else stop
            if computed < shared:
                most = max(most, shared - cached)
        return most // self.block_size * self.block_size

    def admit(self, request: CacheRequest) -> int | None:
        assert request.id not in self.tables, f"request {request.id} is admitted twice"
        if not self.tables.has_row():
            return None
        match = self._match(request)
        for found in (match, Match()) if match.n_tokens else (match,):
            need = self._admission_need(len(request.tokens), found)
            if need is not None:
                return self._start(request, found, need)
        return None

    def _match(self, request: CacheRequest) -> Match:
        """What the index has for a request, in whole codec groups, without blocks that no query will see."""
        match = self.index.match(request, len(request.tokens) - 1)
        while rest := match.n_tokens % self.block_size % self.unit:
            match = self.index.match(request, match.n_tokens - rest)  # which blocks are needed depends on the length
        size, complete = self.block_size, match.n_tokens // self.block_size
        blocks = []
        for rule, held in zip(self.rules, match.blocks):
            if rule.forgets:
                dead = rule.dead(0, complete * size, match.n_tokens).reshape(complete, size).all(axis=1)
                held = np.where(dead, 0, held).astype(np.int32)
            blocks.append(held)
        return replace(match, blocks=tuple(blocks))

    def _admission_need(self, length: int, match: Match) -> list[int] | None:
        """Blocks that the request will still take per group, or None when they are not there."""
        needs = []
        for g, pool in enumerate(self.pools):
            held = match.blocks[g] if match.blocks else np.empty(0, np.int32)
            woken = int((pool.refs[held[held != 0]] == 0).sum())
            if match.tail:
                woken += int(pool.refs[match.tail[g][0]] == 0)
            total = min(-(-length // self.block_size), self._need[g], pool.num_blocks)
            need = max(total - int((held != 0).sum()), 1 if match.tail else 0)
            if need > pool.free + pool.cached - woken - self.tables.promised(g):
                return None
            needs.append(need)
        return needs

    def _start(self, request: CacheRequest, match: Match, need: list[int]) -> int:
        self.index.touch(request, match)
        held = self.tables.open(request)
        for g, pool in enumerate(self.pools):
            if match.blocks:
                pool.hold(match.blocks[g])
                self.tables.extend(held, g, match.blocks[g])
            if match.tail:
                pool.hold(np.array([match.tail[g][0]]))
        self.tables.promise(held, need)
        if match.tail:
            self._make_free([1] * len(self.pools))
            for g, pool in enumerate(self.pools):
                source, m = match.tail[g]
                block = pool.alloc(1)
                self.tables.extend(held, g, block)
                self.copies.add(g, source, int(block[0]), m)
        self.tables.lengths[held.row] = match.n_tokens
        self.hit_tokens += match.n_tokens
        self._look()
        return match.n_tokens

    def grow(self, request: CacheRequest, n: int) -> bool:
        held = self.tables[request.id]
        length = int(self.tables.lengths[held.row])
        first, stop = length // self.block_size, -(-(length + n) // self.block_size)
        need, stale = [], []
        for g, pool in enumerate(self.pools):
            copy = None
            if length % self.block_size:
                block = self.tables.block(held, g, first)
                copy = block if pool.refs[block] > 1 or pool.published[block] else None
            stale.append(copy)
            need.append(max(stop - held.blocks[g], 0) + (copy is not None))
        if not any(need):
            return True
        if any(n > pool.free + pool.cached for n, pool in zip(need, self.pools)):
            return False
        self._make_free(need)
        for g, pool in enumerate(self.pools):
            fresh = pool.alloc(need[g])
            if stale[g] is not None:  # the table's reference to the source becomes the lock of the copy
                self.copies.add(g, stale[g], int(fresh[0]), length % self.block_size)
                self.tables.replace(held, g, first, int(fresh[0]))
                fresh = fresh[1:]
            self.tables.extend(held, g, fresh)
        self._look()
        return True

    def _make_free(self, need: Sequence[int]) -> None:
        """Evicts until every group has `need[g]` free blocks; the caller knows that they are there."""
        short = [max(n - pool.free, 0) for n, pool in zip(need, self.pools)]
        if any(short):
            for g, gone in enumerate(self.index.evict(short, [pool.unused for pool in self.pools])):
                self.pools[g].unpublish(gone)
                self.evicted[g] += len(gone)
        assert all(pool.free >= n for n, pool in zip(need, self.pools)), "the index freed less than it holds unused"

    def commit(self, request: CacheRequest, n: int) -> None:
        held = self.tables[request.id]
        length = int(self.tables.lengths[held.row]) + n
        self.tables.lengths[held.row] = length
        self.copies.done()
        complete = length // self.block_size
        if self.index.keeps and held.publishes and complete > held.published:
            tables = [self.tables.view(held, g)[:complete].copy() for g in range(len(self.pools))]
            for g, done in enumerate(self.index.insert(request, tables, complete * self.block_size)):
                self._adopt(held, g, tables[g], done)
            held.published = complete
        self._free_dead(held, length)

    def _adopt(self, held: Held, g: int, table: np.ndarray, done: Inserted) -> None:
        """Publishes what the index took, and holds canonical blocks instead of own duplicates."""
        pool = self.pools[g]
        pool.publish(done.published)
        for i in np.flatnonzero(table != done.blocks):
            pool.hold(done.blocks[i : i + 1])
            pool.drop(table[i : i + 1])
            self.tables.replace(held, g, int(i), int(done.blocks[i]))

    def _free_dead(self, held: Held, length: int) -> None:
        """Gives back the blocks whose slots are all dead. Only complete blocks can be."""
        size, complete = self.block_size, length // self.block_size
        for g, rule in enumerate(self.rules):
            if not rule.forgets or not complete:
                continue
            table = self.tables.view(held, g)[:complete]
            live = np.flatnonzero(table)
            if not len(live):
                continue
            runs = np.split(live, np.flatnonzero(np.diff(live) != 1) + 1)
            if len(runs) > 4:
                runs = [np.arange(live[0], live[-1] + 1)]
            for run in runs:
                start, stop = int(run[0]), int(run[-1]) + 1
                dead = rule.dead(start * size, stop * size, length).reshape(-1, size).all(axis=1)
                gone = start + np.flatnonzero(dead)
                self.pools[g].drop(table[gone])
                table[gone] = 0

    def release(self, request: CacheRequest) -> None:
        held = self.tables[request.id]
        for g, pool in enumerate(self.pools):
            pool.drop(self.tables.view(held, g))
        self.tables.close(request.id)
        self.copies.forget_row(held.row)
        self.copies.forget_unused()

    def fork(self, parent: CacheRequest, child: CacheRequest) -> None:
        source = self.tables[parent.id]
        if not self.tables.has_row():
            raise CapacityError("fork: all rows are in use", fix="a larger engine.max_requests")
        held = self.tables.open(child)
        held.published, held.publishes = source.published, source.publishes
        length = int(self.tables.lengths[source.row])
        for g, pool in enumerate(self.pools):  # what the parent grew beyond its length is its own
            table = self.tables.view(source, g)[: -(-length // self.block_size)].copy()
            pool.hold(table)
            self.tables.extend(held, g, table)
        self.tables.lengths[held.row] = length
        if self.tables.lengths[held.row] % self.unit:  # some group is open
            self.copies.add_row(source.row, held.row)
        self._look()

    def truncate(self, request: CacheRequest, length: int) -> int:
        held = self.tables[request.id]
        size, computed = self.block_size, int(self.tables.lengths[held.row])
        kept, before = min(length, computed), -1
        while kept != before:  # what one group has to give up, the others must do without too
            before = kept
            kept = sealing.keepable(kept, computed, self.sealed)
            for g, rule in enumerate(self.rules):
                lost = self.tables.view(held, g)[: -(-kept // size)] == 0  # [blocks]
                missing = np.repeat(lost, size)[:kept] & ~rule.dead(0, kept, kept)
                if missing.any() or (kept % size and lost[-1]):  # a query needs it, or the next token is written to it
                    kept = int(np.argmax(lost)) * size
        for g, pool in enumerate(self.pools):
            pool.drop(self.tables.shrink(held, g, -(-kept // size)))
        self.copies.forget_unused()
        self.tables.lengths[held.row] = kept
        held.published = min(held.published, kept // size)
        return kept

    def reset(self) -> None:
        self.index.clear()
        self.tables.clear()
        self.copies.clear()
        for pool in self.pools:
            pool.reset()
        self._clear_counters()

    def invalidate(self) -> None:
        self.index.clear()
        for pool in self.pools:
            pool.unpublish(np.flatnonzero(pool.published))
        for held in self.tables.all():
            held.publishes = False

    def start_run(self) -> None:
        self._clear_counters()
        for pool in self.pools:
            pool.peak = pool.live

    def _clear_counters(self) -> None:
        self.hit_tokens = self.copies.count = 0
        self.evicted = [0] * len(self.pools)  # blocks, per layer group
        self.peak = audit.held(self)

    def _look(self) -> None:
        """Called whenever something was taken: what is given back within a step was there too."""
        self.peak = max(self.peak, audit.held(self))

    @property
    def evictions(self) -> int:
        return sum(self.evicted)

    def stats(self) -> CacheStats:
        return audit.stats(self)

    @property
    def graphs(self) -> bool:
        return self.storage is not None and self.storage.graphs

    def tensors(self):
        return iter(()) if self.storage is None else self.storage.tensors()

    def check(self) -> None:
        audit.check(self)

    # -- data plane ------------------------------------------------------------------------------------------

    def plan(self, batch: Sequence[tuple[CacheRequest, int]]) -> StepPlan:
        helds = [self.tables[request.id] for request, _ in batch]
        copies = self.copies.take()
        plan = make_plan(self.tables, helds, [n for _, n in batch], self.block_size, copies, self.copies.tails)
        if self.storage is None:
            return plan
        self.storage.run_copies(plan.copies)
        self.storage.copy_tails(plan.tails)
        return self.storage.to_device(plan)

    def attend(self, layer, q, k, v, plan):
        storage = self.storage.layers[layer]
        if storage.spec.kv_source is None:
            storage.kernel.store(k, v, storage, plan)
        second = (self.storage.sink_query(q, storage, plan),) if storage.sink_queries else ()
        out = storage.kernel.attend(q, storage, plan, *second)
        if storage.last_reader:
            storage.forget_raw()
        return out
