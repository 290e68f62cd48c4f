"""`kvframe compare`: caches and transformers baselines side by side. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from kvframe.errors import ConfigError
from kvframe.jobs import Run
from kvframe.report import console, progress


def run(cfg: DictConfig, job: Run) -> int:
    """Compares the lineup. Answers 1 when some of it had to be left out."""
    path = _results(cfg.out, job)
    from kvframe.comparison.compare import compare
    from kvframe.comparison.summary import row_table

    try:
        results = compare(cfg, path=path, progress=progress)
    except KeyboardInterrupt:
        if path is not None and path.exists():
            print(f"stopped; results so far: {path.parent}; resume=true goes on", file=sys.stderr)
        raise
    console().print(row_table(results, results["rows"]))
    for row in results["rows"]:
        if row["note"]:
            print(f"note: {row['cache']}: {row['note']}", file=sys.stderr)
    for note in results["notes"]:
        print(f"note: {note}", file=sys.stderr)
    for name, reason in results["skipped"].items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if path is not None:
        print(f"written: {path} and {path.with_suffix('.csv').name}", file=sys.stderr)
    return 1 if results["skipped"] else 0


def _results(out: str | None, job: Run) -> Path | None:
    """Where results.json goes: `out` is a folder."""
    if not out:
        return None
    if Path(out).suffix.lower() in (".json", ".csv", ".html"):
        raise ConfigError(f"out={out} names a file; the results of a comparison are several", fix="out=results/")
    return job.out(str(Path(out) / "results.json"))
