"""Parts that are broken on purpose: each is caught by its contract suite, and the promise that it breaks is named."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from dict_cache import DictCache

from kvframe.cache import BlockKVCache
from kvframe.interfaces import Inserted
from kvframe.kernels.reference import ReferenceKernel
from kvframe.testing import (
    CodecContract,
    EvictionContract,
    IndexContract,
    KernelContract,
    KVCacheContract,
    LayoutContract,
    RetentionContract,
)
from kvframe.testing.codecs import Eights, Sealed
from kvframe.testing.contracts import BrokenPromise
from kvframe.testing.contracts.part import composed
from kvframe.testing.parts import Band, Blocks, Oldest
from kvframe.testing.trie import TrieIndex

# -- codecs --------------------------------------------------------------------------------------------------


class LooksAround(Eights):
    """One scale for the whole batch."""

    def encode(self, x):
        scale = x.float().nan_to_num(0.0, 1.0, 1.0).abs().amax().clamp(min=1e-9) / 127
        codes = (x.float() / scale).round().clamp(-127, 127).nan_to_num()
        return {"payload": codes.to(torch.int8), "scale": scale.expand(*x.shape[:-1], 1).clone()}


class SharesAcrossHeads(Eights):
    def encode(self, x):
        made = super().encode(x)
        scale = made["scale"].amax(-2, keepdim=True).expand_as(made["scale"]).clone()
        return {"payload": (x.float() / scale).round().nan_to_num().to(torch.int8), "scale": scale}


class WiderThanDeclared(Eights):
    def encode(self, x):
        made = super().encode(x)
        return {**made, "payload": made["payload"].short()}


class Remembers(Eights):
    """The scale never shrinks."""

    most = 0.0

    def encode(self, x):
        made = super().encode(x)
        self.most = max(self.most, float(made["scale"].nan_to_num(0.0).max()))
        return {"payload": (x.float() / self.most).round().nan_to_num().to(torch.int8),
                "scale": torch.full_like(made["scale"], self.most)}  # fmt: skip


class SwallowsNaN(Eights):
    def encode(self, x):
        return super().encode(x.nan_to_num(0.0))


class Shifted(Eights):
    """Says that it is number * scale, and adds something."""

    def decode(self, planes, dtype):
        return super().decode(planes, dtype) + planes["scale"].to(dtype)


class RoundsDown(Eights):
    def encode(self, x):
        made = super().encode(x)
        return {**made, "payload": (x.float() / made["scale"]).floor().clamp(-127, 127).nan_to_num().to(torch.int8)}


class ReadsItsNeighbours(Eights):
    def decode(self, planes, dtype):
        return super().decode(planes, dtype) + 0 * super().decode(planes, dtype).sum()


class SpoilsItsInput(Eights):
    def encode(self, x):
        return super().encode(x.clamp_(-1e6, 1e6))


class SealsTogether(Sealed):
    """One scale for all groups of a batch."""

    def encode(self, x):
        return {name: plane if name == "payload" else plane.amax(0, keepdim=True).expand_as(plane).clone()
                for name, plane in super().encode(x).items()}  # fmt: skip


class NoFix(Eights):
    def conflicts(self, others):
        return ["it does not like these parts"]


# -- retentions ----------------------------------------------------------------------------------------------


class Moody(Band):
    """Every third answer is another one."""

    asked = [0]

    def visible(self, q_pos, k_pos):
        self.asked[0] += 1
        seen = super().visible(q_pos, k_pos)
        return seen & (q_pos == k_pos) if self.asked[0] % 3 == 0 else seen


class Wakes(Band):
    """What is dead lives again at every eighth token."""

    def dead(self, start, stop, num_computed):
        gone = super().dead(start, stop, num_computed)
        return gone & (num_computed % 8 != 0)


class KillsTooSoon(Band):
    def dead(self, start, stop, num_computed):
        return super().dead(start, stop, num_computed + 1)


class LooksAhead(Band):
    def visible(self, q_pos, k_pos):
        return k_pos <= q_pos + 1


class AllAlike(Band):
    def __eq__(self, other):
        return isinstance(other, AllAlike)

    def __hash__(self):
        return 1


# -- layouts -------------------------------------------------------------------------------------------------


class Grows(Blocks):
    """Blocks of another size each time that somebody asks."""

    def block_size(self, max_len, unit=1):
        self.size += 1
        return self.size


class IgnoresUnits(Blocks):
    def block_size(self, max_len, unit=1):
        return 5


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


# -- evictions -----------------------------------------------------------------------------------------------


class AsksNobody(Oldest):
    def victims(self, evictable):
        yield from list(self.order)


class Hoards(Oldest):
    """Remembers every run that is gone."""

    def __init__(self):
        super().__init__()
        self.gone = []

    def on_remove(self, run):
        super().on_remove(run)
        self.gone.append(run)


class YieldsTheDead(Oldest):
    def on_remove(self, run):
        pass


class DropsWhomItPasses(Oldest):
    def victims(self, evictable):
        for run in list(self.order):
            if run in self.order and evictable(run):
                yield run
            else:
                self.order.pop(run, None)


class OneForAll(Oldest):
    """All copies share one order."""

    def __deepcopy__(self, memo):
        return self


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


class Shrugs(ReferenceKernel):
    def unsupported(self, layer, codecs, retention, device):
        return None if layer.softcap else []


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
        from dataclasses import replace

        return super()._one(replace(spec, window=None), q, k, v, at)


@dataclass
class Mutation:
    contract: type
    part: object
    promise: str  # words of the sentence that must be named
    tests: tuple[str, ...] = ()  # the tests to run; all of them when it is empty
    more: dict = field(default_factory=dict)


CODEC = {"bound": 0.004, "dims": (16,)}
CALLS, ALONE = ("test_walks",), ("test_each_is_encoded_alone",)
MUTATIONS = [
    Mutation(CodecContract, LooksAround, "encoded from itself alone: no other token and no other head", ALONE, CODEC),
    Mutation(CodecContract, SharesAcrossHeads, "encoded from itself alone: no other token and no other", ALONE, CODEC),
    Mutation(CodecContract, SealsTogether, "encoded from itself alone: no other token and no other head", ALONE, CODEC),
    Mutation(CodecContract, WiderThanDeclared, "encode answers the planes that `planes` declares", ("test_planes_are_as_declared",), more=CODEC),
    Mutation(CodecContract, WiderThanDeclared, "the stored bytes are those that `planes` declares", ("test_bytes_are_as_declared",), more=CODEC),
    Mutation(CodecContract, Eights, "the declared bound is not too wide", more={**CODEC, "bound": 0.05}),
    Mutation(CodecContract, Eights, "further away than the declared bound", more={**CODEC, "bound": 0.002}),
    Mutation(CodecContract, Eights, "any other declares how far off its numbers are", more={**CODEC, "bound": None}),
    Mutation(CodecContract, Remembers, "they remember nothing", ("test_nothing_is_remembered_or_changed",), more=CODEC),
    Mutation(CodecContract, SpoilsItsInput, "leave what they are given as it was", ("test_nothing_is_remembered_or_changed",), more=CODEC),
    Mutation(CodecContract, SwallowsNaN, "a NaN stays NaN", ("test_nan_stays_at_home",), more=CODEC),
    Mutation(CodecContract, Shifted, "affine is true", ("test_affine",), more={**CODEC, "bound": 0.012}),
    Mutation(CodecContract, RoundsDown, "peak is true", ("test_peak",), more={**CODEC, "bound": 0.008}),
    Mutation(CodecContract, ReadsItsNeighbours, "decode reads the vector it is asked for and no other", ("test_each_is_decoded_alone",), more=CODEC),
    Mutation(CodecContract, NoFix, "each names the override that fixes it", ("test_conflicts_name_their_fix",), more=CODEC),
    Mutation(RetentionContract, Moody, "a retention is pure"),
    Mutation(RetentionContract, lambda: Wakes(6), "dead is monotone"),
    Mutation(RetentionContract, lambda: KillsTooSoon(6), "what is dead is seen by no query"),
    Mutation(RetentionContract, LooksAhead, "visible is causal"),
    Mutation(RetentionContract, AllAlike, "rules are compared by value"),
    Mutation(RetentionContract, lambda: Band(6, kernel_mask=True), "lets each query see what the model itself says",
             more={"make": lambda self: type("Sure", (Band,), {"exact": True})(6)}),  # fmt: skip
    Mutation(LayoutContract, Grows, "block_size is always the same"),
    Mutation(LayoutContract, IgnoresUnits, "holds whole units of a codec that seals"),
    Mutation(IndexContract, ForgetsWhoUses, "never a block that a request holds", CALLS),
    Mutation(IndexContract, ForgetsWhoUses, "never a block that a request holds", ("test_evict_to_the_last",)),
    Mutation(IndexContract, OneSalt, "different salts share no block", ("test_salts",)),
    Mutation(IndexContract, OneSalt, "inserted under the same salt", CALLS),
    Mutation(IndexContract, MatchConsumes, "match changes nothing", CALLS),
    Mutation(IndexContract, HolesEverywhere, "only where retention says that no later query looks", CALLS),
    Mutation(IndexContract, KeepsTwice, "one block for the same tokens, not two", CALLS),
    Mutation(IndexContract, WrongBlock, "a true prefix of something that was inserted", CALLS),
    Mutation(IndexContract, NeverForgets, "clear forgets everything", ("test_clear",)),
    Mutation(EvictionContract, AsksNobody, "yields only runs that are evictable"),
    Mutation(EvictionContract, Hoards, "does not grow without end"),
    Mutation(EvictionContract, YieldsTheDead, "only about runs that are there", ("test_long_histories",)),
    Mutation(EvictionContract, DropsWhomItPasses, "yields every evictable run before it ends", ("test_long_histories",)),
    Mutation(EvictionContract, OneForAll, "a deep copy of a policy is independent"),
    Mutation(KernelContract, LosesTheLastSlot, "at every edge of a block", ("test_edges_of_blocks",)),
    Mutation(KernelContract, ReadsEverything, "a slot that no query may see is not read", ("test_poison",)),
    Mutation(KernelContract, ScalesItsQueries, "q, k and v stay as they were", ("test_arguments",)),
    Mutation(KernelContract, SpillsOver, "touches no other slot", ("test_store",)),
    Mutation(KernelContract, LooksAtTheBatch, "does not depend on its neighbours", ("test_neighbours",)),
    Mutation(KernelContract, Shrugs, "unsupported answers a list of reasons", ("test_unsupported",)),
    Mutation(KVCacheContract, FreesTwice, "check() holds after every call", CALLS),
    Mutation(KVCacheContract, DictTakesWhatThereIs, "grow answers False only when nothing changed", ("test_full",)),
    Mutation(KVCacheContract, PeekCounts, "peek takes nothing and changes nothing", CALLS),
    Mutation(KVCacheContract, ForgetsCopies, "the same attention alone and in any batch", CALLS),
    Mutation(KVCacheContract, KeepsStaleValues, "after invalidate nothing", ("test_invalidate",)),
    Mutation(KVCacheContract, LeavesNothingToCompute, "admit leaves at least one token", ("test_control_plane",)),
    Mutation(KVCacheContract, TellsAnotherCapacity, "what the longest single request can reach", ("test_capacity",)),
    Mutation(KVCacheContract, DictDoesNotCut, "truncate answers the length that was kept", ("test_control_plane",)),
    Mutation(KVCacheContract, DictSeesAll, "calls itself exact computes the attention of the model", CALLS),
]  # fmt: skip


def broken(mutation: Mutation) -> dict[str, BrokenPromise]:
    """Test of the suite -> the promise that it found broken."""
    whole = mutation.contract is KVCacheContract
    make = (lambda self, context: mutation.part(context)) if whole else lambda self: mutation.part()
    suite = type("Suite", (mutation.contract,), {"make": make, **mutation.more})
    assert suite.__test__ and not mutation.contract.__test__
    found = {}
    for name in mutation.tests or [name for name in dir(suite) if name.startswith("test_")]:
        try:
            getattr(suite(), name)()
        except BrokenPromise as error:
            found[name] = error
        except pytest.skip.Exception:
            pass
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{getattr(m.part, '__name__', '')}: {m.promise}")
def test_a_broken_part_is_caught_and_the_promise_named(mutation):
    found = broken(mutation)
    named = [error for error in found.values() if mutation.promise in error.promise]
    assert named, {name: str(error) for name, error in found.items()}
    for error in found.values():
        first, *rest = str(error).split("\n")
        assert first == error.promise and rest[0].startswith("  example: ") and "\n  seen: " in str(error)


@pytest.mark.parametrize("kind, part", [(CodecContract, Eights), (RetentionContract, Band), (LayoutContract, Blocks),
    (EvictionContract, Oldest)], ids=lambda x: x.__name__)  # fmt: skip
def test_without_a_mutation_nothing_is_found(kind, part):
    """Else the tests above would say nothing. The other suites are tried in test_contracts.py."""
    assert not broken(Mutation(kind, part, "", more=CODEC if kind is CodecContract else {}))


def test_the_example_is_small():
    """Hypothesis shortens the calls of a cache to those that are needed."""
    error = broken(Mutation(IndexContract, ForgetsWhoUses, "", CALLS))["test_walks"]
    text = str(error)
    calls = [line.strip() for line in text.split("\n") if line.startswith("    ")]
    assert 5 <= len(calls) <= 24 and calls[0].startswith("admit(w1,") and calls[-1].startswith("evict("), text
    assert "block_size=4" in text and "in use" in text


def test_what_pytest_shows(tmp_path, capsys):
    """The suite is collected from the subclass only; a failure tells the promise, the example and what was seen."""
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent(
            """
            from kvframe.testing import CodecContract, LayoutContract
            from kvframe.testing.parts import Blocks

            class Mine(Blocks):
                def block_size(self, max_len, unit=1):
                    return 0 if max_len == 2 else super().block_size(max_len, unit)

            class TestMine(LayoutContract):
                def make(self):
                    return Mine()
            """
        )
    )
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path), str(tmp_path)])
    shown = capsys.readouterr().out
    assert code == 1 and "TestMine" in shown and "CodecContract" not in shown
    assert "block_size is an integer of at least 1\n" in shown
    assert "example: max_len=2, unit=1" in shown and "seen: it answered 0" in shown


def test_without_hypothesis_the_error_says_what_to_install(monkeypatch):
    import importlib.util

    import kvframe.testing
    from kvframe.errors import MissingPackageError

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hypothesis" else there(name))
    with pytest.raises(MissingPackageError, match=r'not installed: hypothesis\n  fix: pip install "kvframe\[test'):
        _ = kvframe.testing.CodecContract
    assert kvframe.testing.tiny_model, "what needs neither is still there"
