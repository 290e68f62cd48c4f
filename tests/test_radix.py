"""The radix index alone: what it finds, to the token; what it gives up, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvframe_plugins.lru import LRU
from kvframe_plugins.model_retention import ModelRetention
from kvframe_plugins.radix import RadixIndex
from test_cache import control

from kvframe.errors import IncompatibleCacheError
from kvframe.testing.walked import Walked
from kvframe.types import Keep

FULL, WINDOW = ModelRetention(), ModelRetention(window=5)
ALL = [lambda ids: np.ones(len(ids), dtype=bool)]


def index(size=4, rules=(FULL,), eviction=None, now=lambda: 0.0) -> RadixIndex:
    made = RadixIndex()
    made.attach(size, rules, eviction or LRU(), now)
    return made


def request(tokens, salt="", keep=None) -> Walked:
    return Walked("r", np.array(tokens, np.int32), salt=salt, keep=keep)


def insert(made, tokens, first, salt="", keep=None):
    """Publishes all complete blocks of the tokens under ids from `first` on, in every group."""
    n = len(tokens) // made.size
    blocks = [np.arange(first, first + n, dtype=np.int32) for _ in made.rules]
    return made.insert(request(tokens, salt, keep), blocks, n * made.size)


def found(made, tokens, limit=None):
    """`(n_tokens, blocks, tail)` in plain Python, for one group."""
    match = made.match(request(tokens), len(tokens) if limit is None else limit)
    return match.n_tokens, [ids.tolist() for ids in match.blocks], list(match.tail)


def use(made, tokens, keep=None):
    asked = request(tokens, keep=keep)
    made.touch(asked, made.match(asked, len(tokens)))


def evict(made, n):
    return [ids.tolist() for ids in made.evict([n], ALL)]


# -- match ---------------------------------------------------------------------------------------------------


def test_a_match_ends_at_the_last_shared_token():
    made = index()
    insert(made, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    assert found(made, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == (8, [[10, 11]], [])
    assert found(made, [1, 2, 3, 4, 5, 6, 9, 9, 9]) == (6, [[10]], [(11, 2)])
    assert found(made, [1, 2, 9]) == (2, [[]], [(10, 2)])
    assert found(made, [9, 9]) == (0, [], [])
    assert found(made, [1, 2, 3, 4, 5, 6, 7, 8], limit=7) == (7, [[10]], [(11, 3)])
    assert found(made, [1, 2, 3], limit=0) == (0, [], [])


def test_prefixes_part_within_a_block():
    made = index()
    insert(made, [1, 2, 3, 4, 5, 6, 7, 8], 10)
    answer = insert(made, [1, 2, 3, 4, 5, 6, 9, 9], 20)[0]
    assert answer.blocks.tolist() == [10, 21] and answer.published.tolist() == [21], "block 20 is a duplicate of 10"
    assert found(made, [1, 2, 3, 4, 5, 6, 9, 9, 1]) == (8, [[10, 21]], [])
    assert found(made, [1, 2, 3, 4, 5, 6, 7, 8, 1]) == (8, [[10, 11]], [])
    assert found(made, [1, 2, 3, 4, 5, 6, 1])[0] == 6
    assert made.published(0).tolist() == [10, 11, 21]


def test_salts_share_nothing():
    made = index()
    insert(made, [1, 2, 3, 4], 10, salt="a")
    assert found(made, [1, 2, 3, 4]) == (0, [], [])
    made.clear()
    assert made.published(0).tolist() == []


def test_match_changes_nothing_and_use_makes_recent():
    made = index()
    insert(made, [1] * 8, 10)
    insert(made, [2] * 8, 20)
    for _ in range(3):
        found(made, [1] * 9)
    assert evict(made, 1) == [[11]], "the older prefix goes first, and of it the tail"
    use(made, [1] * 4)
    assert evict(made, 2) == [[21, 20]]
    assert evict(made, 1) == [[10]]
    assert made.roots == {}, "nothing of it is left"


def test_holes_that_no_query_needs_do_not_end_a_match():
    made = index(rules=(FULL, WINDOW))
    tokens = list(range(16))
    blocks = [np.arange(1, 5, dtype=np.int32), np.array([0, 0, 3, 4], np.int32)]
    answer = made.insert(request(tokens), blocks, 16)
    assert [a.published.tolist() for a in answer] == [[1, 2, 3, 4], [3, 4]]
    match = made.match(request([*tokens, 99]), 16)
    assert match.n_tokens == 16 and [ids.tolist() for ids in match.blocks] == [[1, 2, 3, 4], [0, 0, 3, 4]]
    assert made.match(request(tokens[:13] + [99]), 13).n_tokens == 13, "position 13 sees 9 and later"
    assert made.match(request(tokens[:11] + [99]), 11).n_tokens == 0, "position 11 would see 7, which is gone"
    answer = made.insert(request(tokens), [blocks[0], np.array([0, 7, 0, 0], np.int32)], 16)
    assert answer[1].published.tolist() == [7], "another request fills the hole"
    assert made.match(request(tokens[:11] + [99]), 11).n_tokens == 11


def test_contiguous_is_refused_with_the_reason():
    with pytest.raises(IncompatibleCacheError, match="cache/layout=paged"):
        control(["cache=radix", "cache/layout=contiguous"])


# -- eviction ------------------------------------------------------------------------------------------------


def test_blocks_in_use_stay_and_what_lies_before_them():
    made = index()
    insert(made, [1] * 12, 10)
    insert(made, [1] * 4 + [2] * 4, 20)
    assert [ids.tolist() for ids in made.evict([2], [lambda ids: ids != 11])] == [[12, 21]]
    assert set(made.published(0).tolist()) == {10, 11}


def test_priority_and_pins_go_before_recency():
    time = [0.0]
    made = index(now=lambda: time[0])
    insert(made, [1] * 4, 10, keep=Keep(priority=1))
    insert(made, [2] * 4, 20, keep=Keep(pin=60))
    insert(made, [3] * 4, 30)
    insert(made, [4] * 4, 40, keep=Keep(priority=-1))
    assert evict(made, 1) == [[40]] and evict(made, 1) == [[30]] and evict(made, 1) == [[10]]
    insert(made, [5] * 4, 50, keep=Keep(priority=7))
    time[0] = 61.0
    assert evict(made, 1) == [[20]], "its pin is over, its priority is 0"
    insert(made, [6] * 4, 60, keep=Keep(pin=60))
    assert evict(made, 2) == [[50, 60]], "what is pinned goes when nothing else is left"


def test_a_prefix_is_as_dear_as_what_follows():
    made = index()
    insert(made, [1] * 8, 10)
    insert(made, [1] * 8 + [2] * 4, 20, keep=Keep(priority=1))
    insert(made, [3] * 4, 30)
    assert evict(made, 2) == [[30, 22]], "the pinned tail, since nothing behind a block may be left without it"


# -- against a plain model -----------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
steps = st.lists(st.tuples(st.sampled_from(["insert", "insert", "use", "evict"]), prompts), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps=steps, size=st.sampled_from([1, 2, 3, 4]), windowed=st.booleans())
def test_against_a_table_of_prefixes(steps, size, windowed):
    """The plain model: a table from the tokens up to the end of a block to its id, per group."""
    rules = (FULL, WINDOW) if windowed else (FULL,)
    made, table, fresh = index(size, rules), [{} for _ in rules], 1
    for what, tokens in steps:
        keys = [tuple(tokens[: (i + 1) * size]) for i in range(len(tokens) // size)]
        if what == "insert" and keys:
            blocks = [np.arange(fresh, fresh + len(keys), dtype=np.int32) for _ in rules]
            fresh += len(keys)
            for g, answer in enumerate(made.insert(request(tokens), blocks, len(keys) * size)):
                for key, mine, held in zip(keys, blocks[g].tolist(), answer.blocks.tolist()):
                    assert held == table[g].setdefault(key, mine)
        elif what == "use":
            use(made, tokens)
        elif what == "evict":
            need = [len(tokens) % (len(entries) + 1) for entries in table]
            for g, ids in enumerate(made.evict(need, ALL * len(rules))):
                assert len(ids) == need[g]
                table[g] = {key: block for key, block in table[g].items() if block not in set(ids.tolist())}
        for g, entries in enumerate(table):
            assert made.published(g).tolist() == sorted(entries.values())
        _compare(made, table, rules, tokens, size)


def _compare(made, table, rules, tokens, size):
    """The match is sound, and misses nothing but a tail whose nearest source has a hole."""
    match = made.match(request(tokens), len(tokens))
    best = max(n for n in range(len(tokens) + 1) if n % size == 0 and _usable(table, rules, tokens, n, size))
    assert match.n_tokens >= best, f"{best} tokens are there, the index found {match.n_tokens}"
    assert _usable(table, rules, tokens, match.n_tokens, size)
    for g, ids in enumerate(match.blocks):
        keys = [tuple(tokens[: (i + 1) * size]) for i in range(match.n_tokens // size)]
        assert ids.tolist() == [table[g].get(key, 0) for key in keys]
    for g, (source, m) in enumerate(match.tail):
        key = next(key for key, block in table[g].items() if block == source)
        assert m == match.n_tokens % size and key[: match.n_tokens] == tuple(tokens[: match.n_tokens])
        assert len(key) == match.n_tokens // size * size + size


def _usable(table, rules, tokens, n, size):
    for rule, entries in zip(rules, table):
        dead = rule.dead(0, n // size * size, n)
        for i in range(n // size):
            if tuple(tokens[: (i + 1) * size]) not in entries and not dead[i * size : (i + 1) * size].all():
                return False
    return True
