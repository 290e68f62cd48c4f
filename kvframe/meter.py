"""Meter: what a run cost, collected once per step."""

from __future__ import annotations

import time

import numpy as np

from kvframe.outputs import RequestOutput
from kvframe.types import CacheStats


class Meter:
    """Times, tokens and bytes of the run since `start`."""

    def __init__(self):
        self.outputs: list[RequestOutput] = []
        self.start()

    def start(self) -> None:
        self.outputs.clear()
        self.tokens = self.computed = self.steps = 0
        self.gaps: list[float] = []
        self._began = self._last = time.perf_counter()
        self._weights: list[float] = []
        self._reserved: list[int] = []
        self._used: list[int] = []

    def step(self, seconds: float, computed: int, stats: CacheStats) -> None:
        """One forward took `seconds` of the engine's clock and left the cache in this state."""
        self.steps += 1
        self.computed += computed
        self._weights.append(seconds)
        self._reserved.append(stats.total("reserved"))
        self._used.append(stats.total("used"))

    def token(self, gap: float | None) -> None:
        """A token came, `gap` seconds after the one before it in its sequence (None: the first one)."""
        self.tokens += 1
        self._last = time.perf_counter()
        if gap is not None:
            self.gaps.append(gap)

    def summary(self) -> dict:
        """Seconds and counts of the run. Bytes are time-weighted means over the steps, except the peak."""
        seconds = self._last - self._began
        weights = np.array(self._weights) if sum(self._weights) else np.ones(self.steps)
        reserved, used = np.array(self._reserved, float), np.array(self._used, float)
        ratio = np.divide(used, reserved, out=np.zeros_like(used), where=reserved > 0)
        ttft = [o.ttft_s for o in self.outputs if o.ttft_s is not None]
        done = [o for o in self.outputs if o.finish_reason != "refused"]
        return {
            "requests": len(self.outputs),
            "refused": len(self.outputs) - len(done),
            "prompt_tokens": sum(len(o.prompt_tokens) for o in done),
            "output_tokens": self.tokens,
            "computed_tokens": self.computed,
            "cached_tokens": sum(o.cached_tokens for o in done),
            "seconds": seconds,
            "output_tokens_per_s": self.tokens / seconds if seconds > 0 else 0.0,
            "steps": self.steps,
            "ttft_s_p50": _percentile(ttft, 50),
            "ttft_s_p99": _percentile(ttft, 99),
            "itl_s_p50": _percentile(self.gaps, 50),
            "itl_s_p99": _percentile(self.gaps, 99),
            "kv_bytes_reserved": _mean(reserved, weights),
            "kv_bytes_used": _mean(used, weights),
            "utilization": float(np.average(ratio, weights=weights)) if self.steps else 0.0,
            "preemptions": sum(o.preemptions for o in self.outputs),
        }


def _percentile(values: list[float], q: int) -> float | None:
    return float(np.percentile(values, q)) if values else None


def _mean(values: np.ndarray, weights: np.ndarray) -> int:
    return int(np.average(values, weights=weights)) if len(values) else 0
