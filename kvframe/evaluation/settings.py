"""The keys of `kvframe evaluate`, checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.errors import ConfigError

_AT_LEAST = {"max_tokens": 2, "texts": 1, "chunk": 1, "decode_tokens": 0}
_FIXES = {
    "max_tokens": "1024", "texts": "1", "chunk": "64", "decode_tokens": "64", "greedy_tokens": "64, or null for none",
    "lm_eval_limit": "100, or null for all", "warm": "true", "noise": "true", "lm_eval": "null",
}  # fmt: skip
_NEEDLE = "needle={lengths:[128,384],depths:[0.1,0.5,0.9]}, or needle=null"


@dataclass(frozen=True)
class Settings:
    """See conf/evaluate.yaml. `lengths` and `depths` are the needle's, both empty without; `greedy_tokens` 0: none."""

    text: str
    max_tokens: int
    texts: int
    chunk: int
    decode_tokens: int
    greedy_tokens: int
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    warm: bool
    noise: bool
    lm_eval: tuple[str, ...]
    lm_eval_limit: int | None

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """The settings of a config. ConfigError names the key, the value and what is valid."""
        for key, least in _AT_LEAST.items():
            _check(_integer(cfg[key], least), key, cfg[key], f"an integer >= {least}")
        for key, least in (("greedy_tokens", 0), ("lm_eval_limit", 1)):
            _check(cfg[key] is None or _integer(cfg[key], least), key, cfg[key], "null", f"an integer >= {least}")
        for key in ("warm", "noise"):
            _check(isinstance(cfg[key], bool), key, cfg[key], "true", "false")
        lengths, depths = _needle(cfg.needle)
        tasks = OmegaConf.to_container(cfg.lm_eval) if OmegaConf.is_config(cfg.lm_eval) else cfg.lm_eval
        tasks = [tasks] if isinstance(tasks, str) else tasks or []
        _check(
            isinstance(tasks, list) and all(isinstance(task, str) for task in tasks),
            "lm_eval", cfg.lm_eval, "null", "names of tasks, e.g. [arc_easy]",
        )  # fmt: skip
        return cls(
            text=str(cfg.text),
            **{key: cfg[key] for key in _AT_LEAST},
            greedy_tokens=cfg.greedy_tokens or 0,
            lengths=lengths,
            depths=depths,
            warm=cfg.warm,
            noise=cfg.noise,
            lm_eval=tuple(tasks),
            lm_eval_limit=cfg.lm_eval_limit,
        )


def _needle(value: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if value is None:
        return (), ()
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    if not isinstance(plain, dict) or set(plain) != {"lengths", "depths"}:
        raise ConfigError(f"needle={plain} cannot be used", options=["lengths and depths", "null"], fix=_NEEDLE)
    lengths, depths = plain["lengths"], plain["depths"]
    for key, values, valid, fine in (
        ("lengths", lengths, "tokens, e.g. [128,384]", lambda x: _integer(x, 1)),
        ("depths", depths, "numbers from 0 to 1, e.g. [0.1,0.5,0.9]", _share),
    ):
        if not isinstance(values, list) or not values or not all(fine(value) for value in values):
            raise ConfigError(f"needle.{key}={values} cannot be used", options=[f"a list of {valid}"], fix=_NEEDLE)
    return tuple(lengths), tuple(depths)


def _integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1


def _check(fine: bool, key: str, value: Any, *options: str) -> None:
    if not fine:
        raise ConfigError(f"{key}={value!r} cannot be used", options=options, fix=f"{key}={_FIXES[key]}")
