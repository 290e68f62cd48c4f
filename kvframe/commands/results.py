"""Where the results of a command go that writes rows (`out=`) and draws them (`plot=`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from kvframe.jobs import Run
from kvframe.report import PICTURES, check_ending, figure_class

ENDINGS = {"out": (".json", ".csv"), "plot": PICTURES}


def places(cfg: DictConfig, job: Run) -> tuple[Path | None, Path | None, Any]:
    """`(out, plot, matplotlib's Figure)`, None for what nobody asked for; wrong ones are refused before the work.

    Raises: ConfigError: an ending that is not known, a place that cannot be written. MissingPackageError: a picture is
        asked for and matplotlib is not installed.
    """
    for key, endings in ENDINGS.items():
        check_ending(key, cfg[key], endings)
    plot, out = job.out(cfg.plot, "plot"), job.out(cfg.out)
    return out, plot, figure_class() if plot is not None else None
