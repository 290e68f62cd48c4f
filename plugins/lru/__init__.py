"""LRU eviction: the block that was used longest ago goes first."""

from __future__ import annotations

from kvframe.interfaces import Eviction


class LRU(Eviction):
    """Orders nodes by a counter that every insert and every hit advances."""

    def __init__(self):
        self.clock = 0
        self.last_use = {}

    def _touch(self, node):
        self.clock += 1
        self.last_use[node] = self.clock

    on_insert = on_hit = _touch

    def on_remove(self, node):
        self.last_use.pop(node, None)

    def victims(self, n, evictable):
        return sorted(evictable, key=self.last_use.__getitem__)[:n]
