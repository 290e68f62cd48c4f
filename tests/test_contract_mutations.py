"""Parts that are broken on purpose: each is caught by its contract suite, and the promise that it breaks is named."""

from __future__ import annotations

import importlib.util
import textwrap
from dataclasses import dataclass, field

import broken_caches as worse
import broken_parts as bad
import pytest

import kvframe.testing
from kvframe.errors import MissingPackageError
from kvframe.testing import (
    CodecContract,
    EvictionContract,
    IndexContract,
    KernelContract,
    KVCacheContract,
    LayoutContract,
    RetentionContract,
)
from kvframe.testing.codecs import Eights
from kvframe.testing.contracts import BrokenPromise
from kvframe.testing.parts import Band, Blocks, Oldest


@dataclass
class Mutation:
    """A broken part, words of the promise that must be named, and the tests of the suite to run (all of them if none is
    named)."""

    contract: type
    part: object
    promise: str
    tests: str = ""
    more: dict = field(default_factory=dict)


def codec(part, promise: str, tests: str = "", **more) -> Mutation:
    return Mutation(CodecContract, part, promise, tests, {"bound": 0.004, "dims": (16,), **more})


REMEMBERED = "nothing_is_remembered_or_changed"
MUTATIONS = [
    codec(bad.LooksAround, "from itself alone: no other token and no other head", "each_is_encoded_alone"),
    codec(bad.SharesAcrossHeads, "from itself alone: no other token and no other head", "each_is_encoded_alone"),
    codec(bad.SealsTogether, "from itself alone: no other token and no other head", "each_is_encoded_alone"),
    codec(bad.WiderThanDeclared, "the planes that `planes` declares", "planes_are_as_declared"),
    codec(bad.WiderThanDeclared, "bytes are those that `planes` declares", "bytes_are_as_declared"),
    codec(Eights, "the declared bound is not too wide", bound=0.05),
    codec(Eights, "further away than the declared bound", bound=0.002),
    codec(Eights, "any other declares how far off its numbers are", bound=None),
    codec(bad.Remembers, "they remember nothing", REMEMBERED),
    codec(bad.SpoilsItsInput, "leave what they are given as it was", REMEMBERED),
    codec(bad.SwallowsNaN, "a NaN stays NaN", "nan_stays_at_home"),
    codec(bad.Shifted, "affine is true", "affine"),
    codec(bad.RoundsDown, "peak is true", "peak"),
    codec(bad.ReadsItsNeighbours, "decode reads the vector it is asked for and no other", "each_is_decoded_alone"),
    codec(bad.NoFix, "each names the override that fixes it", "conflicts_name_their_fix"),
    Mutation(RetentionContract, bad.Moody, "a retention is pure"),
    Mutation(RetentionContract, lambda: bad.Wakes(6), "dead is monotone"),
    Mutation(RetentionContract, lambda: bad.KillsTooSoon(6), "what is dead is seen by no query"),
    Mutation(RetentionContract, bad.LooksAhead, "visible is causal"),
    Mutation(RetentionContract, bad.AllAlike, "rules are compared by value"),
    Mutation(RetentionContract, lambda: bad.SaysItIsExact(6), "lets each query see what the model itself says"),
    Mutation(LayoutContract, bad.Grows, "block_size is always the same"),
    Mutation(LayoutContract, bad.IgnoresUnits, "holds whole units of a codec that seals"),
    Mutation(IndexContract, worse.ForgetsWhoUses, "never a block that a request holds", "walks"),
    Mutation(IndexContract, worse.ForgetsWhoUses, "never a block that a request holds", "evict_to_the_last"),
    Mutation(IndexContract, worse.OneSalt, "different salts share no block", "salts"),
    Mutation(IndexContract, worse.OneSalt, "inserted under the same salt", "walks"),
    Mutation(IndexContract, worse.MatchConsumes, "match changes nothing", "walks"),
    Mutation(IndexContract, worse.HolesEverywhere, "only where retention says that no later query looks", "walks"),
    Mutation(IndexContract, worse.KeepsTwice, "one block for the same tokens, not two", "walks"),
    Mutation(IndexContract, worse.WrongBlock, "a true prefix of something that was inserted", "walks"),
    Mutation(IndexContract, worse.NeverForgets, "clear forgets everything", "clear"),
    Mutation(EvictionContract, bad.AsksNobody, "yields only runs that are evictable"),
    Mutation(EvictionContract, bad.Hoards, "does not grow without end"),
    Mutation(EvictionContract, bad.YieldsTheDead, "only about runs that are there", "long_histories"),
    Mutation(EvictionContract, bad.DropsWhomItPasses, "passed over is there next time", "cut_short"),
    Mutation(EvictionContract, bad.OneForAll, "a deep copy of a policy is independent"),
    Mutation(KernelContract, worse.LosesTheLastSlot, "at every edge of a block", "edges_of_blocks"),
    Mutation(KernelContract, worse.ReadsEverything, "a slot that no query may see is not read", "poison"),
    Mutation(KernelContract, worse.ScalesItsQueries, "q, k and v stay as they were", "arguments"),
    Mutation(KernelContract, worse.SpillsOver, "touches no other slot", "store"),
    Mutation(KernelContract, worse.LooksAtTheBatch, "does not depend on its neighbours", "neighbours"),
    Mutation(KernelContract, worse.RemembersThePlan, "where another step may lie the next time", "graphs"),
    Mutation(KernelContract, worse.LosesOpenGroups, "a query sees its own group in full precision", "groups"),
    Mutation(KernelContract, worse.SealsTooLate, "groups that a step fills are sealed", "store_groups"),
    Mutation(KernelContract, worse.Shrugs, "unsupported answers a list of reasons", "unsupported"),
    Mutation(KVCacheContract, worse.FreesTwice, "check() holds after every call", "walks"),
    Mutation(KVCacheContract, worse.DictTakesWhatThereIs, "grow answers False only when nothing changed", "full"),
    Mutation(KVCacheContract, worse.PeekCounts, "peek takes nothing and changes nothing", "walks"),
    Mutation(KVCacheContract, worse.ForgetsCopies, "the same attention alone and in any batch", "walks"),
    Mutation(KVCacheContract, worse.KeepsStaleValues, "after invalidate nothing", "invalidate"),
    Mutation(KVCacheContract, worse.LeavesNothingToCompute, "admit leaves at least one token", "control_plane"),
    Mutation(KVCacheContract, worse.TellsAnotherCapacity, "what the longest single request can reach", "capacity"),
    Mutation(KVCacheContract, worse.DictDoesNotCut, "truncate answers the length that was kept", "control_plane"),
    Mutation(KVCacheContract, worse.DictSeesAll, "calls itself exact computes the attention of the model", "walks"),
]


def broken(mutation: Mutation) -> dict[str, BrokenPromise]:
    """Test of the suite -> the promise that it found broken."""
    whole = mutation.contract is KVCacheContract
    make = (lambda self, context: mutation.part(context)) if whole else lambda self: mutation.part()
    suite = type("Suite", (mutation.contract,), {"make": make, **mutation.more})
    assert suite.__test__ and not mutation.contract.__test__
    found = {}
    tests = [f"test_{name}" for name in mutation.tests.split()]
    for name in tests or [name for name in dir(suite) if name.startswith("test_")]:
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
    assert not broken(codec(part, "") if kind is CodecContract else Mutation(kind, part, ""))


def test_a_kernel_that_reads_the_tensors_may_be_captured():
    assert not broken(Mutation(KernelContract, worse.ReadsTheTensors, "", "graphs"))


def test_the_example_is_small():
    """Of the calls of a cache those are shown that it takes, not all of a long walk."""
    error = broken(Mutation(IndexContract, worse.ForgetsWhoUses, "", "walks"))["test_walks"]
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
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "hypothesis" else there(name))
    with pytest.raises(MissingPackageError, match=r'not installed: hypothesis\n  fix: pip install "kvframe\[test'):
        _ = kvframe.testing.CodecContract
    assert kvframe.testing.tiny_model, "what needs neither is still there"
