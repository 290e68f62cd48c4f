"""How many blocks: bytes of a block, and the split of the cache's memory over the layer groups.

Bytes come from the codecs' `planes`, which are also what the tensors are made of; there is no second formula.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from kvframe.errors import CapacityError, ConfigError
from kvframe.interfaces import Codec, Retention
from kvframe.sealing import kinds, unit
from kvframe.types import LayerSpec, PlaneSpec

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def slot_bytes(codec: Codec, layer: LayerSpec, slots: int) -> dict[int, int]:
    """Bytes of `slots` slots in one layer, K and V together: sealing group of the codec -> bytes.

    This is what the planes take: `slots` entries per token, `slots // group` per group.
    """
    total: dict[int, int] = {}
    for kind, dim in kinds(layer):
        bound = codec.for_layer(layer, kind)
        for plane in bound.planes(dim).values():
            entries = slots // bound.group if plane.per == "group" else slots
            size = plane.nbytes(layer.dtype) * entries * layer.kv_heads
            total[bound.group] = total.get(bound.group, 0) + size
    return total


def token_bytes(codec: Codec, layer: LayerSpec) -> dict[int, float]:
    """Bytes that one token takes in one layer, by sealing group (per-group planes count their part)."""
    whole = unit(codec, (layer,))
    return {group: size / whole for group, size in slot_bytes(codec, layer, whole).items()}


def layer_token_bytes(codec: Codec, layer: LayerSpec) -> float:
    """Bytes that one token takes in one layer, K and V together; open groups are not in it (see `tail_bytes`)."""
    return float(sum(token_bytes(codec, layer).values()))


def tail_bytes(codec: Codec, layer: LayerSpec) -> int:
    """Bytes of one request's open groups in one layer: `group` vectors in the model's dtype, for K and for V."""
    return sum(group * size for group, size in open_bytes(codec, layer).items())


def open_bytes(codec: Codec, layer: LayerSpec) -> dict[int, int]:
    """Sealing group -> bytes of one token in the tails of one layer."""
    found: dict[int, int] = {}
    for kind, dim in kinds(layer):
        group = codec.for_layer(layer, kind).group
        if group > 1:
            found[group] = found.get(group, 0) + PlaneSpec((dim,)).nbytes(layer.dtype) * layer.kv_heads
    return found


def held_blocks(rule: Retention, length: int, chunk: int, block_size: int) -> np.ndarray:
    """int64 [length]: blocks that a request holds while the chunk of `chunk` tokens that ends at token 1, 2, ...,
    `length` is computed. What a window keeps depends on where it lies between block edges:

        window 10, chunk 1, block_size 16:    [..............xx][xxxxxxxx........]  two blocks
                                              [...xxxxxxxxxx...]                    one
    """
    ends = np.arange(1, length + 1)
    blocks = -(-ends // block_size)
    if rule.forgets:
        deaths = np.sort(
            [_death(rule, b * block_size, (b + 1) * block_size, length) for b in range(length // block_size)]
        )
        blocks = blocks - np.searchsorted(deaths, np.maximum(ends - chunk, 0), side="right")
    return blocks


def live_blocks(rule: Retention, length: int, chunk: int, block_size: int) -> int:
    """The most blocks that a request holds on its way to `length` tokens, computing at most `chunk` at a time."""
    return int(held_blocks(rule, length, chunk, block_size).max())


def _death(rule: Retention, start: int, stop: int, length: int) -> int:
    """The smallest number of computed tokens at which all positions of a block are dead; length + 1: not before."""
    if rule.kernel_mask:  # the rule is a window and sinks, by its own word
        return length + 1 if rule.window is None or start < rule.sinks else stop - 1 + rule.window
    low, high = stop, length + 1  # `dead` is monotone in the number of computed tokens
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rule.dead(start, stop, middle).all() else (middle + 1, high)
    return low


def parse_bytes(value) -> int | float:
    """`2GiB`, `500MB`, `1073741824` -> bytes (int); `0.3` -> a fraction (float)."""
    if isinstance(value, float) and 0 < value <= 1:
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 1:
        return int(value)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", str(value).lower())
    try:
        number = float(match[1])
        if match[2] in UNITS and number > 0:
            return number if not match[2] and number <= 1 and "." in match[1] else int(number * UNITS[match[2]])
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"cache.memory={value!r} is not an amount of memory",
        options=["a number of bytes", "2GiB", "500MB", "a fraction of the free memory such as 0.3"],
    )


def free_memory(device: str) -> int:
    """Bytes that are free on the device now."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def split(
    *,
    block_bytes: Sequence[int],
    need: Sequence[int],
    names: Sequence[str],
    memory,
    num_blocks: int | None,
    group_share: dict | None,
    useful: int | None,
    device: str,
    block_size: int,
    tails: int = 0,
) -> list[int]:
    """Blocks of each layer group, the null block not counted.

    Args:
        block_bytes: bytes of one block, all layers of the group; need: blocks that one request of max_len takes.
        memory: bytes or a fraction of what is free; num_blocks: instead, the blocks of the neediest group.
        group_share: name -> share of the memory, instead of in proportion to `need * block_bytes`.
        useful: requests beyond which more memory can never be used (no index keeps anything); None: no bound.
        tails: bytes that are taken out of the memory first, for the open groups of every request that may run.
    """
    need, block_bytes = np.asarray(need, np.int64), np.asarray(block_bytes, np.int64)
    if num_blocks is not None:
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"cache.num_blocks={num_blocks!r} cannot be used", options=["null", "an integer >= 1"])
        return [max(1, int(-(-num_blocks * n // need.max()))) for n in need]
    amount = parse_bytes(memory)
    budget = int(free_memory(device) * amount) if isinstance(amount, float) else amount
    given, budget = budget, budget - tails
    if group_share:
        unknown = set(group_share) - set(names)
        if unknown or len(group_share) != len(names):
            raise ConfigError(
                f"cache.group_share names {sorted(group_share)}, the layer groups are {list(names)}",
                options=names,
                fix="give a share for each layer group",
            )
        share = np.array([float(group_share[name]) for name in names])
        if not (share > 0).all():
            raise ConfigError(f"cache.group_share={dict(group_share)} cannot be used", options=["numbers > 0"])
        share = share / share.sum()
    else:
        share = need * block_bytes / (need * block_bytes).sum()
    blocks = (budget * share / block_bytes).astype(np.int64) - 1  # one is the null block
    if useful is not None:
        blocks = np.minimum(blocks, need * useful)
    if (blocks < 1).any():
        g = int(np.argmin(blocks))
        least = int((2 * block_bytes / share).max()) + 1 + tails
        open_groups = f" and {tails} bytes for the open groups of all requests" if tails else ""
        raise CapacityError(
            f"cache.memory={memory} is {given} bytes; layer group {names[g]!r} gets not one block of "
            f"{block_size} tokens ({int(block_bytes[g])} bytes) beside the null block{open_groups}",
            fix=f"cache.memory={least} or more, or a smaller engine.max_{'requests' if tails else 'len'}",
        )
    return blocks.tolist()
