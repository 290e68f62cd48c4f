"""A lineup of caches against the exact one, on one model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from kvframe.config import build_model
from kvframe.engine import Engine
from kvframe.errors import ConfigError, KVFrameError
from kvframe.evaluation import harness, needle, prepare, runs, texts
from kvframe.evaluation.measures import hold
from kvframe.evaluation.settings import Settings
from kvframe.evaluation.teacher import Limits
from kvframe.lineup import Candidate, error_of, lineup, preset, running

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
COMMAND = "evaluate"


@dataclass
class Found:
    """What an evaluation answers.

    Attributes:
        rows: one per cache, in the order of the lineup; `reference` is the name of the one that the others are held
            against, `added` says that nobody asked for it.
        skipped: name -> reason, of presets that cannot be built or run here (only when all presets were asked for).
        missing: names of the caches that have no row yet; complete: the evaluation came to its end.
        noise_kl_mean: KL of the reference to the same model in float32, nats per token; None: not measured.
        notes: what a reader should know.
        model: name, dtype and device; texts, tokens: how many are computed.
    """

    rows: list[dict[str, Any]]
    reference: str
    added: bool
    skipped: dict[str, str]
    model: dict[str, str]
    texts: int
    tokens: int
    missing: list[str]
    complete: bool = False
    noise_kl_mean: float | None = None
    notes: list[str] = field(default_factory=list)


def evaluate(
    cfg: DictConfig,
    overrides: Iterable[str] | None = None,
    *,
    model: Any = None,
    progress: Progress | None = None,
) -> Found:
    """Evaluates the caches that `cfg.caches` names. Arguments and errors as those of `Evaluation` and its `run`."""
    return Evaluation(cfg, overrides, model=model).run(progress)


class Evaluation:
    """One cache after another over the same material. Keeps the reference's logits and texts.

    Args:
        cfg: `kvframe.config.compose(overrides, "evaluate")`. It is not changed.
        overrides: what it was composed from; None: those of the running job.
        model: instead of building the one that the config describes.

    Attributes:
        found: the rows so far; whoever interrupts `run` finds there what is complete.

    Raises:
        ConfigError: a value that cannot be used; CapacityError, IncompatibleCacheError, MissingPackageError: a cache
        that cannot be built, by its name. All of this before the first text is computed.
    """

    def __init__(self, cfg: DictConfig, overrides: Iterable[str] | None = None, *, model: Any = None):
        self.cfg, self.settings = cfg, Settings.of(cfg)
        candidates = lineup(cfg.caches, overrides, COMMAND)
        texts.read(self.settings.text)
        if self.settings.lm_eval:
            harness.require()
        self.model = model = build_model(cfg) if model is None else model
        self.all_presets = cfg.caches in (None, "")
        sketches, skipped = prepare.sketches(candidates, model, self.all_presets)
        reference, notes = next((s for s in sketches if s.exact), None), []
        added = reference is None
        if added:
            reference = prepare.sketch(prepare.free_name(preset(COMMAND, overrides), candidates), model)
            name = reference.candidate.name
            if not reference.exact:
                raise ConfigError(f"no cache is exact, {name!r} neither", fix="an exact one in caches")
            notes.append(f"no cache of the list is exact: {name} is the reference")
            sketches = [reference, *sketches]
        self.reference, self.order = reference.candidate, [sketch.candidate for sketch in sketches]
        self.material = prepare.material(self.settings, model, sketches, notes)
        self.held = hold(self.material.positions, model.vocab_size)
        self.written: list[list[int]] = []  # the reference's greedy texts
        self.bytes = 0.0  # and its bytes per token
        self.found = Found(
            rows=[],
            reference=self.reference.name,
            added=added,
            skipped=skipped,
            model={"name": model.name, "dtype": model.dtype, "device": str(model.device)},
            texts=len(self.material.pieces),
            tokens=sum(len(piece) for piece in self.material.pieces),
            missing=[candidate.name for candidate in self.order],
            notes=notes,
        )

    def run(self, progress: Progress | None = None) -> Found:
        """Computes everything: the reference first, then the others in their order.

        Args:
            progress: makes a context, given a title and a number of tokens; it yields a function that is told how many
                tokens were computed since the last call.
        Raises:
            KVFrameError: a cache fails at its work, by its name. `found` has the rows before it.
        """
        found, noise = self.found, self.settings.noise and self.model.dtype != "float32"
        work = self.material.work(self.settings.warm) * len(self.order) + (self.material.positions if noise else 0)
        if self.settings.noise and not noise:
            found.notes.append("noise=true: the model runs in float32 already, there is nothing to measure")
        with (progress or (lambda title, total: nullcontext(lambda n: None)))("evaluating", work) as self.advance:
            self._take(self._row(self.reference))
            if self.settings.noise:
                found.noise_kl_mean = found.rows[0]["noise_kl_mean"] = self._noise() if noise else None
            for candidate in self.order:
                if candidate is self.reference:
                    continue
                try:
                    self._take(self._row(candidate))
                except KVFrameError as error:
                    if not self.all_presets:
                        raise
                    found.skipped[candidate.name] = str(error)
                    found.missing.remove(candidate.name)
        found.complete = True
        return found

    def _take(self, row: dict[str, Any]) -> None:
        """The row is complete; rows stand in the order of the lineup."""
        found, order = self.found, [candidate.name for candidate in self.order]
        found.rows = sorted([*found.rows, row], key=lambda row: order.index(row["cache"]))
        found.missing.remove(row["cache"])
        if row["nan_positions"]:
            found.notes.append(
                f"{row['cache']}: logits of {row['nan_positions']} of {row['positions']} positions, its own or the "
                "reference's, are not numbers; they count as different"
            )

    def _row(self, candidate: Candidate) -> dict[str, Any]:
        with running(candidate, self.model) as engine:
            try:
                return self._measure(candidate, engine)
            except KVFrameError as error:
                raise error_of(candidate.name, error) from error

    def _measure(self, candidate: Candidate, engine: Engine) -> dict[str, Any]:
        settings, material, is_reference = self.settings, self.material, candidate is self.reference
        limits = Limits.of(candidate.cfg, settings.chunk)
        began = time.perf_counter()
        measured, peaks = runs.forced(engine, material, limits, self.held, self.advance, keep=is_reference)
        seconds = time.perf_counter() - began
        bytes_per_token = runs.token_bytes(engine.cache)
        written = runs.greedy(engine, material, self.advance)
        if is_reference:
            self.written, self.bytes = written, bytes_per_token
        return {
            "cache": candidate.name,
            "exact": bool(engine.cache.exact),
            "reference": is_reference,
            **measured.summary(),
            "greedy_divergence": runs.first_difference(self.written, written),
            "greedy_tokens": material.greedy_tokens,
            **needle.summary(runs.needles(engine, material, limits, self.advance)),
            **(runs.warm(engine, material, limits, self.held, self.advance) if settings.warm else {}),
            "bytes_per_token": bytes_per_token,
            "bytes_ratio": bytes_per_token / self.bytes,
            **peaks,
            "seconds": seconds,
            "kernels": engine.kernels(),
            **(harness.scores(engine, limits, settings.lm_eval, settings.lm_eval_limit) if settings.lm_eval else {}),
        }

    def _noise(self) -> float | None:
        """KL of the reference, as it ran, to the same model in float32, in nats per token."""
        exact = OmegaConf.create(OmegaConf.to_container(self.reference.cfg, resolve=False))
        with open_dict(exact):
            exact.model.dtype = "float32"
        model = build_model(exact)
        with running(Candidate(self.reference.name, exact), model, warm=False) as engine, torch.inference_mode():
            limits = Limits.of(exact, self.settings.chunk)
            measured, _ = runs.forced(engine, self.material, limits, self.held, self.advance, against=True)
        return measured.summary()["kl_mean"]
