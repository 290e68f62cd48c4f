"""The keys of `kvframe compare`, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.errors import ConfigError
from kvframe.evaluation import texts


@dataclass(frozen=True)
class Settings:
    """See conf/compare.yaml. `timeline`: (prompt, output) tokens, or None."""

    repeat: int
    quality_tokens: int | None
    text: str
    timeline: tuple[int, int] | None
    profile: bool
    resume: bool

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """The settings of a config. ConfigError names the key, the value and what is valid."""
        _check(_integer(cfg.repeat, 1), "repeat", cfg.repeat, "an integer >= 1")
        tokens = cfg.quality_tokens
        fine = tokens is None or _integer(tokens, 0) and tokens != 1
        _check(fine, "quality_tokens", tokens, "null: as many as show a difference", "0: none", "an integer >= 2")
        for key in ("profile", "resume"):
            _check(isinstance(cfg[key], bool), key, cfg[key], "true", "false")
        if tokens != 0:
            texts.read(str(cfg.text))
        return cls(cfg.repeat, tokens, str(cfg.text), _timeline(cfg.timeline), cfg.profile, cfg.resume)


def _timeline(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    fine = isinstance(value, dict) and set(value) == {"prompt", "output"}
    fine = fine and all(_integer(n, 1) for n in value.values())
    _check(fine, "timeline", value, "null", "{prompt: TOKENS, output: TOKENS}")
    return value["prompt"], value["output"]


def _integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(fine: bool, key: str, value: Any, *options: str) -> None:
    if not fine:
        raise ConfigError(f"{key}={value!r} cannot be used", options=options)
