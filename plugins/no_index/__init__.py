"""No index: nothing is found again, so nothing outlives its request."""

from __future__ import annotations

import numpy as np

from kvframe.interfaces import Inserted, PrefixIndex
from kvframe.types import Match


class NoIndex(PrefixIndex):
    """Never matches, never publishes."""

    keeps = False

    def attach(self, block_size, groups, eviction, now):
        self.groups = len(groups)

    def match(self, request, limit):
        return Match()

    def touch(self, request, match):
        pass

    def insert(self, request, blocks, length):
        return [Inserted(table, np.empty(0, np.int32)) for table in blocks]

    def published(self, group):
        return np.empty(0, np.int32)

    def evict(self, need, unused):
        return [np.empty(0, np.int32) for _ in range(self.groups)]

    def clear(self):
        pass
