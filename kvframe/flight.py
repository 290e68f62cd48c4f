"""A step between its start on the device and its end on the host, and the one that is started ahead of it.

Where the tokens of the next decode step go is known before they are: every running request gets one more, unless it
ends with the one it waits for. And their ids need not be known to the host: they lie on the device. So on a GPU, when
a step's tokens are being chosen, the next step is started behind them, and while it runs the host takes the tokens in,
makes texts of them and answers them.

    device    | forward 1 | choose | forward 2           | choose | forward 3 ..
    host        start 1 .. start 2 | tokens 1, texts, events | start 3 | tokens 2 ..

What turns out wrong costs a row: of a request that ended, was aborted or taken back meanwhile, the row is ignored. What
it wrote lies behind the tokens that the cache counts, in blocks that are given to somebody else later than it wrote.
"""

from __future__ import annotations

from collections.abc import Sequence as Some
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvframe.moving import sent
from kvframe.scheduler import Scheduler
from kvframe.sequence import Sequence


@dataclass
class Flight:
    """A step that was started.

    Attributes:
        batch: sequences and how many tokens of each are computed.
        ready: places in the batch of those that get a token. logits: theirs, float32 [len(ready), V].
        stands: per sequence what it must be when the step ends: tokens that exist, and that are computed.
    """

    batch: list[tuple[Sequence, int]]
    ready: list[int]
    logits: Any
    stands: list[tuple[int, int]] = field(default_factory=list)

    def keep(self, running: Some[Sequence]) -> bool:
        """Leaves out whoever is not what it was foreseen to be. False: nobody is left."""
        alive = set(map(id, running))
        kept = [
            i
            for i, ((s, _), stand) in enumerate(zip(self.batch, self.stands))
            if id(s) in alive and (s.n, s.computed) == stand
        ]
        if kept and len(kept) < len(self.batch):  # of a step that was started ahead everybody is ready
            self.logits = self.logits[sent(np.array(kept), self.logits.device)]
            self.ready = [*range(len(kept))]
        self.batch, self.stands = [self.batch[i] for i in kept], [self.stands[i] for i in kept]
        return bool(kept)


def foresee(scheduler: Scheduler, now: float) -> list[Sequence] | None:
    """Who gets one more token in the next step, with room made for it; None: that cannot be said yet, because somebody
    has a prompt to compute, could be admitted, or finds no room."""
    running = scheduler.running
    going = [s for s in running if s.n + 1 < s.limit]
    if not going or len(going) > scheduler.max_step_tokens or any(s.computed != s.n for s in running):
        return None
    if len(going) < scheduler.max_requests and scheduler.may_admit(now):
        return None
    return going if all(scheduler.cache.grow(s, 1) for s in going) else None


def picked(tokens: torch.Tensor, order: Some[Sequence], going: Some[Sequence]) -> torch.Tensor:
    """The ids of those who go on, where they lie. tokens: int64 [B], as they were chosen for `order`."""
    if len(order) == len(going) and all(a is b for a, b in zip(order, going)):
        return tokens
    place = {id(s): i for i, s in enumerate(order)}
    return tokens[sent(np.array([place[id(s)] for s in going]), tokens.device)]
