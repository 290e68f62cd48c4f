"""Sealing, on the host: what a codec that encodes whole groups of tokens means for lengths, hits and block sizes.

A sealing codec (`group` = G > 1) encodes G tokens at once, once, when the group is full. Until then the group is open:
its tokens lie in full precision in the request's row of a tail plane `[max_requests, G, Hkv, D]`, and not in a block.
With G = 4, a request of 10 tokens in blocks of 8:

    position   0 1 2 3 | 4 5 6 7 || 8 9 . .        groups 0 and 1 are sealed in the first block
    tail                           8 9 . .        position p at p % 4; the slots of 8 and 9 in the second block wait

A query at q sees the groups before its own (`k // G < q // G`) as codes and its own in full precision, however the
prompt is cut into chunks. Codecs may differ by layer and by kind (K, V), and with them the groups; what holds for a
whole cache is then the least common multiple, its `unit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from kvframe.interfaces import Codec, Parts
from kvframe.types import LayerSpec


def kinds(layer: LayerSpec) -> tuple[tuple[str, int], ...]:
    """What a layer stores of its own: `(kind, size of a vector)`; nothing where it reads another layer's."""
    return (("k", layer.k_dim), ("v", layer.v_dim)) if layer.kv_source is None else ()


def groups(codec: Codec, layers: Sequence[LayerSpec]) -> list[int]:
    """The different sealing groups of more than one token, the smallest first; empty without a sealing codec."""
    found = {codec.for_layer(layer, kind).group for layer in layers for kind, _ in kinds(layer)}
    return sorted(found - {1})


def unit(codec: Codec, layers: Sequence[LayerSpec]) -> int:
    """The least number of tokens that are whole groups in every layer, for K and for V: what a hit is rounded to."""
    return math.lcm(*groups(codec, layers))


def keepable(length: int, computed: int, sizes: Sequence[int]) -> int:
    """The most tokens <= `length` to which a request of `computed` tokens can be cut.

    What is sealed cannot be opened again, so a cut within it goes back to the group's beginning; within the open group
    any length will do. With groups of 4 and 10 tokens: 9 -> 9, 8 -> 8, 7 -> 4.
    """
    before = -1
    while length != before:
        before = length
        for size in sizes:
            if length // size != computed // size:
                length -= length % size
    return length


def conflicts(parts: Parts) -> Iterator[str]:
    """Why a codec's groups do not fit the blocks, if they do not. A block that holds a whole request is never shared,
    and what is left at its end is never sealed, so there any size will do."""
    size, found = parts.block_size, groups(parts.codec, parts.layers)
    whole = math.lcm(*found)
    if 1 <= size < parts.max_len and size % whole:
        yield (
            f"the codec seals groups of {' and '.join(map(str, found))} tokens, and blocks of {size} do not hold whole "
            f"groups: cache.layout.block_size={math.ceil(size / whole) * whole}"
        )
