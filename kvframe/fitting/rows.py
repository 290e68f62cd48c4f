"""`fit`: one row per cache, and one per cache and context.

    room for keys and values = memory - weights - reserve * memory

What depends on the longest request (a layout may reserve it) is asked of a cache that is built for `engine.max_len`,
and where that is null for the context in question.
"""

from __future__ import annotations

import inspect
import pkgutil
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from kvframe.config import build_skeleton
from kvframe.errors import ConfigError, KVFrameError
from kvframe.fitting import subject
from kvframe.fitting.holding import Holding, largest
from kvframe.fitting.settings import Settings
from kvframe.lineup import PRESETS, Candidate, error_of, lineup, own_overrides
from kvframe.report import human_bytes

COMMAND = "plan"
FAR = 1 << 20  # tokens; how far is looked where neither the model nor the engine names an end


@dataclass
class Fitting:
    """What `fit` answers.

    Attributes:
        model: name, dtype, kinds of layers, parameters and bytes (see kvframe.fitting.subject).
        rows: one per cache for `context`; contexts: one per cache and entry of `contexts`, in the same form.
        skipped: name -> reason, of presets that cannot be built here (only when nobody named the caches).
        memory: bytes of the device, `reserve_bytes` of them set aside, `kv_room_bytes` left for keys and values;
            None without `memory`.
        curves: cache -> [(context, bytes of all requests), ...], when asked for.
        notes: what a reader should know.
    """

    model: dict[str, Any]
    rows: list[dict[str, Any]]
    contexts: list[dict[str, Any]]
    skipped: dict[str, str]
    requests: int
    memory: int | None = None
    reserve_bytes: int | None = None
    kv_room_bytes: int | None = None
    curves: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def fit(
    cfg: DictConfig, overrides: Iterable[str] | None = None, *, model: Any = None, curves: bool = False
) -> Fitting:
    """What the caches that `cfg.caches` names need for this model, and what fits.

    Args:
        cfg: `kvframe.config.compose(overrides, "plan")`. It is not changed.
        overrides: what it was composed from; None: those of the running job.
        model: instead of the skeleton of the one that the config describes. Anything with `layers`, `dtype`,
            `max_len`, `weight_bytes` and `name`.
        curves: also answer the bytes at powers of two up to the longest context.

    Raises:
        ConfigError: a value that cannot be used; UnsupportedModelError: see kvframe.hf.probe; IncompatibleCacheError,
        MissingPackageError: a cache that was named and cannot be built.

    Example:
        >>> asked = ["model=random", "model.shape=qwen2_5_0_5b", "context=2048", "requests=100", "caches=[paged]"]
        >>> fit(compose(asked, "plan"), asked).rows[0]["bytes_per_request"]
        25165824
    """
    settings = Settings.of(cfg)
    own = own_overrides() if overrides is None else list(overrides)
    entries = cfg.caches if cfg.caches not in (None, "") else _chosen(own)
    candidates = lineup(entries, overrides, COMMAND)
    model = build_skeleton(_with_known_dtype(cfg)) if model is None else model
    about = subject.facts(model, settings.weights)
    reserve = room = None
    if settings.memory is not None:
        reserve = int(settings.memory * settings.reserve)
        room = settings.memory - reserve - about["weights_bytes"]
    found = Fitting(about, [], [], {}, settings.requests, settings.memory, reserve, room, notes=subject.notes(model))
    for candidate in candidates:
        try:
            asked = _Asked(candidate, model, settings, about["weights_bytes"], room)
            row, contexts = asked.row(settings.context), [asked.row(context) for context in settings.contexts]
        except KVFrameError as error:
            if entries is not None:
                raise error_of(candidate.name, error) from error
            found.skipped[candidate.name] = str(error)
            continue
        found.rows.append(row)
        found.contexts += contexts
        if curves:
            found.curves[candidate.name] = asked.curve()
    if not found.rows:
        often = Counter(found.skipped.values()).most_common()
        shared, n = often[0]
        if n > 1:  # what most of them have in common is what the user can do something about
            raise ConfigError(f"no preset can be used: {shared}")
        reasons = "\n".join(f"{name}: {reason}" for name, reason in found.skipped.items())
        raise ConfigError(f"no preset can be used:\n{reasons}", fix="caches=[NAME]")
    _note_layouts(found)
    if room is not None and room <= 0:
        found.notes.append("the weights and the reserve alone are more than the memory")
    return found


def _note_layouts(found: Fitting) -> None:
    """What the columns of the tables do not say."""
    rows = found.rows
    longer = {row["cache"]: row["prefill_bytes"] for row in rows if row["prefill_bytes"]}
    if longer:
        sizes = ", ".join(f"{name} {human_bytes(size)}" for name, size in longer.items())
        found.notes.append(
            f"while a prompt is computed one request at a time holds more than `each`, a step of "
            f"engine.max_step_tokens beside its window ({sizes}); `fit` and headroom count it"
        )
    large = [row["cache"] for row in rows if found.memory is not None and row["null_bytes"] >= row["bytes_per_request"]]
    if large:
        found.notes.append(
            f"{', '.join(large)}: one more block, which no request gets, is as large as a request; `fit` and headroom "
            "count it"
        )


def _chosen(own: list[str]) -> list[str] | None:
    """The one cache that the command's own overrides choose; None when they leave that open."""
    within = [o for o in own if o.lstrip("+~").startswith((f"{PRESETS}=", f"{PRESETS}/", f"{PRESETS}."))]
    chooses = any(not o.lstrip("+~").startswith(f"{PRESETS}.") for o in within)
    return [shlex.join(within)] if chooses else None


def _with_known_dtype(cfg: DictConfig) -> DictConfig:
    """conf/plan.yaml sets `model.dtype`, which a model that somebody else brings may not take."""
    target = cfg.model.get("_target_") if OmegaConf.is_dict(cfg.model) else None
    cfg = cfg.copy()
    try:
        takes = inspect.signature(pkgutil.resolve_name(target)).parameters
    except Exception:  # what is wrong with the target is told when it is built
        return cfg
    if "dtype" not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        with open_dict(cfg):
            cfg.model.pop("dtype", None)
    return cfg


class _Asked:
    """One candidate, and the caches that were built to answer for it.

    Attributes:
        longest: tokens of the longest request that may be, by what `bound` names.
        steady: blocks have one size, whatever the longest request is; then one cache answers for all lengths.
    """

    def __init__(self, candidate: Candidate, model: Any, settings: Settings, weights: int, room: int | None):
        self.cfg, self.model, self.settings, self.weights, self.room = candidate.cfg, model, settings, weights, room
        self.name, self.max_len = candidate.name, candidate.cfg.engine.max_len
        self.model_len = model.max_len if model.max_len is not None else FAR
        first = Holding(self.cfg, model, self.max_len or self.model_len)
        self.built, self.steady = {first.max_len: first}, False
        if self.max_len is not None:
            self.longest, self.bound = self.max_len, "engine.max_len"
        elif first.cache.unbounded:
            self.longest, self.bound = max(FAR, self.model_len), "no limit"
        else:
            self.longest, self.bound = self.model_len, "the model's length"
        self._refuse(first.cache)
        near = min(max(self.longest // 2, 1), settings.context or self.longest, *settings.contexts)
        self.steady = self.holding(near).cache.block_size == first.cache.block_size

    def _refuse(self, cache: Any) -> None:
        """ConfigError for what is longer than the model, or than `engine.max_len`."""
        by_model = FAR if cache.unbounded else self.model_len
        longer = f", or for longer requests {cache.unbounded_fix}" if cache.unbounded_fix else ""
        for key, lengths, limit, whose, more in (
            ("engine.max_len", [self.max_len or 0], by_model, "the model takes", longer),
            ("context", [self.settings.context or 0], self.longest, f"{self.bound} allows", longer),
            ("contexts", [0, *self.settings.contexts], self.longest, f"{self.bound} allows", longer),
        ):
            if max(lengths) > limit:
                fix = f"{key}={[limit] if key == 'contexts' else limit}{more}"
                message = f"{key} has {max(lengths)} tokens, more than the {limit} that {whose}"
                raise ConfigError(message, options=[f"1 .. {limit}"], fix=fix)

    def holding(self, length: int) -> Holding:
        """The cache that requests of `length` tokens run in."""
        longest = self.max_len or length
        if longest not in self.built:
            first = next(iter(self.built.values()))
            self.built[longest] = first.at(longest) if self.steady else Holding(self.cfg, self.model, longest)
        return self.built[longest]

    def row(self, context: int | None) -> dict[str, Any]:
        """What the cache needs for requests of `context` tokens, and what fits."""
        context = context or self.max_len or self.model_len
        holding, requests = self.holding(context), self.settings.requests
        cache, each = holding.cache, holding.request_bytes(context)
        per_token = sum(cache.token_bytes)
        found = {
            "cache": self.name,
            "exact": bool(cache.exact),
            "context": context,
            "requests": requests,
            "bytes_per_token": int(per_token) if per_token == int(per_token) else per_token,
            "bytes_per_request": each,
            "tail_bytes_per_request": holding.tail,
            "bytes_total": requests * each,
            "weights_bytes": self.weights,
            "kv_to_weights": requests * each / self.weights if self.weights else None,
            "block_size": cache.block_size,
            "max_len": holding.max_len,
            "fixed_bytes": holding.fixed_bytes(context),
            "null_bytes": holding.null_bytes,
            "prefill_bytes": holding.fixed_bytes(context) - holding.null_bytes,
            "kv_room_bytes": self.room,
            "requests_that_fit": None,
            "longest_context": None,
            "longest_context_bound": None,
            "headroom_bytes": None,
            "groups": [
                {"name": name, "block_bytes": size, "blocks_per_request": blocks, "tail_bytes": tail}
                for name, size, blocks, tail in zip(
                    cache.group_names, cache.block_bytes, holding.blocks(context), cache.tail_bytes
                )
            ],
        }
        return found | (self._fit(found, holding) if self.room is not None else {})

    def _fit(self, row: dict[str, Any], holding: Holding) -> dict[str, Any]:
        requests = row["requests"]
        longest = largest(lambda n: self.holding(n).fits(requests, n, self.room), self.longest)
        return {
            "requests_that_fit": holding.most(row["context"], self.room),
            "longest_context": longest,
            "longest_context_bound": self.bound if longest == self.longest else "memory",
            "headroom_bytes": self.room - row["bytes_total"] - row["fixed_bytes"],
        }

    def curve(self) -> list[tuple[int, int]]:
        """(context, bytes of all requests) at powers of two, and at every context that was asked for."""
        asked = {*self.settings.contexts, self.settings.context or self.max_len or self.model_len}
        stop = max(min(self.longest, self.model_len), *asked)
        points = sorted(asked | {stop} | {1 << i for i in range(4, stop.bit_length()) if 1 << i <= stop})
        return [(n, self.settings.requests * self.holding(n).request_bytes(n)) for n in points]
