"""What a baseline costs, in the words of the engine's meter."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.meter import Meter
from kvframe.outputs import RequestOutput
from kvframe.types import CacheStats, GroupStats, Request


class Watch:
    """Collects steps, tokens and bytes of somebody else's decode loop.

    Attributes:
        pool: bytes that were allocated for what requests held.
        token_bytes: bytes of one token over all layers.
    """

    def __init__(self):
        self.meter = Meter()
        self.pool = self._reserved = self._used = 0
        self.token_bytes = 0.0

    def step(self, seconds: float, computed: int, reserved: int, used: float) -> None:
        """A step took `seconds`, computed so many tokens and left so many bytes reserved and in use."""
        self._reserved, self._used = int(reserved), min(int(used), int(reserved))
        self.pool = max(self.pool, self._reserved)
        self.meter.step(seconds, computed, self._stats())

    def finished(self, request: Request, tokens: list[int], began: float, times: Sequence[float]) -> RequestOutput:
        """A request that came at `began` is done; its tokens came at `times`."""
        output = RequestOutput(
            request.id,
            prompt_tokens=[int(i) for i in request.prompt_tokens],
            output_tokens=[int(i) for i in tokens],
            finish_reason="length",
            ttft_s=times[0] - began if times else None,
            itl_s=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        )
        self.meter.finished(output)
        return output

    def figures(self) -> dict:
        """As an engine's summary; what cannot be known is None."""
        found = self.meter.summary(self._stats())
        unknown = dict.fromkeys(("cached_tokens", "preemptions", "evictions", "copies"))
        return {**found, **unknown, "kv_bytes_pool": self.pool}

    def _stats(self) -> CacheStats:
        group = GroupStats(
            name="all",
            layers=0,
            block_size=1,
            num_blocks=0,
            block_bytes=0,
            reserved=self._reserved,
            used=self._used,
            evictable=0,
            tail=0,
            peak=self._reserved,
        )
        return CacheStats((group,))
