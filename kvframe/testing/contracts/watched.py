"""An index under watch: each answer is held against a table of what was inserted.

`Watched` stands between a cache and an index, so whatever the cache does to the index is a test of it.
"""

from __future__ import annotations

import numpy as np

from kvframe.interfaces import PrefixIndex
from kvframe.testing.contracts.promises import example, promise

Key = tuple[str, bytes]  # salt, and the tokens up to the end of a block


class Watched(PrefixIndex):
    """The index itself, and per layer group a table: block id -> the tokens that lead to its end."""

    def __init__(self, index: PrefixIndex):
        self.inner, self.keeps, self.exact = index, index.keeps, index.exact

    def conflicts(self, others):
        return self.inner.conflicts(others)

    def attach(self, block_size, groups, eviction, now):
        self.inner.attach(block_size, groups, eviction, now)
        self.size, self.rules = block_size, list(groups)
        self._forget()
        self._published()

    def _forget(self) -> None:
        self.keys: list[dict[int, Key]] = [{} for _ in self.rules]
        self.blocks: list[dict[Key, int]] = [{} for _ in self.rules]
        self.inserted: set[Key] = set()  # every prefix of what was inserted

    def _key(self, request, stop: int) -> Key:
        return request.salt, np.asarray(request.tokens[:stop], np.int32).tobytes()

    @promise("published says which blocks the index holds: those that insert and evict said, each once")
    def _published(self) -> None:
        for g, keys in enumerate(self.keys):
            found = self.inner.published(g)
            with example(layer_group=g):
                assert sorted(found.tolist()) == sorted(keys), f"{sorted(found.tolist())}, not {sorted(keys)}"

    @promise("nodes shows, if anything, every block that is published, after the tokens that lead to it")
    def _shown(self) -> None:
        prefixes, found = [], [{} for _ in self.rules]
        for node in self.inner.nodes():
            before = np.empty(0, np.int32) if node.parent is None else prefixes[node.parent]
            assert len(before) == node.start, f"a run at {node.start} comes after {len(before)} tokens"
            prefixes.append(np.concatenate([before, node.tokens]))
            ends = range((node.start // self.size + 1) * self.size, len(prefixes[-1]) + 1, self.size)
            for g, ids in enumerate(node.blocks):
                assert len(ids) == len(ends), f"{len(ids)} blocks end within the run at {node.start}, not {len(ends)}"
                shown = {b: (node.salt, prefixes[-1][:end].tobytes()) for end, b in zip(ends, ids.tolist()) if b}
                found[g].update(shown)
        assert not prefixes or found == self.keys, "other blocks than those, or after other tokens"

    # -- match -----------------------------------------------------------------------------------------------

    def match(self, request, limit):
        tokens = np.asarray(request.tokens).tolist()
        with example(asked=tokens, salt=request.salt, limit=limit, block_size=self.size):
            found, again = self.inner.match(request, limit), self.inner.match(request, limit)
            with promise("match changes nothing: asked twice it answers the same"):
                same = (found.n_tokens, found.tail) == (again.n_tokens, again.tail)
                same = same and all(np.array_equal(a, b) for a, b in zip(found.blocks, again.blocks))
                assert same, f"first {found}, then {again}"
            self._published()
            n = found.n_tokens
            with promise("a match has at most `limit` tokens, and a block per layer group for each complete one"):
                assert 0 <= n <= max(limit, 0), f"{n} tokens"
                whole = [len(ids) for ids in found.blocks] or [0] * len(self.rules)
                assert whole == [n // self.size] * len(self.rules), f"{n} tokens, {whole} blocks"
                assert not n % self.size or len(found.tail) == len(self.rules), f"{n} tokens, tail {found.tail}"
            with promise("a match is a true prefix of something that was inserted under the same salt"):
                assert not n or self._key(request, n) in self.inserted, f"{n} tokens match, they were never inserted"
            for g in range(len(self.rules)):
                with example(layer_group=g):
                    self._holds(request, found, g)
            with promise("a match is the longest usable prefix"):
                best = self._best(request, limit)
                assert n >= best, f"{n} tokens, and {best} are there"
        return found

    def _holds(self, request, found, g: int) -> None:
        n, keys = found.n_tokens, self.keys[g]
        for i, block in enumerate(found.blocks[g].tolist() if found.blocks else ()):
            if block:
                with promise("a block of a match holds the tokens that the request has there"):
                    assert keys.get(block) == self._key(request, (i + 1) * self.size), (
                        f"block {i} of the match is {block}"
                    )
            else:
                with promise("a match has a hole only where retention says that no later query looks"):
                    dead = self.rules[g].dead(i * self.size, (i + 1) * self.size, n)
                    assert dead.all(), f"block {i} of the {n} tokens is missing"
        if found.tail:
            source, m = found.tail[g]
            with promise(
                "the tail of a match is the beginning of a block that holds the tokens that the request has there"
            ):
                salt, tokens = keys.get(source, (None, b""))
                wanted = self._key(request, n)[1]
                assert m == n % self.size and salt == request.salt, f"{m} slots of block {source}"
                assert tokens.startswith(wanted) and len(tokens) // 4 == n - m + self.size, (
                    f"{m} slots of block {source}"
                )

    def _best(self, request, limit: int) -> int:
        """The most tokens, in whole blocks, after which every block that a query needs is there."""
        length = max(min(limit, len(request.tokens)), 0) // self.size
        there = np.array(
            [[self._key(request, (i + 1) * self.size) in blocks for i in range(length)] for blocks in self.blocks], bool
        ).reshape(len(self.rules), length)
        for n in range(length, 0, -1):
            dead = [r.dead(0, n * self.size, n * self.size).reshape(n, -1).all(1) for r in self.rules]
            known = there[:, :n].any()  # else nobody knows whether these tokens were ever seen
            if known and all((own[:n] | gone).all() for own, gone in zip(there, dead)) and self._seen(request, n):
                return n * self.size
        return 0

    def _seen(self, request, n: int) -> bool:
        """Is the last block there in some layer group?"""
        return any(self._key(request, n * self.size) in blocks for blocks in self.blocks)

    # -- changes ---------------------------------------------------------------------------------------------

    def touch(self, request, match):
        self.inner.touch(request, match)
        self._published()
        self._shown()

    def insert(self, request, blocks, length):
        given = [np.array(table) for table in blocks]
        done = self.inner.insert(request, blocks, length)
        for n in range(length, 0, -1):
            if self._key(request, n) in self.inserted:
                break
            self.inserted.add(self._key(request, n))
        with example(inserted=np.asarray(request.tokens[:length]).tolist(), salt=request.salt, block_size=self.size):
            with promise("insert answers one Inserted per layer group, and leaves the tables that it is given alone"):
                assert len(done) == len(self.rules), f"{len(done)} answers"
                assert all(np.array_equal(a, b) for a, b in zip(given, blocks)), "a table was changed"
            for g, (table, answer) in enumerate(zip(given, done)):
                with example(layer_group=g, table=table, answer=answer.blocks, published=answer.published):
                    self._adopt(request, g, table, answer)
        self._published()
        return done

    def _adopt(self, request, g: int, table: np.ndarray, answer) -> None:
        keys, blocks = self.keys[g], self.blocks[g]
        with promise("insert publishes blocks of the request, none of which it held before"):
            assert self.keeps or not len(answer.published), "keeps is False"
            mine = set(table.tolist()) - {0}
            wrong = [b for b in answer.published.tolist() if b not in mine or b in keys]
            assert not wrong, f"block {wrong[0]}"
        assert len(answer.blocks) == len(table), f"{len(answer.blocks)} blocks for a table of {len(table)}"
        new = set(answer.published.tolist())
        for i, (own, held) in enumerate(zip(table.tolist(), answer.blocks.tolist())):
            key = self._key(request, (i + 1) * self.size)
            if own in new:
                with promise("insert publishes one block for the same tokens, not two"):
                    assert blocks.get(key, own) == own, f"block {own}, and {blocks[key]} was there"
                keys[own], blocks[key] = key, own
            with promise("requests with different salts share no block"):
                salt = keys.get(held, key)[0]
                assert salt == request.salt, f"block {held} was inserted under salt {salt!r}"
            with promise("insert answers the published block of the same tokens where there is one, else the own one"):
                want = blocks.get(key, own) if own else 0
                assert held == want, f"block {i} is {held}, not {want}"
            if self.keeps and own:
                with promise("insert publishes every complete block"):
                    assert key in blocks, f"block {own} of the request is not published"

    def published(self, group):
        return self.inner.published(group)

    def nodes(self):
        return self.inner.nodes()

    def evict(self, need, unused):
        before = [set(keys) for keys in self.keys]
        free = [{b for b in held if unused[g](np.array([b], np.int32))[0]} for g, held in enumerate(before)]
        gone = self.inner.evict(need, unused)
        for g, ids in enumerate(gone):
            ids = ids.tolist()
            with example(layer_group=g, need=need[g], unused=sorted(free[g]), gave_up=ids):
                with promise("evict answers ids that the index held, each once"):
                    assert len(set(ids)) == len(ids) and set(ids) <= before[g], f"it answered {ids}"
                with promise("evict gives up what nobody uses, and never a block that a request holds"):
                    held = sorted(set(ids) - free[g])
                    assert not held, f"block {held[0]} is in use" if held else ""
                with promise("evict gives up as many unused blocks as are needed"):
                    assert len(ids) >= min(need[g], len(free[g])), f"{len(ids)} blocks"
            for block in ids:
                del self.blocks[g][self.keys[g].pop(block)]
        self._published()
        self._shown()
        return gone

    def clear(self):
        self.inner.clear()
        self._forget()
        with promise("clear forgets everything"):
            left = [self.inner.published(g).tolist() for g in range(len(self.rules))]
            assert not any(left), f"it still holds {left}"
