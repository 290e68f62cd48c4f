"""Sliding window: a query sees the last `window` tokens, and the first `sinks` tokens of the text.

What lies between is dead, and its memory is given back (layout permitting). Source: Xiao et al., "Efficient Streaming
Language Models with Attention Sinks", ICLR 2024 (arXiv:2309.17453): models put much of their attention on the first
few tokens whatever those say, and break down when they are gone. Windows: Jiang et al., "Mistral 7B" (2310.06825).

With window 4 and 2 sinks:

    query 9 sees    0 1 . . . . 6 7 8 9        keys 2..5 are dead
    positions=absolute   the query stands at 9, and looks at the sinks from there: distances 9 and 8
    positions=cache      it looks at them from position 5, as if the text were 0 1 6 7 8 9: distances 5 and 4

Under `cache` (StreamingLLM's positions) no distance ever exceeds `window + sinks`, so a text may be longer than
what the model was trained for. Keys keep the rotation of their absolute position; inside the window only distances
count, so that only the sinks need a second query.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvframe.errors import ConfigError
from kvframe.interfaces import Retention

POSITIONS = ("absolute", "cache")


@dataclass(frozen=True)
class SlidingWindow(Retention):
    """`visible: k <= q and (q - k < window or k < sinks)`.

    A layer with a window of its own gets the smaller window and no sinks, and one with chunks of its own sees nothing
    before its chunk: they were never trained to see the first tokens from afar.

    Args:
        window: last tokens that a query sees, its own included.
        sinks: first tokens of the text that it always sees.
        positions: "absolute", or "cache": sinks are looked at from position `sinks + window - 1` at most.
        chunk: set per layer, from the probe.
    Raises: ConfigError for a value that cannot be.
    """

    window: int = 1024
    sinks: int = 4
    positions: str = "absolute"
    chunk: int | None = None
    exact = False

    def __post_init__(self):
        for name, least in (("window", 1), ("sinks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"cache.retention.{name}={value!r} cannot be used",
                    options=[f"an integer >= {least}"],
                    fix=f"cache.retention.{name}={getattr(type(self), name)}",
                )
        if self.positions not in POSITIONS:
            raise ConfigError(
                f"cache.retention.positions={self.positions!r} does not exist",
                options=POSITIONS,
                fix="cache.retention.positions=absolute",
            )
        if not self.sinks:  # without sinks both are the same rule, and layers of the same rule share a group
            object.__setattr__(self, "positions", "absolute")

    @property
    def name(self):
        chunk = "" if self.chunk is None else f"chunk{self.chunk}"
        return f"window{self.window}+{self.sinks}" if self.sinks else f"window{self.window}{chunk}"

    @property
    def kernel_mask(self):
        return self.chunk is None

    @property
    def limit_fix(self):
        stands = self.sinks and self.positions == "absolute"
        return "cache.retention.positions=cache" if stands else "a smaller cache.retention.window"

    def for_layer(self, layer):
        if layer.window is None and layer.chunk is None:
            return self
        window = self.window if layer.window is None else min(self.window, layer.window)
        return replace(self, window=window, sinks=0, chunk=layer.chunk)

    def visible(self, q_pos, k_pos):
        seen = (k_pos <= q_pos) & ((q_pos - k_pos < self.window) | (k_pos < self.sinks))
        return seen if self.chunk is None else seen & (q_pos // self.chunk == k_pos // self.chunk)

    def dead(self, start, stop, num_computed):
        positions = np.arange(start, stop)
        gone = (positions <= num_computed - self.window) & (positions >= self.sinks)
        return gone if self.chunk is None else gone | (positions < num_computed // self.chunk * self.chunk)

    def sink_position(self, q_pos):
        if self.positions != "cache":
            return None
        return np.minimum(q_pos, self.sinks + self.window - 1)

    def conflicts(self, others):
        reasons: dict[str, list[int]] = {}
        for layer in others.layers:
            if self.for_layer(layer).positions == "cache" and layer.rotary is None:
                reasons.setdefault(layer.no_rotary, []).append(layer.index)
        return [
            f"positions=cache turns queries back, and it is not known how in layer(s) {_listed(where)}: {why}: "
            "cache.retention.positions=absolute"
            for why, where in reasons.items()
        ]


def _listed(numbers: list[int]) -> str:
    """[0, 1, 2, 3] -> "0-3"; other lists number by number."""
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if whole and len(numbers) > 1 else ", ".join(map(str, numbers))
