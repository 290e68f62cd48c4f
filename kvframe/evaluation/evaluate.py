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
from kvframe.evaluation import harness, needle, runs, texts
from kvframe.evaluation.measures import hold
from kvframe.evaluation.settings import Settings
from kvframe.evaluation.teacher import Limits
from kvframe.lineup import Candidate, lineup, preset, running
from kvframe.text import TextCodec

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
COMMAND = "evaluate"


@dataclass
class Found:
    """What an evaluation answers.

    Attributes:
        rows: one per cache, in the order of the lineup; `reference` is the name of the one that the others are held
            against, `added` says that nobody asked for it.
        skipped: name -> reason, of presets that cannot be built here (only when all presets were asked for).
        noise_kl_mean: KL of the reference to the same model in float32, nats per token; None: not measured.
        notes: what a reader should know.
        model: name, dtype and device; texts, tokens: how many were computed.
    """

    rows: list[dict[str, Any]]
    reference: str
    added: bool
    skipped: dict[str, str]
    model: dict[str, str]
    texts: int
    tokens: int
    noise_kl_mean: float | None = None
    notes: list[str] = field(default_factory=list)


def evaluate(
    cfg: DictConfig,
    overrides: Iterable[str] | None = None,
    *,
    model: Any = None,
    progress: Progress | None = None,
) -> Found:
    """Evaluates the caches that `cfg.caches` names.

    Args:
        cfg: `kvframe.config.compose(overrides, "evaluate")`. It is not changed.
        overrides: what it was composed from; None: those of the running job.
        model: instead of building the one that the config describes.
        progress: makes a context, given a title and a number of tokens; it yields a function that is told how many
            tokens were computed since the last call.

    Raises:
        ConfigError: a value that cannot be used; CapacityError, IncompatibleCacheError, MissingPackageError: a cache
        that cannot be built, by its name. All of this before the first text is computed.
    """
    settings, candidates = Settings.of(cfg), lineup(cfg.caches, overrides, COMMAND)
    texts.read(settings.text)
    if settings.lm_eval:
        harness.require()
    model = build_model(cfg) if model is None else model
    sketches, skipped = _sketches(candidates, model, all_presets=cfg.caches in (None, ""))
    reference = next((s for s in sketches if s.exact), None)
    added = reference is None
    if added:
        reference = _sketch(_free_name(preset(COMMAND, overrides), candidates), model)
        if not reference.exact:
            raise ConfigError(f"no cache is exact, {reference.candidate.name!r} neither", fix="an exact one in caches")
    notes = [f"no cache of the list is exact: {reference.candidate.name} is the reference"] if added else []
    order = [reference, *sketches] if added else sketches
    material = _material(settings, model, order)
    work = material.work(settings.warm) * len(order) + (material.positions if settings.noise else 0)
    with (progress or (lambda title, total: nullcontext(lambda n: None)))("evaluating", work) as advance:
        job = _Job(model, settings, material, advance)
        rows = {reference.candidate.name: job.row(reference.candidate, is_reference=True)}
        noise = job.noise(cfg, reference.candidate, notes) if settings.noise else None
        if settings.noise:
            rows[reference.candidate.name]["noise_kl_mean"] = noise
        for sketch in order:
            if sketch is not reference:
                rows[sketch.candidate.name] = job.row(sketch.candidate)
    return Found(
        rows=[rows[sketch.candidate.name] for sketch in order],
        reference=reference.candidate.name,
        added=added,
        skipped=skipped,
        model={"name": model.name, "dtype": model.dtype, "device": str(model.device)},
        texts=len(material.pieces),
        tokens=sum(len(piece) for piece in material.pieces),
        noise_kl_mean=noise,
        notes=notes,
    )


# -- before the work -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sketch:
    """What is asked of a candidate before anything is computed: is it exact, and its longest text."""

    candidate: Candidate
    exact: bool
    limit: int


def _sketch(candidate: Candidate, model: Any) -> _Sketch:
    with running(candidate, model, warm=False) as engine:
        return _Sketch(candidate, bool(engine.cache.exact), engine.limit)


def _sketches(candidates, model, all_presets: bool) -> tuple[list[_Sketch], dict[str, str]]:
    """Builds each cache once, so that one that cannot be built is known before the others have computed for minutes."""
    found, skipped = [], {}
    for candidate in candidates:
        try:
            found.append(_sketch(candidate, model))
        except KVFrameError as error:
            if not all_presets:
                raise
            skipped[candidate.name] = str(error)
    if not found:
        raise ConfigError(f"none of the presets can be built: {'; '.join(skipped.values())}", fix="caches=[NAME]")
    return found, skipped


def _free_name(candidate: Candidate, others: list[Candidate]) -> Candidate:
    taken = candidate.name in {other.name for other in others}
    return Candidate(f"{candidate.name} (reference)", candidate.cfg) if taken else candidate


def _material(settings: Settings, model: Any, sketches: list[_Sketch]) -> runs.Material:
    """Texts, prompts and haystacks, none longer than the least of the caches takes."""
    codec = TextCodec(model.tokenizer, vocab_size=model.vocab_size)
    tokens = texts.tokens_of(settings.text, codec, settings.max_tokens * settings.texts)
    pieces = texts.split(tokens, settings.max_tokens, settings.texts)
    least = min(sketches, key=lambda sketch: sketch.limit)
    for key, n in [("max_tokens", len(pieces[0])), *(("needle.lengths", n) for n in settings.lengths)]:
        if n > least.limit:
            smaller = f"{key}={least.limit}" if key == "max_tokens" else f"{key}=[{least.limit}]"
            raise ConfigError(
                f"{key}: {n} tokens are more than the {least.limit} that the cache {least.candidate.name!r} of this "
                "model takes",
                options=[f"2 .. {least.limit}"],
                fix=f"{smaller}, or a larger engine.max_len or cache.memory where the model allows it",
            )
    cells = needle.cells(list(settings.lengths), list(settings.depths), tokens, codec)
    material = runs.Material(tuple(pieces), settings.decode_tokens, 0, tuple(cells))
    room = least.limit - max(len(prompt) for prompt in material.prompts)
    return runs.Material(material.pieces, material.decode, max(min(settings.greedy_tokens, room), 0), material.cells)


# -- the work ------------------------------------------------------------------------------------------------


class _Job:
    """One cache after another over the same material. Keeps the reference's logits and texts."""

    def __init__(self, model, settings: Settings, material: runs.Material, advance):
        self.model, self.settings, self.material, self.advance = model, settings, material, advance
        self.held = hold(material.positions, model.vocab_size)
        self.texts: list[list[int]] = []
        self.bytes = 0.0

    def row(self, candidate: Candidate, is_reference: bool = False) -> dict[str, Any]:
        settings, material = self.settings, self.material
        limits = Limits.of(candidate.cfg, settings.chunk)
        with running(candidate, self.model) as engine:
            began = time.perf_counter()
            measured, peaks = runs.forced(engine, material, limits, self.held, self.advance, keep=is_reference)
            seconds = time.perf_counter() - began
            bytes_per_token = runs.token_bytes(engine.cache)
            written = runs.greedy(engine, material, self.advance)
            if is_reference:
                self.texts, self.bytes = written, bytes_per_token
            return {
                "cache": candidate.name,
                "exact": bool(engine.cache.exact),
                "reference": is_reference,
                **measured.summary(),
                "greedy_divergence": runs.first_difference(self.texts, written),
                "greedy_tokens": material.greedy_tokens,
                **needle.summary(runs.needles(engine, material, limits, self.advance)),
                **(runs.warm(engine, material, limits, self.held, self.advance) if settings.warm else {}),
                "bytes_per_token": bytes_per_token,
                "bytes_ratio": bytes_per_token / self.bytes,
                **peaks,
                "seconds": seconds,
                "kernels": _kernels(engine),
                **(
                    harness.scores(engine, limits, settings.lm_eval, settings.lm_eval_limit) if settings.lm_eval else {}
                ),
            }

    def noise(self, cfg: DictConfig, reference: Candidate, notes: list[str]) -> float | None:
        """KL of the reference, as it ran, to the same model in float32, in nats per token."""
        if self.model.dtype == "float32":
            notes.append("noise=true: the model runs in float32 already, there is nothing to measure")
            return None
        exact = OmegaConf.create(OmegaConf.to_container(reference.cfg, resolve=False))
        with open_dict(exact):
            exact.model.dtype = "float32"
        model = build_model(exact)
        with running(Candidate(reference.name, exact), model, warm=False) as engine, torch.inference_mode():
            limits = Limits.of(exact, self.settings.chunk)
            measured, _ = runs.forced(engine, self.material, limits, self.held, self.advance, against=True)
        return measured.summary()["kl_mean"]


def _kernels(engine: Engine) -> dict[str, int]:
    """Kernel name -> number of layers that it serves."""
    found: dict[str, int] = {}
    for layer in getattr(getattr(engine.cache, "storage", None), "layers", ()):
        found[layer.kernel.name] = found.get(layer.kernel.name, 0) + 1
    return found
