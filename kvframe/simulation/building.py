"""The caches of a simulation: what the config says, of a given number of blocks, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import DictConfig, OmegaConf, open_dict

from kvframe.config import build_cache, plain
from kvframe.errors import ConfigError
from kvframe.interfaces import CacheContext, Codec, KVCache, Layout
from kvframe.policies import make_policy
from kvframe.simulation.trace import Trace
from kvframe.types import CacheStats, LayerSpec, PlaneSpec


class OneSlot(Layout):
    """A block is one slot: how mode=reference lays out hash ids, whatever the config says."""

    def block_size(self, max_len: int, unit: int = 1) -> int:
        return 1


class Unstored(Codec):
    """One byte per head and token, which nobody stores: hash ids have no vectors."""

    def planes(self, dim):
        return {"payload": PlaneSpec((1,), "uint8")}

    def encode(self, x):
        raise NotImplementedError("a simulation stores nothing")

    decode = encode


def layers(windows: list[int | None]) -> tuple[LayerSpec, ...]:
    """One attention layer per window."""
    return tuple(LayerSpec(i, 1, 1, 64, 64, 0.125, window=window) for i, window in enumerate(windows))


def by_id(cfg: DictConfig) -> DictConfig:
    """The config for blocks of one hash id: a copy with the layout and the codec replaced."""
    if "layout" not in cfg.cache or "codec" not in cfg.cache:
        raise ConfigError(
            f"mode=reference replaces the layout of a cache, and {cfg.cache.get('_target_')} is not made of parts",
            fix="mode=engine",
        )
    cfg = cfg.copy()
    with open_dict(cfg):
        for part, target in (("layout", OneSlot), ("codec", Unstored)):
            cfg.cache[part] = OmegaConf.create({"_target_": f"{target.__module__}.{target.__qualname__}"})
    return cfg


def build(cfg: DictConfig, context: CacheContext, blocks: int, *, every_group: bool = False) -> KVCache:
    """The cache that `cfg.cache` describes, with `blocks` blocks in the neediest layer group; the others scale.

    Args:
        every_group: give each layer group that many. Through `memory` and `group_share`, which take them in bytes.
    """
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.cache.num_blocks = blocks
    cache = build_cache(cfg, context)
    groups = cache.stats().groups
    if not every_group or all(group.num_blocks >= blocks for group in groups):
        return cache
    with open_dict(cfg):
        cfg.cache.num_blocks = None
        cfg.cache.memory = sum((blocks + 2) * group.block_bytes + group.tail_pool for group in groups)
        cfg.cache.group_share = {group.name: group.block_bytes for group in groups}
    return build_cache(cfg, context)


def limits(cfg: DictConfig, trace: Trace) -> dict:
    """The engine's limits, checked; without `engine.max_len` the longest request of the trace fits."""
    engine = plain(cfg, "engine")
    engine["max_len"] = trace.longest if engine["max_len"] is None else engine["max_len"]
    engine["prefill_chunk"] = engine["max_step_tokens"] if engine["prefill_chunk"] is None else engine["prefill_chunk"]
    for name in ("max_len", "max_requests", "max_step_tokens", "prefill_chunk"):
        value = engine[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"engine.{name}={value!r} cannot be used", options=["an integer >= 1"])
    make_policy(engine["policy"])
    return engine


@dataclass
class Peaks:
    """The most blocks per layer group that held something, live or cached, seen so far."""

    cache: KVCache
    filled: list[int] = field(default_factory=list)

    def look(self) -> None:
        """To be called when blocks were taken."""
        pools = getattr(self.cache, "pools", None)
        if pools is not None:
            now = [pool.num_blocks - pool.free for pool in pools]
        else:  # a cache of somebody's own
            now = [(g.reserved + g.evictable) // g.block_bytes for g in self.cache.stats().groups]
        self.filled = [max(pair) for pair in zip(self.filled, now)] if self.filled else now

    def row(self, stats: CacheStats) -> dict:
        """What a row says about blocks: the largest layer group, and each one where there are several."""
        filled = self.filled or [0] * len(stats.groups)
        groups = {
            group.name: {
                "num_blocks": group.num_blocks,
                "peak_blocks": most,
                "peak_live_blocks": group.peak // group.block_bytes,
            }
            for group, most in zip(stats.groups, filled)
        }
        largest = max(groups.values(), key=lambda group: group["num_blocks"])
        found = {key: largest[key] for key in ("peak_blocks", "peak_live_blocks")}
        return found | ({"groups": groups} if len(groups) > 1 else {})
