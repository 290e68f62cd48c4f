"""What an engine tells those who watch it (see kvframe.hookspecs). Who only watches cannot stop the engine."""

from __future__ import annotations

import logging
from typing import Any

from kvframe.types import CacheStats

log = logging.getLogger(__name__)


class Telling:
    """Attributes:
    hooks: caller of the plugins' watching hooks; None: nobody watches.
    """

    def __init__(self, hooks: Any):
        self.hooks = hooks
        self.start()

    def start(self) -> None:
        """A new run begins, and counters at 0."""
        self._evicted: list[int] = []  # per layer group: evictions that were told

    def tell(self, hook: str, **facts: Any) -> None:
        if self.hooks is None:
            return
        try:
            getattr(self.hooks, hook)(**facts)
        except Exception:
            log.exception("a plugin failed in %s; the engine goes on", hook)

    def evictions(self, step: int, stats: CacheStats) -> None:
        """Which blocks went since they were told last."""
        if self.hooks is None or not stats.evictions:
            return
        before = self._evicted or [0] * len(stats.groups)
        self._evicted = [group.evictions for group in stats.groups]
        blocks, nbytes = {}, 0
        for group, told in zip(stats.groups, before):
            gone = group.evictions - told if group.evictions >= told else group.evictions  # counters were set back
            if gone:
                blocks[group.name] = blocks.get(group.name, 0) + gone
                nbytes += gone * group.block_bytes
        if blocks:
            self.tell("kvframe_on_evict", step=step, blocks=blocks, nbytes=nbytes, reason="eviction")
