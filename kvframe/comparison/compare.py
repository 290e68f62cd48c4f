"""The loop over all of it: look, quality, then run after run, one of each candidate before the second of any."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvframe.comparison import measure, timeline
from kvframe.comparison.candidates import Contender, contenders, sized
from kvframe.comparison.memory import memory
from kvframe.comparison.quality import Quality
from kvframe.comparison.settings import Settings
from kvframe.comparison.skeleton import skeleton
from kvframe.comparison.store import Store, take_over
from kvframe.comparison.summary import NOTHING
from kvframe.config import build_model, build_workload
from kvframe.errors import KVFrameError
from kvframe.lineup import running
from kvframe.workloads.workload import Facts
from kvframe.workloads.workload import measure as size_of

FEW = 256  # tokens of a text that show the losses of a codec; a window wants more
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def compare(
    cfg: DictConfig,
    overrides: Iterable[str] | None = None,
    *,
    model: Any = None,
    path: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compares the candidates that `cfg.caches` names. Answers what results.json holds (see kvframe.comparison).

    Args:
        cfg: `kvframe.config.compose(overrides, "compare")`. It is not changed.
        overrides: what it was composed from; None: those of the running job.
        model: instead of building the one that the config describes.
        path: of results.json; None: nothing is written.
        progress: makes a context, given a title and a number of tokens; it yields a function that is told how many
            tokens were computed since the last call.

    Raises:
        ConfigError: a value that cannot be used, or results that cannot be resumed; CapacityError,
        IncompatibleCacheError, MissingPackageError: a candidate that cannot be built, by its name. All of this before
        the first run. One that fails later is in `skipped`, and the others go on.
    """
    settings, workload = Settings.of(cfg), build_workload(cfg)
    store = Store(path, settings.resume)
    model = build_model(cfg) if model is None else model
    facts = Facts.of(model)
    size = size_of(workload, facts)
    found, skipped, notes = contenders(cfg, overrides, model, size.longest)
    results = skeleton(cfg, settings, workload, size, model, found)
    results["skipped"], results["notes"] = skipped, notes
    if store.before is not None:
        take_over(store.before, results, store.path)
    _Comparison(settings, workload, facts, size, model, found, results, store).run(progress or _silent)
    if store.kept is not None:
        results["notes"].append(f"{path} had results of another comparison, which lie in {store.kept.name} now")
        store.write(results)
    return results


def _silent(title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda n: None)


class _Comparison:
    """Fills `results`, and writes them whenever something was finished."""

    def __init__(self, settings, workload, facts, size, model, found, results, store):
        self.settings, self.workload, self.facts, self.size = settings, workload, facts, size
        self.model, self.found, self.results, self.store = model, found, results, store
        self.told = 0

    def run(self, progress: Progress) -> None:
        self._timelines()
        quality = self._quality()
        todo = self._left()
        work = self.size.output_tokens * len(todo)
        if quality is not None:
            work += quality.positions * len(self.found)
        self.store.write(self.results)
        with progress("comparing", work) as advance:
            self._memory()
            if quality is not None:
                self._measure_quality(quality, advance)
                if self._too_short(quality):
                    self.results["quality"].clear()
                    self._measure_quality(self._quality_of(self.size.longest), advance)
            for contender, repetition in todo:
                if contender.name not in self.results["skipped"]:
                    self._run(contender, repetition, advance)
        self.results["complete"] = True
        self.store.write(self.results)

    # -- what is measured once -------------------------------------------------------------------------------

    def _timelines(self) -> None:
        if self.settings.timeline is None:
            return
        stops = timeline.stops(*self.settings.timeline)
        for contender in self.found:
            line = _timeline(contender, self.model, stops)
            if line is not None:
                self.results["timeline"][contender.name] = line

    def _memory(self) -> None:
        known = self.results["memory"]
        for contender in self.found:
            if not self.settings.profile or contender.name in known:
                continue
            try:
                seen = memory(contender, self.model, self.workload, self.facts)
            except Exception as error:
                self._fail(contender, error)
                continue
            if seen is not None:
                known[contender.name] = seen
                self.store.write(self.results)

    def _quality(self) -> Quality | None:
        """The reference's text, when somebody has not been held against it yet."""
        known = self.results["quality"]
        if self.settings.quality_tokens == 0 or all(contender.name in known for contender in self.found):
            return None
        measured = max((found["positions"] + 1 for found in known.values()), default=FEW)
        return self._quality_of(self.settings.quality_tokens or measured)

    def _quality_of(self, asked: int) -> Quality:
        limits = [contender.asked.cfg.engine.max_len for contender in self.found if contender.baseline is None]
        tokens = min(limit for limit in (*limits, self.model.max_len, asked) if limit is not None)
        if tokens < asked:
            self._note(f"quality: {tokens} tokens instead of {asked}, no longer text fits all")
        return Quality(self.model, self.facts, self.settings.text, tokens)

    def _too_short(self, quality: Quality) -> bool:
        """Does a longer text tell more, when nobody chose its length?"""
        known = self.results["quality"]
        blind = [c for c in self.found if not c.exact and c.name in known and known[c.name]["kl_mean"] < NOTHING]
        return bool(blind) and self.settings.quality_tokens is None and quality.positions + 1 < self.size.longest

    def _measure_quality(self, quality: Quality, advance: Callable[[int], None]) -> None:
        known = self.results["quality"]
        exact = [c for c in self.found if c.baseline is None and c.exact]  # all have the same logits
        reference = next((c for c in exact if c.name == self.results["reference"]), exact[0])
        order = [reference, *(c for c in self.found if c is not reference)]
        for contender in order:
            if contender is reference or contender.name not in known:
                try:
                    known[contender.name] = quality.of(contender, advance, keep=contender is reference)
                    self._note_length(contender, quality.positions + 1)
                except Exception as error:
                    if contender is reference:
                        raise
                    self._fail(contender, error)
                self.store.write(self.results)

    def _note_length(self, contender: Contender, tokens: int) -> None:
        """A text that is too short to show what is lost must not pass for nothing lost."""
        kl, longest = self.results["quality"][contender.name]["kl_mean"], self.size.longest
        if not contender.exact and kl is not None and kl < NOTHING and tokens < longest:
            self._entry(contender)["notes"].append(
                f"its KL is of {tokens} tokens, which show no difference; requests have up to {longest} "
                f"(quality_tokens={longest})"
            )

    # -- runs ------------------------------------------------------------------------------------------------

    def _left(self) -> list[tuple[Contender, int]]:
        """The runs that are not there yet, in the order of their turn."""
        done = {(run["cache"], run["repetition"]) for run in self.results["runs"]}
        every = [(c, repetition) for repetition in range(self.settings.repeat) for c in self.found]
        return [(c, repetition) for c, repetition in every if (c.name, repetition) not in done]

    def _run(self, contender: Contender, repetition: int, advance: Callable[[int], None]) -> None:
        told = 0

        def count(n: int) -> None:
            nonlocal told
            told += n
            advance(n)

        try:
            made = measure.run(contender, self.model, self.workload, self.facts, count)
        except Exception as error:
            self._fail(contender, error)
            self.store.write(self.results)
            return
        advance(max(self.size.output_tokens - told, 0))
        entry = self._entry(contender)
        self._note_work(entry, made)
        row = {"cache": contender.name, "repetition": repetition, "fingerprint": entry["fingerprint"]}
        self.results["runs"].append({**row, "tokens_hash": made.tokens_hash, **made.figures})
        self.results["outputs"].setdefault(contender.name, made.kept())
        self.store.write(self.results)

    def _note_work(self, entry: dict[str, Any], made: measure.Run) -> None:
        """What is told of a candidate that did not do all of the work."""
        notes, ran, refused = entry["notes"], made.figures["requests"], made.figures["refused"]
        if ran < self.size.requests:
            notes.append(f"ran {ran} of {self.size.requests} requests")
        if refused:
            notes.append(f"{refused} of {ran} requests did not fit")
        entry["notes"] = list(dict.fromkeys(notes))

    def _entry(self, contender: Contender) -> dict[str, Any]:
        return next(entry for entry in self.results["candidates"] if entry["name"] == contender.name)

    def _fail(self, contender: Contender, error: Exception) -> None:
        if os.environ.get("KVFRAME_DEBUG") == "1":
            raise error
        text = str(error) if isinstance(error, KVFrameError) else f"{type(error).__name__}: {error}"
        self.results["skipped"][contender.name] = text

    def _note(self, text: str) -> None:
        if text not in self.results["notes"]:
            self.results["notes"].append(text)


def _timeline(contender: Contender, model: Any, stops: list[int]) -> dict[str, list[int]] | None:
    if contender.baseline is not None:
        stops = timeline.evenly(stops)
        points = contender.baseline.timeline(model, stops)
        return points and timeline.columns([(n, *point, 0) for n, point in zip(stops, points)])
    limits = [model.max_len, contender.asked.cfg.engine.max_len]
    stops = [stop for stop in stops if all(limit is None or stop <= limit for limit in limits)]
    if not stops:
        return None
    with running(sized(contender.asked, max(contender.longest, stops[-1])), model, warm=False) as engine:
        return timeline.follow(engine.cache, stops)
