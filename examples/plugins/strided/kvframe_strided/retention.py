"""Strided: the first `sinks` tokens, the last `window` ones, and of what lies between every `every`-th block.

With 6 sinks, window 6, block 4 and every 4, what query 29 sees:

    0 1 2 3 4 5 | 6 ...... 15 | 16 17 18 19 | 20 .. 23 | 24 25 26 27 28 29
    sinks         gave way      block 4       gave way   window

The window keeps what is near, the sinks keep the softmax sound (StreamingLLM, arXiv:2309.17453), and the blocks between
are a sparse memory of the rest, as in strided attention (Child et al., arXiv:1904.10509). Fast kernels know windows and
sinks only: `kernel_mask = False` sends this rule to the reference kernel, which asks `visible`.
"""

from dataclasses import dataclass, replace

import numpy as np

from kvframe.errors import OptionError
from kvframe.interfaces import Retention

FIELDS = {"window": 1, "sinks": 0, "block": 1, "every": 1}  # and the least of each


@dataclass(frozen=True)  # compared by value: layers whose rules are equal share their block tables
class Strided(Retention):
    """`visible: k <= q and (q - k < window or k < sinks or (k // block) % every == 0)`.

    Args:
        window: last tokens that a query sees, its own included. sinks: first tokens that every query sees.
        block: tokens of a block of the pattern; a multiple of cache.layout.block_size frees whole blocks.
        every: one of so many blocks stays.
    Raises: OptionError for a number that cannot be.
    """

    window: int = 256
    sinks: int = 4
    block: int = 16
    every: int = 4
    exact = False  # the model was trained to see more
    kernel_mask = False

    def __post_init__(self):
        for name, least in FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                fix = f"{{name}}={getattr(Strided, name)}"
                raise OptionError(name, value, options=[f"an integer >= {least}"], fix=fix)

    @property
    def name(self):
        return f"strided{self.window}"

    def conflicts(self, others):
        chunked = [str(layer.index) for layer in others.layers if layer.chunk is not None]
        return [f"strided knows no chunks, layer {chunked[0]} has some: cache/retention=model"] if chunked else []

    def for_layer(self, layer):
        """A layer with a window of its own never saw further: it gets no sinks and no stride."""
        if layer.window is None:
            return self
        return Near(window=min(self.window, layer.window))

    def visible(self, q_pos, k_pos):
        return (k_pos <= q_pos) & ((q_pos - k_pos < self.window) | self._kept(k_pos))

    def dead(self, start, stop, num_computed):
        k_pos = np.arange(start, stop)
        return (k_pos <= num_computed - self.window) & ~self._kept(k_pos)

    def _kept(self, k_pos):
        """bool: which positions stay for ever."""
        return (k_pos < self.sinks) | (k_pos // self.block % self.every == 0)


@dataclass(frozen=True)
class Near(Strided):
    """The window alone."""

    kernel_mask = True
    sinks: int = 0

    @property
    def name(self):
        return f"window{self.window}"

    def for_layer(self, layer):
        return self if layer.window is None else replace(self, window=min(self.window, layer.window))

    def _kept(self, k_pos):
        return np.zeros(np.shape(k_pos), dtype=bool)
