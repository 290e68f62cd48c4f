"""Who takes part in a comparison: caches and baselines, each looked at once before the work begins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from kvframe.comparison.baselines import Baseline
from kvframe.comparison.measure import Advance, EnginePlayer
from kvframe.config import build_baseline
from kvframe.errors import ConfigError, KVFrameError
from kvframe.evaluation.prepare import free_name
from kvframe.lineup import Candidate, error_of, lineup, preset, running

COMMAND = "compare"
GROUP = "baseline"
ROOMS = ("cache", "engine", "kernel")


@dataclass
class Contender:
    """One that takes part.

    Attributes:
        asked: its name and the command's config under it.
        longest: tokens of the longest request that it will get.
        baseline: what transformers does, or None for a cache.
        exact, kernels, notes: see kvframe.comparison.
    """

    asked: Candidate
    longest: int
    baseline: Baseline | None = None
    exact: bool = True
    kernels: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.asked.name

    @property
    def candidate(self) -> Candidate:
        """With a longest length for the engine."""
        return self.asked if self.baseline is not None else sized(self.asked, self.longest)

    @property
    def kind(self) -> str:
        return "cache" if self.baseline is None else "baseline"

    @property
    def config(self) -> dict[str, Any]:
        """What makes it this one: its cache, engine and kernel, or its baseline."""
        rooms = ROOMS if self.baseline is None else (GROUP,)
        cfg = self.candidate.cfg
        return {room: OmegaConf.to_container(cfg[room], resolve=True) for room in rooms}

    def open(self, model: Any, advance: Advance) -> Any:
        """A context that yields a player: `answer(requests) -> outputs` and `figures() -> dict`."""
        if self.baseline is not None:
            return self.baseline.open(model, advance, self.longest)
        return self._engine(model, advance)

    @contextmanager
    def _engine(self, model: Any, advance: Advance) -> Iterator[EnginePlayer]:
        with running(self.candidate, model) as engine:
            yield EnginePlayer(engine, advance)


def contenders(
    cfg: DictConfig, overrides: Iterable[str] | None, model: Any, longest: int
) -> tuple[list[Contender], dict[str, str], list[str]]:
    """Everybody who takes part, in the order of the list. Each was built once.

    Args:
        longest: tokens of the workload's longest request.
    Returns: contenders; name -> reason of presets that cannot be built (when all were asked for); notes.
    Raises:
        ConfigError, CapacityError, IncompatibleCacheError, MissingPackageError, ...: one that was asked for by name
        cannot be built, or does not take the longest request.
    """
    if OmegaConf.select(cfg, GROUP) is not None:
        raise ConfigError(f"{GROUP}= chooses nothing by itself", fix="name it in the list: caches=[NAME,BASELINE]")
    every = cfg.caches in (None, "")
    asked = lineup(cfg.caches, overrides, COMMAND, (GROUP,))
    if every and cfg.baselines:
        asked += lineup(cfg.baselines, overrides, COMMAND, (GROUP,))
    found, skipped, notes = [], {}, []
    for candidate in asked:
        try:
            found.append(look(candidate, model, longest))
        except KVFrameError as error:
            if not every:
                raise
            skipped[candidate.name] = str(error)
    if not any(contender.baseline is None and contender.exact for contender in found):
        added = free_name(preset(COMMAND, overrides), asked)
        contender = look(added, model, longest)
        if not contender.exact:
            raise ConfigError(f"no cache is exact, {contender.name!r} neither", fix="name an exact one in caches")
        notes.append(f"no cache of the list is exact: {contender.name} was added as the reference")
        found.insert(0, contender)
    return found, skipped, notes


def look(candidate: Candidate, model: Any, longest: int) -> Contender:
    """Builds a candidate, asks it what must be known before the work, and lets it go again."""
    if OmegaConf.select(candidate.cfg, GROUP) is not None:
        return _look_at_baseline(candidate, model, longest)
    if longest > model.max_len and candidate.cfg.engine.max_len is None and not _unbounded(candidate, model, longest):
        raise ConfigError(
            f"the workload's longest request has {longest:,} tokens, prompt and output; {model.name} takes "
            f"{model.max_len:,}",
            fix="shorter prompts or outputs, or a model for longer texts",
        )
    with running(sized(candidate, longest), model, warm=False) as engine:
        if engine.limit < longest:
            raise ConfigError(
                f"the cache {candidate.name!r} takes requests of at most {engine.limit} tokens; the workload's longest "
                f"has {longest}",
                fix="a smaller workload, or a larger engine.max_len, cache.memory or cache.num_blocks",
            )
        notes = []
        if candidate.cfg.engine.max_len is None and getattr(engine.cache, "block_size", 0) >= longest:
            notes.append(
                f"it reserves engine.max_len tokens for each request, here {longest:,}, the longest that comes; with "
                "more it wastes more"
            )
        return Contender(candidate, longest, None, bool(engine.cache.exact), engine.kernels(), notes)


def _unbounded(candidate: Candidate, model: Any, longest: int) -> bool:
    """Does the cache take requests longer than the model was made for?"""
    try:
        with running(sized(candidate, longest), model, warm=False) as engine:
            return engine.limit >= longest
    except KVFrameError:
        return False


def _look_at_baseline(candidate: Candidate, model: Any, longest: int) -> Contender:
    try:
        baseline = build_baseline(candidate.cfg)
        with baseline.open(model, lambda n: None, longest):
            pass
    except KVFrameError as error:
        raise error_of(candidate.name, error) from error
    except Exception as error:  # whatever transformers raises
        raise ConfigError(
            f"the baseline {candidate.name!r} cannot run on this model: {type(error).__name__}: {error}",
            fix="leave it out of caches",
        ) from error
    return Contender(candidate, longest, baseline, baseline.exact)


def sized(candidate: Candidate, longest: int) -> Candidate:
    """The candidate with `engine.max_len=longest`, unless somebody chose another."""
    if candidate.cfg.engine.max_len is not None:
        return candidate
    cfg = candidate.cfg.copy()
    with open_dict(cfg):
        cfg.engine.max_len = longest
    return Candidate(candidate.name, cfg)


def fingerprint(*parts: Any) -> str:
    """Of plain values; other values have another one."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Where two trees of plain values differ, e.g. ["cache.layout.block_size: 16 there, 32 here"]."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*old, *new])
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{key}.{n}" if key else str(n))]
    old, new = (list(v) if isinstance(v, Sequence) and not isinstance(v, str) else v for v in (old, new))
    return [] if old == new else [f"{key}: {json.dumps(old, default=str)} there, {json.dumps(new, default=str)} here"]
