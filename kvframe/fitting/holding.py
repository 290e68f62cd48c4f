"""What requests hold in a cache, asked of the control plane that would be built; no tensor is made.

Blocks of a layer group are counted by the functions with which the cache sizes its own pools (kvframe.memory), their
bytes are the cache's. Nothing is shared: each request has a text of its own.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from omegaconf import DictConfig, open_dict

from kvframe import memory as sizes
from kvframe.config import build_cache, plain
from kvframe.errors import CapacityError, ConfigError
from kvframe.interfaces import CacheContext

READ = ("rules", "block_size", "block_bytes", "tail_bytes", "token_bytes", "group_names")  # of a cache made of parts


class Holding:
    """The cache of one config for requests of at most `max_len` tokens.

    Args:
        cfg: of the command `plan`: its cache and its engine; `cache.memory` and `cache.num_blocks` are not used.
        model: its layers, dtype and longest text.
    Raises: ConfigError, IncompatibleCacheError, MissingPackageError: the cache cannot be built.

    Attributes:
        cache: the control plane. null_bytes: of the null blocks, which are there without any request.
        chunk: most tokens of a step.
    """

    def __init__(self, cfg: DictConfig, model: Any, max_len: int):
        engine = plain(cfg, "engine")
        for name in ("max_step_tokens", "max_len"):
            value = engine[name] if name != "max_len" or engine[name] is not None else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"engine.{name}={value!r} cannot be used", options=["an integer >= 1"])
        self.max_len, self.chunk = max_len, engine["max_step_tokens"]
        self.group_share = plain(cfg, "cache").get("group_share")
        context = CacheContext(
            layers=tuple(model.layers),
            dtype=model.dtype,
            max_len=max_len,
            max_requests=1,
            max_step_tokens=self.chunk,
            kernels=None,
            learned_sinks=getattr(model, "learned_sinks", None),
            trained_len=model.max_len,
        )
        self.cache = build_cache(_smallest(cfg), context)
        if missing := [name for name in READ if not hasattr(self.cache, name)]:
            raise ConfigError(
                f"{type(self.cache).__name__} is a cache of its own, which does not say what a request holds "
                f"(it has no {', '.join(missing)})",
                fix="a cache that is made of parts",
            )
        self.null_bytes = sum(self.cache.block_bytes)
        self.tail = sum(self.cache.tail_bytes)

    def at(self, max_len: int) -> Holding:
        """The same for another `max_len`, where the cache's block size does not depend on it."""
        other = copy(self)
        other.max_len = max_len
        return other

    def blocks(self, length: int, chunk: int = 1) -> list[int]:
        """Per layer group, the most blocks that a request holds on its way to `length` tokens."""
        return [sizes.live_blocks(rule, length, chunk, self.cache.block_size) for rule in self.cache.rules]

    def request_bytes(self, length: int) -> int:
        """The most bytes that a request of up to `length` tokens holds while it decodes, its tail included."""
        return sum(n * size for n, size in zip(self.blocks(length), self.cache.block_bytes)) + self.tail

    def fixed_bytes(self, length: int) -> int:
        """Bytes beside those of the requests: null blocks, and what a window keeps longer while a prompt is computed,
        `chunk` tokens at a time."""
        more = (most - n for n, most in zip(self.blocks(length), self.blocks(length, self.chunk)))
        return self.null_bytes + sum(n * size for n, size in zip(more, self.cache.block_bytes))

    def fits(self, requests: int, length: int, room: int) -> bool:
        """Do so many requests of `length` tokens run at once in `room` bytes, which are split over the layer groups
        as a cache for `max_len` splits them?"""
        if room < 2:
            return False
        try:
            pools = sizes.split(
                block_bytes=self.cache.block_bytes,
                need=self.blocks(self.max_len, self.chunk),
                names=self.cache.group_names,
                memory=room,
                num_blocks=None,
                group_share=self.group_share,
                useful=None,
                device="cpu",
                block_size=self.cache.block_size,
                tails=self.tail * requests,
            )
        except CapacityError:
            return False
        decoding, prefilling = self.blocks(length), self.blocks(length, self.chunk)
        return all((requests - 1) * n + last <= pool for n, last, pool in zip(decoding, prefilling, pools))

    def most(self, length: int, room: int) -> int:
        """The largest number of requests of `length` tokens that `fits`."""
        return largest(lambda n: self.fits(n, length, room), max(room, 0) // self.request_bytes(length))


def largest(fine, stop: int) -> int:
    """The largest n <= stop with `fine(n)`, which holds up to some number and not beyond; 0: not even for 1."""
    low, high = 0, max(stop, 0)
    if high and fine(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fine(middle) else (low, middle)
    return low


def _smallest(cfg: DictConfig) -> DictConfig:
    """The same cache with one block: a control plane's bytes do not depend on how many there are."""
    cfg = cfg.copy()
    with open_dict(cfg):
        if "num_blocks" in cfg.cache:
            cfg.cache.num_blocks = 1
    return cfg
