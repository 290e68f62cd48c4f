"""How many threads a step may use on a machine that is shared.

Torch's threads meet at a barrier after each operation. With a busy neighbour on one of two cores each barrier waits for
a thread that does not get its turn, and two threads are five to ten times slower than one. So the engine looks, a few
times a second, at how many cores other processes keep busy, and leaves those to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

PERIOD = 0.25  # seconds between two looks


class Threads:
    """Watches the load of other processes.

    Attributes:
        most: threads that torch was set to when this object was made; never exceeded.
        now: threads for the next step.
    """

    def __init__(self, adapt: bool):
        self.most = self.now = torch.get_num_threads()
        self.cores = psutil.cpu_count() or self.most
        self.adapt = adapt and self.most > 1
        self._before = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Wall seconds, busy core-seconds of the whole machine, busy seconds of this process."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return time.perf_counter(), sum(times[:8]) - idle, time.process_time()

    def look(self) -> int:
        """Threads for the next step: the cores that others leave free, at least one."""
        if self.adapt and time.perf_counter() - self._before[0] >= PERIOD:
            after = self._read()
            wall, busy, own = (b - a for a, b in zip(self._before, after))
            self._before = after
            others = max(busy - own, 0.0) / wall
            self.now = max(1, min(self.most, round(self.cores - others)))
        return self.now

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside the block torch uses `look()` threads."""
        if self.look() == self.most:
            yield
            return
        torch.set_num_threads(self.now)
        try:
            yield
        finally:
            torch.set_num_threads(self.most)
