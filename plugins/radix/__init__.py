"""Radix index: a tree of token prefixes finds the keys and values that are there already, to the token.

Sources: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024
(arXiv:2312.07104) for the radix tree; blocks with holes per layer group after vLLM's hybrid cache manager.

A match ends at the last token that is shared. Its complete blocks are held as they are; the m < block_size tokens
after them are slots of some block beneath, which the cache copies (`Match.tail`). A block that retention has dropped is
a hole: the match goes as far as every layer group has what the next query needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy

import numpy as np
from kvframe_plugins.radix.tree import Node, beneath, change, link, preorder, split, walk

from kvframe.interfaces import Inserted, PrefixIndex
from kvframe.types import IndexNode, Keep, Match

LOOK = 32  # nodes that are looked at for the source of a tail


class RadixIndex(PrefixIndex):
    """Blocks by the tokens that lead to them, one tree per salt."""

    def conflicts(self, others):
        size = others.block_size
        if size < others.max_len:
            return []
        return [
            f"the radix index shares complete blocks, and a block of {size} tokens holds a whole request of "
            f"engine.max_len={others.max_len}: cache/layout=paged with a block_size below that, or more engine.max_len"
        ]

    def attach(self, block_size, groups, eviction, now):
        self.size, self.rules, self.now = block_size, list(groups), now
        self._policy, self._none = eviction, np.empty(0, np.int32)
        self.clear()

    def clear(self):
        self.roots: dict[str, Node] = {}
        self.policies = [{0: deepcopy(self._policy)} for _ in self.rules]  # per group: priority -> policy
        self.known = [np.zeros(64, dtype=bool) for _ in self.rules]  # block id -> is it here?

    # -- match -----------------------------------------------------------------------------------------------

    def match(self, request, limit):
        root = self.roots.get(request.salt)
        if root is None or limit <= 0:
            return Match()
        last, position = walk(root, request.tokens[:limit])
        path = last.path()
        complete = position // self.size
        blocks = [
            np.concatenate([self._none, *(node.blocks[g] for node in path)])[:complete] for g in range(len(self.rules))
        ]
        length, tail = self._reach(blocks, position), ()
        if length == position and position % self.size:
            tail = self._tail(last, position)
        if not tail:
            length = self._reach(blocks, length // self.size * self.size)
        if not length:
            return Match()
        return Match(length, tuple(ids[: length // self.size] for ids in blocks), tail, note=(last, length))

    def _reach(self, blocks: Sequence[np.ndarray], n: int) -> int:
        """The most tokens <= n after which no query needs a block that is gone."""
        before = -1
        while n != before:
            before = n
            for rule, ids in zip(self.rules, blocks):
                lost = np.flatnonzero(ids[: n // self.size] == 0)
                if len(lost) and rule.forgets:
                    lost = lost[~self._dead(rule, 0, n // self.size, n)[lost]]
                if len(lost):
                    n = int(lost[0]) * self.size
        return n

    def _dead(self, rule, first: int, stop: int, n: int) -> np.ndarray:
        """bool: which of the blocks [first, stop) no query at n or later can see."""
        return rule.dead(first * self.size, stop * self.size, n).reshape(-1, self.size).all(axis=1)

    def _tail(self, node: Node, position: int) -> tuple[tuple[int, int], ...]:
        """A block beneath, in every group, whose first slots are the last tokens of the match."""
        logical, m = position // self.size, position % self.size
        for candidate in beneath(node, LOOK):
            i = logical - candidate.start // self.size
            if 0 <= i < len(candidate.blocks[0]) and all(ids[i] for ids in candidate.blocks):
                return tuple((int(ids[i]), m) for ids in candidate.blocks)
        return ()

    def touch(self, request, match):
        if match.note is None:
            return
        node, length = match.note
        used = length // self.size * self.size
        while node.parent is not None and used // self.size <= node.start // self.size:
            node = node.parent
        if node.parent is None:
            return
        if used < node.stop and node.stop // self.size > used // self.size:
            node = self._split(node, used)
        keep = Keep.of(request.keep)
        for hit in reversed(node.path()):
            hit.fresh = False
            self._hold_dear(hit, keep)
            for g, count in enumerate(hit.count):
                if count:
                    self._policy_of(hit, g).on_hit(hit)

    # -- insert ----------------------------------------------------------------------------------------------

    def insert(self, request, blocks, length):
        tokens, keep = request.tokens[:length], Keep.of(request.keep)
        root = self.roots.get(request.salt)
        if root is None:
            root = self.roots[request.salt] = Node(None, 0, self._none, [self._none] * len(self.rules))
            root.salt = request.salt
        node, position = walk(root, tokens)
        kept, new = [ids.copy() for ids in blocks], [[] for _ in self.rules]
        for there in reversed(node.path()):
            self._hold_dear(there, keep)
            for g in range(len(self.rules)):
                self._adopt(there, position, g, kept[g], blocks[g], new[g])
        if position < length:
            self._append(node, position, tokens, blocks, new, keep)
        if not root.children:
            del self.roots[request.salt]
        return [Inserted(table, np.concatenate([self._none, *ids])) for table, ids in zip(kept, new)]

    def _adopt(self, node: Node, position: int, g: int, kept: np.ndarray, blocks: np.ndarray, new: list) -> None:
        """Of what is shared up to a position: where the node has a block the request takes it, and where it has a hole
        the request's block fills it."""
        first = node.start // self.size
        stop = min(node.stop, position) // self.size
        if first >= stop:
            return
        canonical, mine = node.blocks[g][: stop - first], blocks[first:stop]
        if np.array_equal(canonical, mine):
            return
        kept[first:stop] = np.where((canonical != 0) & (mine != 0), canonical, mine)
        holes = np.flatnonzero((canonical == 0) & self._unknown(g, mine))
        if len(holes):
            canonical[holes] = mine[holes]
            new.append(self._learn(g, mine[holes]))
            born = node.count[g] == 0
            change(node, g, len(holes))
            if born:
                self._policy_of(node, g).on_insert(node)

    def _append(self, node: Node, position: int, tokens, blocks, new, keep: Keep) -> None:
        """The tokens from `position` on are new: they make the leaf longer, or a new one."""
        first = position // self.size
        ids = [np.where(self._unknown(g, table[first:]), table[first:], 0) for g, table in enumerate(blocks)]
        if not any(part.any() for part in ids):
            return
        if position < node.stop:
            node = self._split(node, position)
        rest = np.array(tokens[position:], dtype=np.int32)
        grows = node.parent is not None and not node.children and node.fresh
        if grows and (node.priority, node.pinned > 0) == (keep.priority, keep.pin > 0):
            node.tokens, node.stop = np.concatenate([node.tokens, rest]), node.stop + len(rest)
            node.blocks = [np.concatenate([old, part]) for old, part in zip(node.blocks, ids)]
            for g, part in enumerate(ids):
                change(node, g, int(np.count_nonzero(part)))
        else:
            node = Node(node, position, rest, ids)
            node.priority = keep.priority
            link(node)
        self._hold_dear(node, keep)
        for g, part in enumerate(ids):
            if part.any():
                new[g].append(self._learn(g, part[part != 0]))
                self._policy_of(node, g).on_insert(node)

    def _split(self, node: Node, position: int) -> Node:
        before = list(node.count)
        head = split(node, position, self.size)
        for g in range(len(self.rules)):
            policy = self._policy_of(node, g)
            if head.count[g]:
                policy.on_split(node, head)
            if before[g] and not node.count[g]:
                policy.on_remove(node)
        self._prune(node)  # the rest may have nothing but holes
        return head

    def _policy_of(self, node: Node, g: int):
        """What orders the nodes of this priority in a layer group."""
        policies = self.policies[g]
        if node.priority not in policies:
            policies[node.priority] = deepcopy(self._policy)
        return policies[node.priority]

    def _hold_dear(self, node: Node, keep: Keep) -> None:
        """The node is as dear as the dearest of its users; a higher priority is another policy's business."""
        if keep.pin:
            node.pinned = max(node.pinned, self.now() + keep.pin)
        if keep.priority <= node.priority:
            return
        known = [g for g, count in enumerate(node.count) if count]
        for g in known:
            self._policy_of(node, g).on_remove(node)
        node.priority = keep.priority
        for g in known:
            self._policy_of(node, g).on_insert(node)

    def _unknown(self, g: int, ids: np.ndarray) -> np.ndarray:
        """bool: which ids are blocks that are not published yet."""
        if len(ids) and int(ids.max()) >= len(self.known[g]):
            self.known[g] = np.concatenate([self.known[g], np.zeros(int(ids.max()) + 1, dtype=bool)])
        return (ids != 0) & ~self.known[g][ids]

    def _learn(self, g: int, ids: np.ndarray) -> np.ndarray:
        self.known[g][ids] = True
        return ids.astype(np.int32)

    def published(self, group):
        return np.flatnonzero(self.known[group]).astype(np.int32)

    def nodes(self):
        found, places = [], {}
        for salt, root in self.roots.items():
            for node in preorder(root):
                places[node] = len(found)
                facts = {"priority": node.priority, "pinned": node.pinned > self.now(), "unused": node.fresh}
                shown = tuple(ids.copy() for ids in node.blocks)
                found.append(IndexNode(places.get(node.parent), node.start, node.tokens, shown, salt, facts))
        return found

    # -- evict -----------------------------------------------------------------------------------------------

    def evict(self, need, unused):
        gone = [[self._none] for _ in self.rules]
        for g, left in enumerate(need):
            whole = True
            while left > 0:
                took = self._evict(g, left, unused[g], gone[g], whole)
                if not took and not whole:
                    break
                whole = whole and took > 0
                left -= took
        return [np.concatenate(ids) for ids in gone]

    def _evict(self, g: int, n: int, unused: Callable, gone: list, whole: bool) -> int:
        """Gives up at most n blocks of the least dear nodes that have some to spare. whole: nothing is left behind that
        can no longer be reached."""
        now = self.now()
        for pinned in (False, True):
            for priority in sorted(self.policies[g]):

                def evictable(node, pinned=pinned):
                    return (node.pinned > now) is pinned and len(self._spare(node, g, unused, whole)) > 0

                took = 0
                with closing(self.policies[g][priority].victims(evictable)) as victims:
                    for node in victims:
                        spare = self._spare(node, g, unused, whole)[: n - took]
                        gone.append(self._take(node, g, spare))
                        took += len(spare)
                        if took == n:
                            break
                if took:
                    return took
        return 0

    def _spare(self, node: Node, g: int, unused: Callable, whole: bool) -> np.ndarray:
        """Places in the node whose block may go, the first to go first: what no query at the end of the node sees from
        its beginning on, then the rest from its end on."""
        rule, ids = self.rules[g], node.blocks[g]
        if whole and not rule.forgets and node.below[g]:
            return self._none
        there = np.flatnonzero(ids)
        free = unused(ids[there])
        if not rule.forgets:
            if whole:  # only what lies behind the last block in use
                held = np.flatnonzero(~free)
                return there[int(held[-1]) + 1 if len(held) else 0 :][::-1]
            return there[free][::-1]
        there = there[free]
        dead = self._dead(rule, node.start // self.size, node.stop // self.size, node.stop)[there]
        return np.concatenate([there[dead], there[~dead][::-1]])

    def _take(self, node: Node, g: int, places: np.ndarray) -> np.ndarray:
        ids = node.blocks[g][places]
        node.blocks[g][places] = 0
        self.known[g][ids] = False
        change(node, g, -len(ids))
        if not node.count[g]:
            self._policy_of(node, g).on_remove(node)
            self._prune(node)
        return ids

    def _prune(self, node: Node) -> None:
        while node.parent is not None and not node.children and not any(node.count):
            del node.parent.children[int(node.tokens[0])]
            node = node.parent
        if node.parent is None and not node.children:
            del self.roots[node.salt]
