"""EvictionContract: what kvframe.interfaces.Eviction promises, against an index that is nothing but a set of runs."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe.interfaces import Eviction
from kvframe.testing.contracts.part import PartContract
from kvframe.testing.contracts.promises import example, promise

QUICK = {"max_examples": 60, "deadline": None, "derandomize": True, "database": None, "report_multiple_bugs": False}


class FakeRun:
    """A run of a prefix (see kvframe.interfaces.Run). The same key means the same tokens."""

    def __init__(self, key, start: int = 0, stop: int = 4):
        self.key, self.start, self.stop = key, start, stop

    def __repr__(self):
        return f"run {self.key}"


class FakeIndex:
    """Tells a policy what an index would, checks what it answers, and writes down what was done.

    Runs have a number; of a split the head gets a new one. Some runs are in use; some are behind others and may go only
    when those are gone.
    """

    def __init__(self, policy: Eviction, names=None):
        self.policy, self.runs, self.log, self.names = policy, {}, [], names or itertools.count()
        self.behind: dict[int, int] = {}  # number of a run -> number of the one that has to go first

    def insert(self, choice: int = 0) -> None:
        name = next(self.names)
        if self.runs and choice % 3 == 0:
            self.behind[self._pick(choice)] = name
        self._add(name, FakeRun(("tokens", name)))

    def _add(self, name: int, run: FakeRun) -> None:
        self.runs[name] = run
        self.log.append(f"insert({name})")
        self.policy.on_insert(run)

    def _pick(self, choice: int) -> int:
        return list(self.runs)[choice % len(self.runs)]

    def hit(self, choice: int) -> None:
        if self.runs:
            name = self._pick(choice)
            self.log.append(f"hit({name})")
            self.policy.on_hit(self.runs[name])

    def grow(self, choice: int) -> None:
        if self.runs:
            name = self._pick(choice)
            self.runs[name].stop += 4
            self.log.append(f"grow({name})")
            self.policy.on_insert(self.runs[name])

    def split(self, choice: int) -> None:
        if self.runs:
            name, new = self._pick(choice), next(self.names)
            run = self.runs[name]
            if run.stop - run.start < 2:
                return
            middle = (run.start + run.stop) // 2
            head = self.runs[new] = FakeRun(run.key, run.start, middle)
            run.start, run.key = middle, (run.key, middle)
            self.log.append(f"split({name}, head {new})")
            self.policy.on_split(run, head)

    def remove(self, choice: int) -> None:
        if self.runs:
            self._gone(self._pick(choice))

    def _gone(self, name: int) -> FakeRun:
        run = self.runs.pop(name)
        self.behind = {a: b for a, b in self.behind.items() if name not in (a, b)}
        self.log.append(f"remove({name})")
        self.policy.on_remove(run)
        return run

    def come_back(self, choice: int) -> None:
        """A run is evicted, and then its tokens are inserted again."""
        if self.runs:
            old = self._gone(self._pick(choice))
            self._add(next(self.names), FakeRun(old.key, old.start, old.stop))

    def evict(self, choice: int) -> None:
        """Takes some runs, as an index that needs room: what it takes whole is removed before it asks for the next."""
        draw = random.Random(choice)
        used = {name for name in self.runs if draw.random() < 0.3}
        self.take(used, draw.randrange(len(self.runs) + 2), draw)

    def take(self, used: set[int], most: int, draw: random.Random | None = None, hits: bool = False) -> list[int]:
        """Asks for at most `most` victims beside those in use. Removes about every second (none without `draw`), the
        others have nothing left to take. Answers who was yielded."""
        names = {run: name for name, run in self.runs.items()}
        removed, order, kept = set(), [], set()
        self.log.append(f"victims(not {sorted(used)}, {most} wanted)")

        def evictable(run) -> bool:
            with promise("victims asks only about runs that are there"):
                assert run in names and names[run] not in removed, f"it asked about {run}, which was removed"
            return not {names[run]} & (used | kept) and self.behind.get(names[run]) not in self.runs

        victims = self.policy.victims(evictable)
        for run in itertools.islice(victims, most):
            with promise("victims yields runs that are there, and no run that was removed"):
                assert run in names, f"it yielded {run}, which it was never told of"
                name = names[run]
                assert name not in removed, f"run {name} was removed"
            with promise("victims yields only runs that are evictable at that moment"):
                assert evictable(run), f"run {name} may not go"
            order.append(name)
            if draw is not None and draw.random() < 0.5:
                removed.add(name)
                self._gone(name)
            else:
                kept.add(name)
            if hits and draw is not None and self.runs:
                self.hit(draw.randrange(100))
        victims.close()
        if len(order) < most:
            left = [name for name, run in self.runs.items() if run in names and evictable(run)]
            with promise("victims yields every evictable run before it ends"):
                assert not left, f"it ended, and run {left[0]} could go" if left else ""
        return order

    def check(self) -> None:
        """Everything that is cached may go when nobody uses anything, and stays when everybody does."""
        self.take(set(), len(self.runs) + 1)
        self.take(set(self.runs), 1)


CALLS = ("insert", "insert", "hit", "hit", "grow", "split", "remove", "come_back", "evict")


class EvictionContract(PartContract):
    """Subclass it and define `make(self) -> Eviction`."""

    kind = "eviction"

    @promise("an eviction policy orders the runs of an index")
    def test_random_histories(self):
        calls = st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 1000)), max_size=24)

        @settings(**QUICK)
        @given(calls=calls)
        def histories(calls):
            index = FakeIndex(self.make())
            with example(calls=index.log):
                for call, choice in calls:
                    getattr(index, call)(choice)
                index.check()

        histories()

    @promise("an eviction policy orders the runs of an index")
    def test_long_histories(self):
        for seed in range(6):
            draw, index = random.Random(seed), FakeIndex(self.make())
            with example(seed=seed):
                for step in range(400):
                    getattr(index, draw.choice(CALLS))(draw.randrange(1000))
                    if step % 20 == 0:
                        index.take(set(), draw.randrange(len(index.runs) + 1), draw, hits=True)
                        index.check()

    @promise("the same history makes the same order")
    def test_deterministic(self):
        for seed in range(4):
            orders = []
            for _ in range(2):
                draw, index, order = random.Random(seed), FakeIndex(self.make()), []
                for _ in range(150):
                    getattr(index, draw.choice(CALLS))(draw.randrange(1000))
                    order.append(index.take(set(), 3))
                orders.append(order)
            with example(seed=seed):
                assert orders[0] == orders[1], "two policies that were told the same disagree"

    @promise("a deep copy of a policy is independent: each layer group has its own")
    def test_copies_are_independent(self):
        first = self.make()
        second = copy.deepcopy(first)
        index, other = FakeIndex(first), FakeIndex(second)
        for _ in range(6):
            index.insert(1)
        known = list(second.victims(lambda run: True))
        assert not known, f"the copy knows {known}, of which only the first one was told"
        other.insert(1), other.hit(0)
        index.check(), other.check()
        again = copy.deepcopy(first)  # with runs in it: copies of those are in the copy
        assert sum(1 for _ in again.victims(lambda run: True)) == len(index.runs), "a copy has lost runs"
        index.remove(0)
        index.check()

    @promise("a walk that is cut short leaves everything as it was: who was yielded or passed over is there next time")
    def test_cut_short(self):
        index = FakeIndex(self.make())
        for _ in range(8):
            index.insert(1)
        whole = index.take(set(), 9)
        for most in (1, 3, 0, 8):
            with example(calls=index.log):
                assert index.take(set(), most) == whole[:most], "another order than before"
                index.take({whole[0], whole[-1]}, most)
        assert index.take(set(), 9) == whole, "another order than before"

    @promise("what a policy keeps of runs that are gone does not grow without end")
    def test_nothing_leaks(self):
        policy, names, sizes = self.make(), itertools.count(), []
        for _ in range(4):
            for _ in range(60):
                index = FakeIndex(policy, names)
                for choice in range(6):
                    index.insert(1), index.hit(choice), index.split(choice)
                for run in list(index.runs):
                    index._gone(run)
            sizes.append(_reachable(policy))
        with example(calls="60 times: insert, hit and split 6 runs, then remove all; and so on"):
            assert sizes[3] <= sizes[1] * 1.25 + 50, f"objects that the policy holds after each round: {sizes}"


def _reachable(thing: object) -> int:
    """Number of objects that hang on a thing; classes, functions and modules are not followed."""
    seen, stack = set(), [thing]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType | types.FunctionType | types.MethodType):
            continue
        seen.add(id(item))
        stack += gc.get_referents(item)
    return len(seen)
