"""RetentionContract: what kvframe.interfaces.Retention promises.

Shape legend: N positions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvframe.groups import layer_groups
from kvframe.interfaces import Retention
from kvframe.testing.contracts.part import PartContract, cache_of
from kvframe.testing.contracts.promises import example, promise
from kvframe.testing.parts import model_mask, some_layers
from kvframe.testing.trie import TrieIndex
from kvframe.testing.walker import Walker
from kvframe.types import LayerSpec, Rotary


class RetentionContract(PartContract):
    """Subclass it and define `make(self) -> Retention`.

    Attributes:
        length: positions that are tried, 0 .. length - 1. The rule should drop some of them: give the part small
            windows, or the suite a larger length (it tries every pair).
        layers: what `for_layer` is asked for.
    """

    kind = "retention"
    length = 48
    layers = (*some_layers((None, 6, None, 20)), replace(some_layers((None,) * 5)[4], chunk=16))

    def rules(self) -> list[tuple[str, Retention]]:
        """`(name of the layer, its rule)`, each different rule once."""
        part, found = self.make(), {}
        for layer in self.layers:
            found.setdefault(part.for_layer(layer), _named(layer))
        return [(name, rule) for rule, name in found.items()]

    def table(self, rule: Retention) -> np.ndarray:
        """bool [N, N]: does query q see key k?"""
        at = np.arange(self.length)
        return np.array(np.broadcast_to(rule.visible(at[:, None], at[None, :]), (self.length, self.length)))

    # -- visible ---------------------------------------------------------------------------------------------

    @promise("visible answers booleans, and broadcasts over q_pos and k_pos")
    def test_visible_broadcasts(self):
        for name, rule in self.rules():
            seen, at = self.table(rule), np.arange(self.length)
            assert seen.dtype == np.bool_, f"it answers {seen.dtype}"
            shapes = {"q [N, 1], k [N]": (at[:, None], at), "q [N, 1, 1], k [1, N]": (at[:, None, None], at[None, :])}
            for shape, (q, k) in shapes.items():
                with example(layer=name, shapes=shape):
                    got = np.broadcast_to(rule.visible(q, k), np.broadcast_shapes(q.shape, k.shape))
                    assert np.array_equal(got.reshape(seen.shape), seen), "other shapes, other answers"
            for q, k in itertools.product(range(0, self.length, 5), range(self.length)):
                with example(layer=name, q=q, k=k):
                    one = rule.visible(np.array([q]), np.array([k]))
                    assert np.shape(one) == (1,) and bool(one[0]) == seen[q, k], f"alone {one}, in a grid {seen[q, k]}"
                    wide = rule.visible(np.array([q], np.int32), np.array([k], np.int32))
                    assert bool(wide[0]) == seen[q, k], "int32 positions, another answer"

    @promise("visible is causal: no query sees a key behind it, and each sees at least one")
    def test_visible_is_causal(self):
        for name, rule in self.rules():
            seen = self.table(rule)
            for q in range(self.length):
                with example(layer=name, q=q):
                    late = np.flatnonzero(seen[q, q + 1 :])
                    assert not len(late), f"it sees position {q + 1 + int(late[0])}"
                    assert seen[q].any(), "it sees nothing, so its attention is no number"

    @promise(
        "where kernel_mask is True the mask is exactly `k <= q and (window is None or q - k < window or k < sinks)`"
    )
    def test_kernel_mask_is_the_formula(self):
        for name, rule in self.rules():
            if not rule.kernel_mask:
                continue
            q, k = np.arange(self.length)[:, None], np.arange(self.length)[None, :]
            formula = (k <= q) & (True if rule.window is None else (q - k < rule.window) | (k < rule.sinks))
            self._same(name, self.table(rule), formula, f"window={rule.window}, sinks={rule.sinks} say")

    @promise("a retention that calls itself exact lets each query see what the model itself says")
    def test_exact_is_the_model_s_own_mask(self):
        part = self.make()
        if not part.exact:
            return
        for layer in self.layers:
            q, k = np.arange(self.length)[:, None], np.arange(self.length)[None, :]
            self._same(_named(layer), self.table(part.for_layer(layer)), model_mask(layer, q, k), "the model says")

    def _same(self, layer: str, seen: np.ndarray, want: np.ndarray, who: str) -> None:
        if not np.array_equal(seen, want):
            q, k = (int(i) for i in np.argwhere(seen != want)[0])
            with example(layer=layer, q=q, k=k):
                raise AssertionError(f"visible says {bool(seen[q, k])}, {who} {bool(want[q, k])}")

    # -- dead ------------------------------------------------------------------------------------------------

    def _dead(self, rule: Retention, computed: int) -> np.ndarray:
        return rule.dead(0, self.length, computed)

    @promise("dead answers booleans [stop - start], the same for a position whatever the span it is asked in")
    def test_dead_of_a_span(self):
        for name, rule in self.rules():
            for computed in range(0, self.length + 1, 3):
                whole = np.asarray(self._dead(rule, computed))
                assert whole.dtype == np.bool_ and whole.shape == (self.length,), f"{whole.dtype} {whole.shape}"
                for start, stop in ((0, 0), (0, 4), (3, 7), (self.length - 1, self.length)):
                    with example(layer=name, start=start, stop=stop, num_computed=computed):
                        part = rule.dead(start, stop, computed)
                        assert np.array_equal(part, whole[start:stop]), f"{part}, in a longer span {whole[start:stop]}"

    @promise("what is dead is seen by no query at num_computed or later")
    def test_dead_is_what_no_query_sees(self):
        for name, rule in self.rules():
            seen = self.table(rule)
            for computed in range(self.length):
                wrong = self._dead(rule, computed) & seen[computed:].any(axis=0)
                if wrong.any():
                    position = int(wrong.argmax())
                    query = computed + int(seen[computed:, position].argmax())
                    with example(layer=name, num_computed=computed, position=position):
                        raise AssertionError(f"the position is dead, and the query at {query} sees it")

    @promise("dead is monotone: what is dead stays dead")
    def test_dead_is_monotone(self):
        forgetful = [rule for _, rule in self.rules() if rule.forgets]
        if forgetful and not any(self._dead(rule, n).any() for rule in forgetful for n in range(self.length)):
            pytest.skip(f"nothing dies within {self.length} tokens: smaller windows in make(), or a larger `length`")
        for name, rule in self.rules():
            for computed in range(self.length):
                woken = self._dead(rule, computed) & ~self._dead(rule, computed + 1)
                with example(layer=name, num_computed=computed, position=int(woken.argmax())):
                    assert not woken.any(), "the position is dead, and one token later it lives"

    @promise("under a kernel_mask what no later query sees is dead at once, and nothing else: memory is counted so")
    def test_dead_is_the_formula(self):
        for name, rule in self.rules():
            if not rule.kernel_mask:
                continue
            at = np.arange(self.length)
            for computed in range(self.length):
                never = np.zeros(self.length, bool)
                want = never if rule.window is None else (at <= computed - rule.window) & (at >= rule.sinks)
                wrong = self._dead(rule, computed) != want
                with example(layer=name, num_computed=computed, position=int(wrong.argmax())):
                    assert not wrong.any(), f"dead says {not want[wrong.argmax()]}"

    @promise("forgets=False says that nothing is ever dead")
    def test_what_does_not_forget(self):
        for name, rule in self.rules():
            if not rule.forgets:
                for computed in range(self.length + 1):
                    with example(layer=name, num_computed=computed):
                        assert not self._dead(rule, computed).any(), "something is dead"

    # -- sinks, equality, names ------------------------------------------------------------------------------

    @promise("sink_position is None, or the query's own position or less; less only where no sink is in the window")
    def test_sink_position(self):
        for name, rule in self.rules():
            at = np.arange(self.length)
            found = rule.sink_position(at)
            if found is None:
                continue
            assert np.shape(found) == at.shape, f"shape {np.shape(found)}"
            for q, position in zip(at.tolist(), np.asarray(found).tolist()):
                with example(layer=name, q=q):
                    assert 0 <= position <= q, f"position {position}"
                    near = position < q and rule.window is not None and q - (rule.sinks - 1) < rule.window
                    assert not near, f"it looks from {position}, and a sink is within its window"

    @promise("a retention is pure: the same question has the same answer, and the question is not changed")
    def test_pure(self):
        for (name, rule), (_, twin) in zip(self.rules(), self.rules()):
            at = np.arange(self.length)
            before, deaths = self.table(rule), [self._dead(rule, c) for c in range(self.length)]
            rule.for_layer(self.layers[0]), rule.sink_position(at), rule.visible(at[:3], at[:3])
            q, k = at[:, None].copy(), at[None, :].copy()
            rule.visible(q, k)
            with example(layer=name):
                assert np.array_equal(q, at[:, None]) and np.array_equal(k, at[None, :]), (
                    "visible changed its arguments"
                )
                assert np.array_equal(self.table(rule), before), "visible answers something else the second time"
                for computed in reversed(range(self.length)):
                    with example(num_computed=computed):
                        again = self._dead(rule, computed)
                        assert np.array_equal(again, deaths[computed]), "dead answers something else the second time"
                assert np.array_equal(self.table(twin), before), "another one of the same kind answers something else"

    @promise("rules are compared by value: equal ones are the same rule and hash alike, different ones are not equal")
    def test_compared_by_value(self):
        part, twin = self.make(), self.make()
        for layer in self.layers:
            with example(layer=layer.index):
                a, b = part.for_layer(layer), twin.for_layer(layer)
                assert a == b and hash(a) == hash(b), "for_layer of two equal parts answers rules that are not equal"
        for one, other in itertools.combinations(self.layers, 2):
            a, b = part.for_layer(one), part.for_layer(other)
            with example(layers=f"{one.index} and {other.index}"):
                same = np.array_equal(self.table(a), self.table(b))
                assert same or a != b, "the rules are equal, and queries see other positions"
                assert a != b or hash(a) == hash(b), "equal rules have different hashes"

    @promise("each rule of a model has a short name of its own, for tables and options")
    def test_names(self):
        names = [rule.name for rule in layer_groups(self.make(), self.layers)[0]]
        assert all(isinstance(name, str) and name and " " not in name for name in names), f"{names}"
        assert len(set(names)) == len(names), f"two rules have one name: {names}"

    # -- in a cache ------------------------------------------------------------------------------------------

    @promise("a cache with this retention works: blocks die, hits have holes, and no query misses a key")
    def test_in_a_cache(self):
        from kvframe.kernels.reference import ReferenceKernel
        from kvframe.testing.attending import Attending

        layers = some_layers((None, 10), rotary=Rotary())  # nothing turns, so a second query is the first one
        Walker(cache_of(layers, index=TrieIndex(), retention=self.make()), seed=1).walk(200)
        cache = cache_of(layers, {"kernels": (ReferenceKernel(),)}, index=TrieIndex(), retention=self.make())
        walker = Walker(cache, seed=2, watcher=Attending(cache))
        walker.walk(30)
        assert walker.watcher.outputs > 50, "the walk compared nothing"


def _named(layer: LayerSpec) -> str:
    own = {"window": layer.window, "chunks": layer.chunk}
    facts = " and ".join(f"{name} of {size}" for name, size in own.items() if size is not None)
    return f"{layer.index} (the model's own: {facts})" if facts else f"{layer.index}"
