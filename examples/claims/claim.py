"""What every example of this folder does at its end: a table of claimed against measured, a picture, and a record.

    python examples/claims/no_cache.py [--out FOLDER]

The table goes to stdout. FOLDER (default: claims) gets NAME.png and NAME.json; `python examples/claims/all.py` runs
every example and writes one page of all records.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from kvframe.report import table, versions, write_json

MIB, GIB = 2**20, 2**30


class Claim:
    """One claim of the field, and what was measured of it.

    Args:
        title: the claim in one sentence. options: defaults of further command line options, by name.
    """

    def __init__(self, title: str, **options):
        script = Path(sys.argv[0])
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--out", default="claims", help="folder for the picture and the record")
        for name, default in options.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
        self.options = parser.parse_args()
        self.name, self.title, self.folder = script.stem, title, Path(self.options.out)
        self.rows: list[dict] = []
        self.figure = Figure(figsize=(8, 4.6), layout="constrained")

    def row(self, what: str, claimed: str, measured: str, verdict: str) -> None:
        """A line of the table. verdict: "holds", "does not hold", or what is to be said instead."""
        self.rows.append({"what": what, "claimed": claimed, "measured": measured, "verdict": verdict})

    def axes(self, xlabel: str, ylabel: str):
        """The axes of a picture with one panel."""
        axes = self.figure.add_subplot()
        axes.set_title(self.title, fontsize=9, wrap=True)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.3)
        return axes

    def finish(self, *notes: str) -> None:
        """Shows the table and writes picture and record."""
        cells = [list(row.values()) for row in self.rows]
        Console(width=100, markup=False, highlight=False).print(
            table(cells, ["what", "claimed", "measured", "verdict"], title=self.title)
        )
        for note in notes:
            print(note)
        self.folder.mkdir(parents=True, exist_ok=True)
        picture = self.folder / f"{self.name}.png"
        self.figure.savefig(picture, dpi=120)
        record = {"claim": self.title, "rows": self.rows, "notes": notes, "versions": versions()}
        options = {name: value for name, value in vars(self.options).items() if name != "out"}
        write_json(self.folder / f"{self.name}.json", {**record, "options": options})
        print(f"written: {picture}", file=sys.stderr)


def verdict(true: bool) -> str:
    return "holds" if true else "does not hold"


def interleaved(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs each contender once per round, so that a busy moment hits all of them; answers what each run returned."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            found[name].append(run())
    return found


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


median = statistics.median


def decode_step(engine, requests: list) -> float:
    """Runs the requests; answers the median seconds of the steps in which each of them got one token and no prompt was
    computed."""
    times, computed = [], 0
    steps = engine.steps(requests)
    while True:
        began = time.perf_counter()
        if next(steps, None) is None:
            if not times:
                raise SystemExit(f"no step decoded all {len(requests)} requests together: more --tokens")
            return median(times)
        if engine.meter.computed - computed == len(requests):
            times.append(time.perf_counter() - began)
        computed = engine.meter.computed
