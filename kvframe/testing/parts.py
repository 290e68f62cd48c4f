"""Plain parts for tests: the simplest one of each kind, so that a test of one part needs no other package.

They read like the definitions in kvframe.interfaces, and the contract suites hold for them too. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvframe.interfaces import Codec, Eviction, Inserted, Layout, PrefixIndex, Retention
from kvframe.types import LayerSpec, Match, PlaneSpec


def some_layers(windows=(None, 10), sources=(), heads=(4, 2), dims=(8, 4), **more) -> tuple[LayerSpec, ...]:
    """Layers with these windows, and layers that read the keys and values of an earlier one."""
    make = lambda i, **own: LayerSpec(i, *heads, *dims, 0.4, **own, **more)
    specs = [make(i, window=window) for i, window in enumerate(windows)]
    return (*specs, *(make(len(specs) + i, kv_source=source) for i, source in enumerate(sources)))


class Blocks(Layout):
    """Blocks of `size` slots, or the next multiple of what the codec seals."""

    def __init__(self, size: int = 4):
        self.size = size

    def block_size(self, max_len, unit=1):
        return -(-self.size // unit) * unit


@dataclass(frozen=True)
class Band(Retention):
    """`k <= q and (window is None or q - k < window or k < sinks)`, and within the model's own chunk, if it has them; a
    layer with a window of its own has no sinks."""

    window: int | None = None
    sinks: int = 0
    kernel_mask: bool = True
    chunk: int | None = None

    @property
    def exact(self):
        return self.window is None

    @property
    def forgets(self):
        return self.window is not None or self.chunk is not None

    @property
    def name(self):
        chunk = "" if self.chunk is None else f"chunk{self.chunk}"
        sinks = f"+{self.sinks}" if self.sinks else ""
        return f"{super().name}{sinks}{chunk}"

    def for_layer(self, layer):
        rule = self if layer.chunk is None else replace(self, chunk=layer.chunk, kernel_mask=False)
        if layer.window is None:
            return rule
        return replace(rule, window=min(self.window or layer.window, layer.window), sinks=0)

    def visible(self, q_pos, k_pos):
        seen = k_pos <= q_pos
        if self.window is not None:
            seen = seen & ((q_pos - k_pos < self.window) | (k_pos < self.sinks))
        return seen if self.chunk is None else seen & (q_pos // self.chunk == k_pos // self.chunk)

    def dead(self, start, stop, num_computed):
        k = np.arange(start, stop)
        gone = np.zeros(stop - start, dtype=bool)
        if self.window is not None:
            gone |= (k <= num_computed - self.window) & (k >= self.sinks)
        if self.chunk is not None:
            gone |= k < num_computed // self.chunk * self.chunk
        return gone


@dataclass(frozen=True)
class Stripes(Retention):
    """The last `window` tokens, and of all that lie before them every second stripe of `width`: no kernel's formula."""

    window: int = 8
    width: int = 4
    exact = False
    kernel_mask = False

    @property
    def name(self):
        return f"stripes{self.window}/{self.width}"

    def for_layer(self, layer):
        return self if layer.window is None else Band(min(self.window, layer.window))

    def visible(self, q_pos, k_pos):
        return (k_pos <= q_pos) & ((q_pos - k_pos < self.window) | (k_pos // self.width % 2 == 0))

    def dead(self, start, stop, num_computed):
        k = np.arange(start, stop)
        return (k <= num_computed - self.window) & (k // self.width % 2 == 1)


def model_mask(layer: LayerSpec, q_pos: np.ndarray, k_pos: np.ndarray) -> np.ndarray:
    """bool, broadcast: what the model itself lets a query see."""
    seen = k_pos <= q_pos
    if layer.window is not None:
        seen = seen & (q_pos - k_pos < layer.window)
    return seen if layer.chunk is None else seen & (k_pos // layer.chunk == q_pos // layer.chunk)


class Verbatim(Codec):
    """Vectors as the model computes them."""

    plain = True

    def planes(self, dim):
        return {"payload": PlaneSpec((dim,))}

    def encode(self, x):
        return {"payload": x}

    def decode(self, planes, dtype):
        return planes["payload"].to(dtype)


class Oldest(Eviction):
    """The run that was used longest ago goes first."""

    def __init__(self):
        self.order = {}  # runs, the last one used is last

    def on_insert(self, run):
        self.order.pop(run, None)
        self.order[run] = True

    on_hit = on_insert

    def on_split(self, run, head):
        self.order = {r: True for old in self.order for r in ((old, head) if old is run else (old,))}

    def on_remove(self, run):
        del self.order[run]

    def victims(self, evictable):
        given = set()
        while (run := next((r for r in self.order if r not in given and evictable(r)), None)) is not None:
            given.add(run)
            yield run


class Unkept(PrefixIndex):
    """Nothing is found again."""

    keeps = False

    def attach(self, block_size, groups, eviction, now):
        self.groups = range(len(groups))

    def match(self, request, limit):
        return Match()

    def touch(self, request, match):
        pass

    def insert(self, request, blocks, length):
        return [Inserted(table, np.empty(0, np.int32)) for table in blocks]

    def published(self, group):
        return np.empty(0, np.int32)

    def evict(self, need, unused):
        return [np.empty(0, np.int32) for _ in self.groups]

    def clear(self):
        pass
