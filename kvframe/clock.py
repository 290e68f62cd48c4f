"""Wall time, or a time that only steps advance (`engine.clock=virtual`), so that admission is reproducible."""

from __future__ import annotations

import time

from kvframe.errors import ConfigError


class WallClock:
    """`now`: seconds since `start`. `elapsed`: seconds since some moment; goes on over runs and never goes back."""

    def start(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def elapsed(self) -> float:
        return time.perf_counter()

    def stepped(self) -> None:
        pass

    def wait_until(self, when: float) -> None:
        time.sleep(max(0.0, when - self.now()))


class VirtualClock:
    """Every step takes STEP seconds, and waiting takes no real time."""

    STEP = 0.01
    _now = _before = 0.0  # seconds of this run, and of those before it

    def start(self) -> None:
        self._before, self._now = self.elapsed(), 0.0

    def now(self) -> float:
        return self._now

    def elapsed(self) -> float:
        return self._before + self._now

    def stepped(self) -> None:
        self._now += self.STEP

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)


CLOCKS = {"wall": WallClock, "virtual": VirtualClock}


def make_clock(name: str):
    if name not in CLOCKS:
        raise ConfigError(f"engine.clock={name!r} does not exist", options=CLOCKS, fix="engine.clock=wall")
    clock = CLOCKS[name]()
    clock.start()
    return clock
