"""The radix tree of token prefixes: nodes, walks and splits. It knows tokens and block ids, no policy.

A node holds a run of tokens in one array, cut wherever two prefixes part, at any token. It owns the blocks that are
completed by its tokens, one per layer group in each place; 0 is a hole where a block is gone. With block size 4 and the
prefixes [1 2 3 4 5 6 7 8] and [1 2 3 4 5 9 9 9]:

    root -- [1 2 3 4 5]  owns block 0 (positions 0..3)
              |-- [6 7 8]  owns block 1 (4..7)
              `-- [9 9 9]  owns another block 1 (4..7)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class Node:
    """A run of tokens of a prefix.

    Attributes:
        tokens: int32, the run; start, stop: its positions in the prefix.
        blocks: per layer group, int32 ids of the blocks that end within the run; 0 where one is gone.
        count: per group, blocks that are there; below: per group, children with a block in them or beneath them.
        children: first token -> node.
        fresh: nobody has used it since it was inserted.
        priority, pinned: see kvframe.types.Keep; `pinned` is the time until which it is.
        salt: of the requests that share the tree; the root has it.
    """

    __slots__ = (
        "below", "blocks", "children", "count", "fresh", "parent", "pinned", "priority", "salt", "start", "stop",
        "tokens",
    )  # fmt: skip

    def __init__(self, parent: Node | None, start: int, tokens: np.ndarray, blocks: Sequence[np.ndarray]):
        self.parent, self.tokens, self.start, self.stop = parent, tokens, start, start + len(tokens)
        self.blocks = list(blocks)
        self.count = [int(np.count_nonzero(ids)) for ids in self.blocks]
        self.below = [0] * len(self.blocks)
        self.children: dict[int, Node] = {}
        self.fresh, self.priority, self.pinned = True, 0, 0.0

    def alive(self, group: int) -> bool:
        """Is a block of the group in the node or beneath it?"""
        return self.count[group] > 0 or self.below[group] > 0

    @property
    def key(self) -> int:
        """Names the run by the salt and the tokens that lead to it, its own first one included; see kvframe's Run."""
        path = self.path()
        before = [node.tokens for node in path[:-1]]
        return hash((path[0].parent.salt, np.concatenate([*before, self.tokens[:1]]).tobytes()))

    def path(self) -> list[Node]:
        """The nodes from the root's child to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def walk(root: Node, tokens: np.ndarray) -> tuple[Node, int]:
    """`(node, position)`: the deepest node that shares tokens with these, and how many leading tokens are shared. The
    position lies in `(node.start, node.stop]`, or is 0 at the root."""
    node, position = root, 0
    while position < len(tokens):
        child = node.children.get(int(tokens[position]))
        if child is None:
            break
        position += common(child.tokens, tokens[position : position + len(child.tokens)])
        node = child
        if position < child.stop:
            break
    return node, position


def split(node: Node, position: int, block_size: int) -> Node:
    """Cuts a node at a position within it and answers the new head; the node itself keeps the rest."""
    at = position - node.start
    cut = position // block_size - node.start // block_size
    head = Node(node.parent, node.start, node.tokens[:at], [ids[:cut].copy() for ids in node.blocks])
    head.fresh, head.priority, head.pinned = node.fresh, node.priority, node.pinned
    node.parent.children[int(head.tokens[0])] = head
    node.parent, node.start, node.tokens = head, position, node.tokens[at:]
    node.blocks = [ids[cut:].copy() for ids in node.blocks]
    node.count = [all_ - mine for all_, mine in zip(node.count, head.count)]
    head.children[int(node.tokens[0])] = node
    head.below = [int(node.alive(g)) for g in range(len(node.blocks))]
    return head


def change(node: Node, group: int, by: int) -> None:
    """The node has so many blocks of the group more; tells its ancestors when it came to life or died."""
    before = node.alive(group)
    node.count[group] += by
    while node.parent is not None and node.alive(group) != before:
        parent, came = node.parent, not before
        before = parent.alive(group)
        parent.below[group] += 1 if came else -1
        node = parent


def link(node: Node) -> None:
    """Hangs a new leaf below its parent."""
    node.parent.children[int(node.tokens[0])] = node
    counts, node.count = node.count, [0] * len(node.count)
    for group, n in enumerate(counts):
        change(node, group, n)


def beneath(node: Node, most: int) -> Iterator[Node]:
    """The node and some nodes beneath it, at most so many."""
    stack = [node]
    while stack and most:
        node = stack.pop()
        most -= 1
        yield node
        stack += list(node.children.values())[:most]


def preorder(root: Node) -> Iterator[Node]:
    """The nodes beneath a root, each before those beneath it."""
    stack = list(root.children.values())[::-1]
    while stack:
        node = stack.pop()
        yield node
        stack += list(node.children.values())[::-1]
