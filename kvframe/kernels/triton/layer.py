"""One layer as the kernels see it, and the sizes of their tiles.

A tile never depends on the step, only on the layer and the dtype: what is added up first is always the same, so a
request's output does not depend on who else is in the batch.

Shape legend: Hq/Hkv heads, Dk/Dv sizes, G query heads of a KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvframe.kernels.triton import sides
from kvframe.kernels.triton.sides import Side, side
from kvframe.storage import LayerStorage

SPLIT = 256  # keys of a part of a context that one program of the decode kernel reads
LARGEST = 256  # size of a vector


@dataclass(frozen=True)
class Tiles:
    """Rows of queries and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Layer:
    """Attributes:
    q_heads, kv_heads, scale, softcap: see LayerSpec; softcap 0: off.
    window: 0: all; sinks: 0 without a window.
    block_size: slots of a block; split: keys of a part, see `decode`.
    dtype: of queries and results. learned: [Hq] logits or None.
    """

    q_heads: int
    kv_heads: int
    scale: float
    softcap: float
    window: int
    sinks: int
    block_size: int
    dtype: torch.dtype
    k: Side
    v: Side
    learned: torch.Tensor | None = None
    split: int = SPLIT

    @classmethod
    def of(cls, storage: LayerStorage) -> Layer:
        spec, rule = storage.spec, storage.retention
        return cls(
            spec.q_heads, spec.kv_heads, float(spec.scale), float(spec.softcap or 0.0), rule.window or 0,
            rule.sinks if rule.window else 0, storage.block_size, getattr(torch, spec.dtype),
            side(storage.codec_k, spec.k_dim, storage.k, spec.dtype, storage.tail_k),
            side(storage.codec_v, spec.v_dim, storage.v, spec.dtype, storage.tail_v), storage.learned_sinks,
        )  # fmt: skip

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def seals(self) -> bool:
        """K or V has open groups."""
        return self.k.group > 1 or self.v.group > 1

    @property
    def _ranged(self) -> bool:
        return sides.RANGED in (self.k.kind, self.v.kind)

    def parts(self, length: int) -> int:
        """Parts of a context of `length` tokens that its last token may look at (see `decode`)."""
        whole = -(-length // self.split)
        if not self.window:
            return whole
        sinks = -(-self.sinks // self.split)
        first = max(max(length - self.window, 0) // self.split, sinks)
        return min(whole, sinks) + max(whole - first, 0)

    def most_parts(self, length: int) -> int:
        """The most parts of any context of at most `length` tokens."""
        if not self.window:
            return self.parts(length)
        # a window touches one part more when it does not end at the end of a part
        bound = -(-self.sinks // self.split) + -(-self.window // self.split) + 1
        return min(-(-length // self.split), bound)

    @property
    def _wide(self) -> int:
        """Bytes of the numbers of a key and a value on the chip."""
        return sum(
            padded(side.dim) * side.number(self.dtype, weighed).itemsize
            for side, weighed in ((self.k, False), (self.v, True))
        )

    @property
    def _plain_products(self) -> bool:
        """float32: no tensor cores, and more registers for the same tile."""
        numbers = self.k.number(self.dtype, weighed=False), self.v.number(self.dtype, weighed=True)
        return torch.float32 in numbers

    def decode_tiles(self) -> Tiles:
        rows, wide = max(16, padded(self.group)), self._wide
        few = wide > (512 if self.dtype == torch.float32 else 1024)
        keys = 16 if few else 32 if wide > 512 or self._plain_products or self._ranged else 64
        warps = 8 if wide > 512 and (self._ranged or self._plain_products) else 4  # these take registers
        return Tiles(rows, keys, warps, 3 if wide * keys * 3 <= 100 << 10 else 2)

    def prefill_tiles(self) -> Tiles:
        wide = self._wide
        if self._plain_products:
            return Tiles(64 if wide <= 512 else 32, 32, 8, 2)
        if self._ranged:
            return Tiles(64 if wide <= 512 else 32, 32, 8, 2)
        return Tiles(128, 64, 8, 3) if wide <= 512 else Tiles(64, 32, 8, 2)


def padded(n: int) -> int:
    """The next power of two, at least 16: what a dimension of a tile may be."""
    return max(16, 1 << (n - 1).bit_length())
