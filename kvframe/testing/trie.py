"""A small exact prefix index for tests: it drives every path that a cache takes on hits.

One node per block in a plain tree, hits of any number of tokens, holes where no query looks, least recently used first.
"""

from __future__ import annotations

import numpy as np

from kvframe.interfaces import Inserted, PrefixIndex
from kvframe.types import Match


class Node:
    """The block after a prefix: its tokens, and the block id in each layer group (0: given up)."""

    def __init__(self, key: bytes, parent: Node | None, groups: int):
        self.key, self.parent, self.children, self.blocks, self.used = key, parent, {}, [0] * groups, 0


class TrieIndex(PrefixIndex):
    """Published blocks by the tokens that lead to them."""

    def attach(self, block_size, groups, eviction, now):
        self.size, self.rules, self.groups = block_size, list(groups), range(len(groups))
        self.clear()

    def clear(self):
        self.roots, self.owner, self.clock = {}, [{} for _ in self.groups], 0

    def match(self, request, limit):
        tokens = np.asarray(request.tokens[: max(limit, 0)], np.int32)
        node, path = self.roots.get(request.salt), []
        while node is not None and len(tokens) >= (len(path) + 1) * self.size:
            node = node.children.get(self._key(tokens, len(path)))
            path += [node] if node is not None else []
        parent = path[-1] if path else self.roots.get(request.salt)
        tail, m = self._tail(parent, tokens[len(path) * self.size :])
        if m and self._complete(path, len(path) * self.size + m):
            source = tuple((tail.blocks[g], m) for g in self.groups)
            return Match(len(path) * self.size + m, self._blocks(path), source)
        while path and not self._complete(path, len(path) * self.size):
            path.pop()
        return Match(len(path) * self.size, self._blocks(path)) if path else Match()

    def _key(self, tokens, i):
        return tokens[i * self.size : (i + 1) * self.size].tobytes()

    def _tail(self, parent, rest):
        """The child that shares most tokens with what is left, and how many (fewer than a block)."""
        best, most = None, 0
        for child in parent.children.values() if parent is not None else ():
            differs = np.flatnonzero(np.frombuffer(child.key, np.int32)[: len(rest)] != rest[: self.size])
            m = int(differs[0]) if len(differs) else min(len(rest), self.size - 1)
            if m > most and all(child.blocks):
                best, most = child, m
        return best, most

    def _complete(self, path, n_tokens):
        """Is every block there that a query at `n_tokens` needs?"""
        for g in self.groups:
            gone = np.array([node.blocks[g] == 0 for node in path], bool).repeat(self.size)
            if (gone & ~self.rules[g].dead(0, len(gone), n_tokens)).any():
                return False
        return True

    def _blocks(self, path):
        return tuple(np.array([node.blocks[g] for node in path], np.int32) for g in self.groups)

    def touch(self, request, match):
        self.clock += 1
        for g in self.groups:
            for block in [*(match.blocks[g] if match.blocks else ()), *([match.tail[g][0]] if match.tail else ())]:
                if block:
                    self.owner[g][int(block)].used = self.clock

    def insert(self, request, blocks, length):
        self.clock += 1
        node = self.roots.setdefault(request.salt, Node(b"", None, len(self.groups)))
        kept, new = [table.copy() for table in blocks], [[] for _ in self.groups]
        for i in range(length // self.size):
            key = self._key(np.asarray(request.tokens, np.int32), i)
            node = node.children.setdefault(key, Node(key, node, len(self.groups)))
            node.used = self.clock
            for g in self.groups:
                block = int(blocks[g][i])
                if node.blocks[g]:
                    kept[g][i] = node.blocks[g] if block else 0
                elif block and block not in self.owner[g]:
                    node.blocks[g], self.owner[g][block] = block, node
                    new[g].append(block)
        return [Inserted(table, np.array(ids, np.int32)) for table, ids in zip(kept, new)]

    def published(self, group):
        return np.array(sorted(self.owner[group]), np.int32)

    def evict(self, need, unused):
        gone = [[] for _ in self.groups]
        for node in sorted({node for owner in self.owner for node in owner.values()}, key=lambda node: node.used):
            for g in self.groups:
                if len(gone[g]) < need[g] and node.blocks[g] and unused[g](np.array([node.blocks[g]]))[0]:
                    gone[g].append(node.blocks[g])
                    del self.owner[g][node.blocks[g]]
                    node.blocks[g] = 0
            while node.parent is not None and not any(node.blocks) and not node.children:
                del node.parent.children[node.key]
                node = node.parent
        return [np.array(ids, np.int32) for ids in gone]
