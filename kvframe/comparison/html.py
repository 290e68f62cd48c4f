"""The report of a comparison: one HTML file that can be mailed. Pictures are in it, and nothing is fetched."""

from __future__ import annotations

import base64
import io
from importlib import resources
from typing import Any

from kvframe.comparison.summary import FRONT
from kvframe.report import human_bytes, human_seconds

TITLES = {
    "tradeoff": "Memory against throughput",
    "timeline": "One request alone, token by token",
    "latency": "Latency",
    "quality": "Quality against bytes",
}
COUNTS = ("requests", "prompt_tokens", "output_tokens", "weights_bytes")  # the same for all: said above the table


def report(results: dict[str, Any], figures: dict[str, Any]) -> str:
    """The page.

    Args:
        results: as kvframe.comparison describes them. figures: name -> matplotlib figure (see pictures.py).
    """
    from jinja2 import Environment

    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    return page.render(
        results=results,
        model=results["model"],
        work=results["workload"],
        front=FRONT,
        headline=headline(results),
        columns=[(key, column) for key, column in results["columns"].items() if _told(results, key)],
        rows=[_row(row, results) for row in results["rows"]],
        memories=[(name, _memory(found)) for name, found in results["memory"].items()],
        pictures=[(TITLES[name], _embedded(figure)) for name, figure in figures.items()],
        weights=human_bytes(results["model"]["weights_bytes"]),
        memory=human_bytes(results["machine"]["memory_bytes"]),
    )


def headline(results: dict) -> list[str]:
    """What the comparison says, in a few sentences."""
    rows = results["rows"]
    told = []
    for key, sentence in (
        ("output_tokens_per_s", "{} the fastest: {} output tokens per second."),
        ("kv_bytes_peak", "{} the smallest: {} of KV memory at most."),
        ("kl_mean", "{} the nearest to the exact cache of those that are not exact: KL {}."),
    ):
        found = [row for row in rows if key in row["best"].split(",")]
        if found:
            value = written(key, found[0][key], results)
            names = " and ".join(row["cache"] for row in found)
            told.append(sentence.format(f"{names} {'was' if len(found) == 1 else 'were'}", value))
        elif key == "output_tokens_per_s" and len(rows) > 1:
            told.append("The runs do not tell which was the fastest: the ranges of output tokens per second overlap.")
    beaten = [row["cache"] for row in rows if row["pareto"]]
    if beaten:
        told.append(f"On the Pareto front of KV peak, throughput and KL: {', '.join(beaten)}.")
    return told


def _told(results: dict, key: str) -> bool:
    """Is a figure worth a column? One that nobody has, or all have as 0, is not; it stays in the files."""
    return key not in COUNTS and any(row.get(key) for row in results["rows"])


def _row(row: dict, results: dict) -> dict[str, Any]:
    best = row["best"].split(",")
    cells = {}
    for key, column in results["columns"].items():
        spread = None
        if column["spread"] and row["runs"] > 1 and row[key] is not None:
            spread = " – ".join(written(key, row[f"{key}_{end}"], results) for end in ("min", "max"))
        cells[key] = {"text": written(key, row[key], results), "sort": row[key], "best": key in best, "spread": spread}
    return {**row, "cells": cells}


def _memory(found: dict[str, Any]) -> list[str]:
    """The cells of kvframe.memprofile's report, in the order of the titles in report.html."""

    def dtypes(sizes: dict[str, int]) -> str:
        return ", ".join(f"{human_bytes(size)} {dtype}" for dtype, size in sizes.items()) or "–"

    cells = [dtypes(found["weights"]), human_bytes(found["weight_copies"]), dtypes(found["kv_allocated"])]
    cells.append(f"{human_bytes(found['activations_peak'])} in {found['activations_tokens']} tokens")
    cells.append(human_bytes(found["total"]))
    return cells if "allocator" not in found else [*cells, human_bytes(found["allocator"]["peak_allocated"])]


def written(key: str, value: Any, results: dict) -> str:
    """A figure as people read it."""
    unit = results["columns"][key]["unit"]
    if value is None:
        return "–"
    if unit == "bytes":
        return human_bytes(value)
    if unit == "s":
        return human_seconds(value)
    if unit == "share":
        return f"{value:.1%}"
    if unit == "nats":
        return f"{value:.1e}" if value else "0"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _embedded(figure) -> str:
    """A figure as the address of an image that lies in the page itself."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
