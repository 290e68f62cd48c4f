"""Indexes, kernels and caches that are broken on purpose, each in one way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from dict_cache import DictCache

from kvframe.cache import BlockKVCache
from kvframe.interfaces import Inserted
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing.contracts.part import composed
from kvframe.testing.parts import Band
from kvframe.testing.trie import TrieIndex
from kvframe.types import GroupPlan, StepPlan

# -- indexes -------------------------------------------------------------------------------------------------


class ForgetsWhoUses(TrieIndex):
    """Gives up blocks that requests hold."""

    def evict(self, need, unused):
        return super().evict(need, [lambda ids: np.ones(len(ids), dtype=bool)] * len(unused))


class OneSalt(TrieIndex):
    def match(self, request, limit):
        return super().match(_without_salt(request), limit)

    def insert(self, request, blocks, length):
        return super().insert(_without_salt(request), blocks, length)


def _without_salt(request):
    @dataclass
    class Plain:
        id: str
        tokens: np.ndarray
        salt: str = ""

    return Plain(request.id, request.tokens)


class MatchConsumes(TrieIndex):
    def match(self, request, limit):
        found = super().match(request, limit)
        self.roots.pop(request.salt, None) if found.n_tokens else None
        return found


class HolesEverywhere(TrieIndex):
    """Does not ask whether a query needs what is gone."""

    def _complete(self, path, n_tokens):
        return True


class KeepsTwice(TrieIndex):
    """Publishes every block, known tokens or not."""

    def insert(self, request, blocks, length):
        answers = super().insert(request, blocks, length)
        for g, (table, answer) in enumerate(zip(blocks, answers)):
            new = [int(b) for b in table if b and b not in self.owner[g]]
            self.owner[g].update(dict.fromkeys(new, self.roots[request.salt]))
            answers[g] = Inserted(table.copy(), np.append(answer.published, np.array(new, np.int32)))
        return answers


class WrongBlock(TrieIndex):
    """Takes the first token of a block for all of it."""

    def _key(self, tokens, i):
        return tokens[i * self.size : i * self.size + 1].repeat(self.size).tobytes()


class NeverForgets(TrieIndex):
    def clear(self):
        if not hasattr(self, "roots"):
            super().clear()


# -- kernels -------------------------------------------------------------------------------------------------


class LosesTheLastSlot(ReferenceKernel):
    """Off by one at the edge of a block: of a full block the last slot is not seen."""

    def attend(self, q, storage, plan, sink_q=None):
        size, rule = storage.block_size, storage.retention

        class Cut(Band):
            def visible(self, q_pos, k_pos):
                edge = (k_pos % size == size - 1) & (k_pos < q_pos) & (q_pos % size == 0)
                return rule.visible(q_pos, k_pos) & ~edge

        storage.retention = Cut()
        try:
            return super().attend(q, storage, plan, sink_q)
        finally:
            storage.retention = rule


class ReadsEverything(ReferenceKernel):
    """Weights of 0 instead of slots that are not read; 0 times NaN is NaN."""

    def attend(self, q, storage, plan, sink_q=None):
        out = super().attend(q, storage, plan, sink_q)
        for r in range(len(plan.host.rows)):
            rows = slice(int(plan.host.query_starts[r]), int(plan.host.query_starts[r + 1]))
            table = torch.from_numpy(plan.host.groups[0].tables[r].astype(np.int64))
            planes = {name: plane[table[table != 0]] for name, plane in storage.v.items()}
            out[rows] += 0 * storage.codec_v.decode(planes, torch.float32).sum()
        return out


class ScalesItsQueries(ReferenceKernel):
    def attend(self, q, storage, plan, sink_q=None):
        return super().attend(q.mul_(1.0001), storage, plan, sink_q)


class SpillsOver(ReferenceKernel):
    """Writes into the null block as well."""

    def store(self, k, v, storage, plan):
        super().store(k, v, storage, plan)
        for planes in (storage.k, storage.v):
            for plane in planes.values():
                plane[0] = 0


class LooksAtTheBatch(ReferenceKernel):
    def attend(self, q, storage, plan, sink_q=None):
        return super().attend(q, storage, plan, sink_q) * (1 + 1e-4 * (len(plan.host.rows) - 1))


class LosesOpenGroups(ReferenceKernel):
    """Of steps in which every request gets one token."""

    def attend(self, q, storage, plan, sink_q=None):
        for tail in (storage.tail_k, storage.tail_v):
            if tail is not None and tail.raw is None:
                tail.plane[:, :-1] = 0
        return super().attend(q, storage, plan, sink_q)


class SealsTooLate(ReferenceKernel):
    """The last group of a request stays open when it is full."""

    def store(self, k, v, storage, plan):
        before = [plane.clone() for plane in (*storage.k.values(), *storage.v.values())]
        super().store(k, v, storage, plan)
        if storage.tail_k is not None and plan.max_query > 1:
            for plane, old in zip((*storage.k.values(), *storage.v.values()), before):
                plane[-1] = old[-1]


class Shrugs(ReferenceKernel):
    def unsupported(self, layer, codecs, retention, device, block_size):
        return None if layer.softcap else []


class ReadsTheTensors(ReferenceKernel):
    """As it should be under `graphs`."""

    def graphs(self, storage):
        return True

    def seen(self, plan):
        groups = tuple(GroupPlan(*(x.numpy().copy() for x in (g.slots, g.tables, g.context_lens))) for g in plan.groups)
        arrays = (x.numpy().copy() for x in (plan.positions, plan.query_starts))
        return StepPlan(*arrays, groups, plan.rows.numpy(), plan.copies, plan.max_query, plan.max_context)

    def attend(self, q, storage, plan, sink_q=None):
        return super().attend(q, storage, replace(plan, host=self.seen(plan)), sink_q)


class RemembersThePlan(ReadsTheTensors):
    """The same plan is not always the same step."""

    held = None

    def seen(self, plan):
        if self.held is None or self.held[0] is not plan:
            self.held = plan, super().seen(plan)
        return self.held[1]


# -- caches --------------------------------------------------------------------------------------------------


class Cache(BlockKVCache):
    """A composition of plain parts with room for one long request and a half."""

    def __init__(self, context):
        super().__init__(context, **composed(context.layers, index=TrieIndex()), num_blocks=38)


class FreesTwice(Cache):
    def release(self, request):
        table = self.tables.view(self.tables[request.id], 0).copy()
        super().release(request)
        self.pools[0]._push(table[table != 0][:1])


class PeekCounts(Cache):
    def peek(self, request):
        self.hit_tokens += 1
        return super().peek(request)


class ForgetsCopies(Cache):
    """Copies on write are planned, and not run."""

    def plan(self, batch):
        plan = super().plan(batch)
        if self.storage is not None:
            for group, rows in enumerate(plan.copies):
                self.storage.poison(group, rows[:, 1])
        return plan


class KeepsStaleValues(Cache):
    def invalidate(self):
        pass


class LeavesNothingToCompute(Cache):
    def admit(self, request):
        found = super().admit(request)
        return len(request.tokens) if found else found


class TellsAnotherCapacity(Cache):
    def capacity(self):
        return super().capacity() // 2 * 3


class DictTakesWhatThereIs(DictCache):
    """A grow that fails keeps the room that there was."""

    def grow(self, request, n):
        done = super().grow(request, n)
        if not done:
            self.rows[request.id].room += self.size - self.taken
        return done


class DictDoesNotCut(DictCache):
    def truncate(self, request, length):
        return self.rows[request.id].length


class DictSeesAll(DictCache):
    """Calls itself exact, and has no windows."""

    def _one(self, spec, q, k, v, at):
        return super()._one(replace(spec, window=None), q, k, v, at)
