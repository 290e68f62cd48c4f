"""`kvframe compare`: caches and transformers baselines side by side. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvframe.errors import ConfigError, MissingPackageError
from kvframe.jobs import Run
from kvframe.report import console, figure_class, progress, save_figure, write_text

REPORT = "report.html"
WIDTH = 100  # columns of the table, where the terminal has as many


def run(cfg: DictConfig, job: Run) -> int:
    """Compares the lineup. Answers 1 when some of it failed."""
    path = _results(cfg.out, job)
    figure = _figure() if path is not None else None
    from kvframe.comparison.compare import compare

    try:
        results = compare(cfg, path=path, progress=progress)
    except KeyboardInterrupt:
        if path is not None and path.exists():
            so_far = json.loads(path.read_text(encoding="utf-8"))
            _show(so_far)
            _write(path, so_far, figure)
            print("stopped: these are the results so far; resume=true goes on", file=sys.stderr)
        raise
    _show(results)
    for row in results["rows"]:
        if row["note"]:
            print(f"note: {row['cache']}: {row['note']}", file=sys.stderr)
    for note in results["notes"]:
        print(f"note: {note}", file=sys.stderr)
    for name, reason in results["skipped"].items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if path is not None:
        _write(path, results, figure)
    failed = {candidate["name"] for candidate in results["candidates"]} & results["skipped"].keys()
    return 1 if failed else 0  # presets that cannot be built here were not asked for by name


def _show(results: dict[str, Any]) -> None:
    from kvframe.comparison.summary import row_table

    show = console()
    width = min(WIDTH, show.width)
    show.print(row_table(results, results["rows"], width), width=width)


def _results(out: str | None, job: Run) -> Path | None:
    """Where results.json goes: `out` is a folder."""
    if not out:
        return None
    if Path(out).suffix.lower() in (".json", ".csv", ".html"):
        raise ConfigError(f"out={out} names a file; the results of a comparison are several", fix="out=results/")
    return job.out(str(Path(out) / "results.json"), example="results/")


def _figure() -> Any:
    """matplotlib's Figure; None, and a word about it, where there is none."""
    try:
        return figure_class()
    except MissingPackageError as error:
        print(f"note: the report will have no pictures: {error}", file=sys.stderr)
        return None


def _write(path: Path, results: dict[str, Any], figure: Any) -> None:
    """Pictures and the report beside results.json, and where they are."""
    from kvframe.comparison.html import report
    from kvframe.comparison.pictures import pictures

    figures = {} if figure is None else pictures(results, figure)
    for name, picture in figures.items():
        save_figure(picture, path.with_name(f"{name}.png"))
    write_text(path.with_name(REPORT), report(results, figures))
    files = [path.name, path.with_suffix(".csv").name, *(f"{name}.png" for name in figures)]
    print(f"written: {path.with_name(REPORT)}, and beside it {', '.join(files)}", file=sys.stderr)
