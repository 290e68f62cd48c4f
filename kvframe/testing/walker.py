"""A random walk over a BlockKVCache, with a look into its pools and tables."""

from __future__ import annotations

from dataclasses import dataclass

from kvframe.testing.caller import Caller
from kvframe.testing.shadow import Shadow
from kvframe.testing.walked import Watcher


@dataclass
class Walker(Caller):
    """Calls a BlockKVCache; its books are those of the pools, and a Shadow knows what every slot would hold."""

    MOVES = (*Caller.MOVES, "evict")
    crowds = True

    def __post_init__(self):
        super().__post_init__()
        self.max_requests = self.cache.context.max_requests
        self.watcher = Shadow(self.cache) if type(self.watcher) is Watcher else self.watcher

    @property
    def shadow(self):
        return self.watcher

    @shadow.setter
    def shadow(self, shadow):
        self.watcher = shadow

    def books(self):
        pools = [(p.free, p.live, p.cached, p.holds, p.refs.tobytes(), p.published.tobytes()) for p in self.cache.pools]
        return pools, self.cache.hit_tokens, self.cache.evictions

    def _fail(self, batch) -> None:
        """Who took part may try again, unless the step may have sealed something."""
        super()._fail(batch if self.cache.unit > 1 else batch[:1])

    def evict(self):
        """Somebody needs some of the blocks that are only cached."""
        if not any(pool.cached for pool in self.cache.pools):
            return False
        need = [pool.free + self.random.randint(0, pool.cached) for pool in self.cache.pools]
        self.note("evict", f"{need}")
        self.cache._make_free(need)
