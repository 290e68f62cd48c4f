"""Meter: what a run cost, collected once per step. Its size does not grow with the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvframe.outputs import RequestOutput
from kvframe.types import CacheStats

KEPT = 100_000  # of the latest times, for percentiles


class Peak:
    """The most bytes that requests held at one moment.

    Attributes:
        total: blocks and tails of all layer groups together. tail: what of it were tails.

    A cache that counts them itself (CacheStats.peak) misses nothing. Of another one only the moments at which somebody
    looks are known: what a step takes and gives back before its end is not.
    """

    def __init__(self):
        self.total = self.tail = 0

    def look(self, stats: CacheStats) -> None:
        tail = stats.total("tail")
        now, counted = (stats.total("reserved") + tail, tail), (stats.peak, stats.peak_tail)
        self.total, self.tail = max((self.total, self.tail), now, counted)


class Meter:
    """Times, tokens and bytes of the run since `start`."""

    def __init__(self):
        self.start()

    def start(self) -> None:
        self.tokens = self.computed = self.steps = 0
        self.requests = self.samples = self.refused = self.prompt_tokens = self.cached_tokens = self.preemptions = 0
        # sums over the steps, weighted by seconds
        self.seconds = self._reserved = self._used = self._tail = self._ratio = 0.0
        self._ttft, self._gaps = deque(maxlen=KEPT), deque(maxlen=KEPT)
        self._peak = Peak()
        self._began = self._last = time.perf_counter()

    def step(self, seconds: float, computed: int, stats: CacheStats) -> None:
        """One forward took `seconds` of the engine's clock and left the cache in this state."""
        reserved, used, tail = stats.total("reserved"), stats.total("used"), stats.total("tail")
        self.steps += 1
        self.computed += computed
        self.seconds += seconds
        self._reserved += seconds * reserved
        self._used += seconds * used
        self._tail += seconds * tail
        if reserved + tail:
            self._ratio += seconds * (used + stats.total("tail_used")) / (reserved + tail)
        self._peak.look(stats)

    def token(self, gap: float | None) -> None:
        """A token came, `gap` seconds after the one before it in its sequence (None: the first one)."""
        self.tokens += 1
        self._last = time.perf_counter()
        if gap is not None:
            self._gaps.append(gap)

    def took_back(self, times: Sequence[float], n: int) -> None:
        """The last n of the tokens that a sequence got at these times do not count."""
        self.tokens -= n
        for i in range(max(len(times) - n, 1), len(times)):
            gap = times[i] - times[i - 1]
            if gap in self._gaps:
                self._gaps.remove(gap)

    def finished(self, output: RequestOutput) -> None:
        """A sample is done or was refused."""
        self.samples += 1
        self.preemptions += output.preemptions
        if output.sample:  # the samples of a request share its prompt
            return
        self.requests += 1
        if output.finish_reason == "refused":
            self.refused += 1
            return
        self.prompt_tokens += len(output.prompt_tokens)
        self.cached_tokens += output.cached_tokens
        if output.ttft_s is not None:
            self._ttft.append(output.ttft_s)

    def summary(self, stats: CacheStats) -> dict:
        """Counts and seconds of the run, and what the cache says at its end. Bytes are time-weighted means over the
        steps, except peaks and pool."""
        self._peak.look(stats)
        wall, weight = self._last - self._began, self.seconds or 1.0
        return {
            "requests": self.requests,
            "samples": self.samples,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.tokens,
            "computed_tokens": self.computed,
            "cached_tokens": self.cached_tokens,
            "seconds": wall,
            "output_tokens_per_s": self.tokens / wall if wall > 0 else 0.0,
            "steps": self.steps,
            "ttft_s_p50": _percentile(self._ttft, 50),
            "ttft_s_p99": _percentile(self._ttft, 99),
            "itl_s_p50": _percentile(self._gaps, 50),
            "itl_s_p99": _percentile(self._gaps, 99),
            "kv_bytes_reserved": int(self._reserved / weight),
            "kv_bytes_used": int(self._used / weight),
            "kv_bytes_tail": int(self._tail / weight),
            "utilization": self._ratio / weight,
            "preemptions": self.preemptions,
            "kv_bytes_peak": self._peak.total,
            "tail_bytes_peak": self._peak.tail,
            "kv_bytes_pool": sum(g.num_blocks * g.block_bytes + g.tail_pool for g in stats.groups),
            "evictions": stats.evictions,
            "copies": stats.copies,
        }


def _percentile(values: deque[float], q: int) -> float | None:
    return float(np.percentile(np.array(values), q)) if values else None
