"""The keys of `kvframe plan`, checked before anything is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.errors import ConfigError
from kvframe.memory import parse_bytes


@dataclass(frozen=True)
class Settings:
    """See conf/plan.yaml. `context` None: as long as the model goes; `memory`, `weights`: bytes, or None."""

    context: int | None
    requests: int
    contexts: tuple[int, ...]
    memory: int | None
    reserve: float
    weights: int | None

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """The settings of a config. ConfigError names the key, the value and what is valid."""
        if cfg.context is not None and not _count(cfg.context):
            raise _wrong("context", cfg.context, "null", "a number of tokens >= 1", fix="context=2048")
        if not _count(cfg.requests):
            raise _wrong("requests", cfg.requests, "a number of requests >= 1", fix="requests=100")
        reserve = cfg.reserve
        if isinstance(reserve, bool) or not isinstance(reserve, int | float) or not 0 <= reserve < 1:
            raise _wrong("reserve", reserve, "a number from 0 to less than 1", fix="reserve=0.1")
        return cls(
            cfg.context,
            cfg.requests,
            _contexts(cfg.contexts),
            _bytes("memory", cfg.memory, "memory=80GiB"),
            float(reserve),
            _bytes("weights", cfg.weights, "weights=4.5GiB"),
        )


def _contexts(value: Any) -> tuple[int, ...]:
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    plain = [] if plain is None else plain if isinstance(plain, list) else [plain]
    if not all(_count(context) for context in plain):
        raise _wrong("contexts", plain, "null", "a list of numbers of tokens >= 1", fix="contexts=[1024,8192]")
    return tuple(dict.fromkeys(plain))


def _bytes(key: str, value: Any, example: str) -> int | None:
    """Bytes as `cache.memory` takes them, but no fraction: there is nothing here that it could be a fraction of."""
    if value is None:
        return None
    try:
        amount = parse_bytes(value)
    except ConfigError:
        amount = 0.0
    if isinstance(amount, float) or not math.isfinite(amount):
        raise _wrong(key, value, "null", "a number of bytes", "80GiB", "500MB", fix=example)
    return amount


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _wrong(key: str, value: Any, *options: str, fix: str) -> ConfigError:
    return ConfigError(f"{key}={value!r} cannot be used", options=options, fix=fix)
