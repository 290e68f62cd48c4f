"""One trace over several capacities: a row of figures for each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe import config
from kvframe.create import nearest
from kvframe.errors import ConfigError
from kvframe.simulation import concurrent, reference
from kvframe.simulation.trace import Trace, read_trace

MODES = ("reference", "engine")
PARTS = ("layout", "index", "eviction", "retention")

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Settings:
    """The command's own keys, checked (see conf/simulate.yaml)."""

    trace: str
    mode: str
    capacities: list[int | None]
    requests: int | None
    windows: list[int | None]
    tokens_per_id: int
    step_s: float
    token_s: float

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """The settings of a config. ConfigError: a value that cannot be used."""
        if OmegaConf.is_missing(cfg, "trace") or cfg.trace is None:
            raise ConfigError("trace must be given", fix="trace=FILE.jsonl")
        values = {key: config.plain(cfg, key) if OmegaConf.is_config(cfg[key]) else cfg[key] for key in KEYS}
        if values["mode"] not in MODES:
            valid = nearest(str(values["mode"]), MODES)
            raise ConfigError(f"mode={values['mode']} does not exist", options=valid, fix=f"mode={valid[0]}")
        if values["capacities"] is None:
            values["capacities"] = cfg.cache.get("num_blocks") if "num_blocks" in cfg.cache else None
        for key in ("capacities", "windows"):
            values[key] = values[key] if isinstance(values[key], list) else [values[key]]
            if not values[key] or not all(one is None or _count(one) for one in values[key]):
                raise ConfigError(
                    f"{key}={values[key]} cannot be used",
                    options=["a list of integers >= 1 and null"],
                    fix=f"{key}={EXAMPLES[key]}",
                )
        for key, one in (("requests", values["requests"] or 1), ("tokens_per_id", values["tokens_per_id"])):
            if not _count(one) or values[key] == 0:
                raise ConfigError(f"{key}={values[key]!r} cannot be used", options=["an integer >= 1"])
        for key in ("step_s", "token_s"):
            value = values[key]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{key}={value!r} cannot be used", options=["seconds >= 0"])
        return cls(str(cfg.trace), **values)


KEYS = ("mode", "capacities", "requests", "windows", "tokens_per_id", "step_s", "token_s")
EXAMPLES = {"capacities": "[1000,10000,null]", "windows": "[null,1024]"}


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def simulate(
    cfg: DictConfig,
    trace: Trace | None = None,
    *,
    progress: Progress | None = None,
    names: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One row per capacity, in their order.

    Args:
        cfg: a config of the command: `kvframe.config.compose([...], "simulate")`. It is not changed.
        trace: instead of reading the file that `cfg.trace` names (which may then be any text).
        progress: makes a context for each capacity, given a title and the number of requests; it yields a function that
            is told how many requests were done since the last call.
        names: what the parts are called in the rows, e.g. {"eviction": "lru"}; else the options that build them.

    Raises:
        ConfigError: a value that cannot be used, or a line of the trace; IncompatibleCacheError: parts that do not
            compose.
    """
    settings = Settings.of(cfg)
    if trace is None:
        trace = read_trace(settings.trace, settings.tokens_per_id, settings.requests)
    progress = progress or (lambda title, total: nullcontext(lambda n: None))
    names = {part: (names or {}).get(part) or _name(cfg, part) for part in PARTS}
    return [_row(cfg, settings, trace, capacity, progress, names) for capacity in settings.capacities]


def _row(cfg: DictConfig, settings: Settings, trace: Trace, capacity, progress: Progress, names: dict) -> dict:
    began = time.perf_counter()
    mode = {"reference": reference, "engine": concurrent}[settings.mode]
    cache = mode.cache_for(cfg, trace, capacity, settings.windows)
    title = "unbounded" if capacity is None else f"{capacity} blocks"
    with progress(title, len(trace.requests)) as advance:
        if settings.mode == "reference":
            found = reference.replay(cfg, trace, cache, advance)
        else:
            found = concurrent.Simulation(cfg, trace, cache, settings.step_s, settings.token_s).run(advance)
    seconds = time.perf_counter() - began
    ideal_blocks, ideal_tokens = trace.ideal
    row = {"num_blocks": capacity, **names, "mode": settings.mode, "requests": len(trace.requests), **found}
    row |= {"ideal_hit_rate_blocks": ideal_blocks, "ideal_hit_rate_tokens": ideal_tokens}
    return row | {
        "input_tokens": trace.input_tokens,
        "seconds": seconds,
        "requests_per_s": len(trace.requests) / seconds,
    }


def _name(cfg: DictConfig, part: str) -> str | None:
    """The option that brings this part, or the name of its class."""
    target = OmegaConf.select(cfg, f"cache.{part}._target_")
    if target is None:
        return None
    brings = [f.name for f in config.files(f"cache/{part}") if OmegaConf.create(f.text).get("_target_") == target]
    return brings[0] if brings else target.rpartition(".")[2]


def flat(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without nesting, for CSV: `groups: {full: {peak_blocks: 7}}` -> `full.peak_blocks: 7`."""
    return [
        {key: value for key, value in row.items() if key != "groups"}
        | {f"{g}.{key}": value for g, group in row.get("groups", {}).items() for key, value in group.items()}
        for row in rows
    ]
