"""From runs to rows: medians and spread, the best of each figure, the Pareto front; and the table of a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvframe.comparison.quality import token_match
from kvframe.report import human_bytes, human_seconds, table

FRONT = "◆"
NOTHING = 1e-9  # nats; a KL below it is rounding


@dataclass(frozen=True)
class Column:
    """A figure: title and unit for people, which is best ("min", "max" or None), has it a spread, and what is it."""

    title: str
    unit: str
    best: str | None
    spread: bool
    what: str


COLUMNS = {
    "output_tokens_per_s": Column("tok/s", "tokens/s", "max", True, "output tokens per second, all requests together"),
    "seconds": Column("took", "s", "min", True, "from the first request to the last token"),
    "ttft_s_p50": Column("TTFT p50", "s", "min", True, "time to the first token, median over requests"),
    "ttft_s_p99": Column("TTFT p99", "s", "min", True, "time to the first token, 99th percentile"),
    "itl_s_p50": Column("ITL p50", "s", "min", True, "time between two tokens of a request, median"),
    "itl_s_p99": Column("ITL p99", "s", "min", True, "time between two tokens of a request, 99th percentile"),
    "kv_bytes_peak": Column("KV peak", "bytes", "min", False, "most bytes that requests held, whole blocks and tails"),
    "kv_bytes_reserved": Column("KV reserved", "bytes", "min", False, "bytes of held blocks, mean over time"),
    "kv_bytes_used": Column("KV used", "bytes", None, False, "bytes of live tokens, mean over time"),
    "kv_bytes_tail": Column("KV tails", "bytes", None, False, "bytes of full-precision tails, mean over time"),
    "kv_bytes_pool": Column("KV pool", "bytes", None, False, "bytes of the tensors that were allocated"),
    "bytes_per_token": Column("B/token", "bytes", "min", False, "bytes of one token over all layers"),
    "utilization": Column("used", "share", "max", False, "used / reserved, mean over time"),
    "waste": Column("waste", "share", "min", False, "1 - used / reserved, mean over time"),
    "hit_rate": Column("hits", "share", "max", False, "prompt tokens that needed no compute"),
    "prompt_tokens": Column("prompt tokens", "tokens", None, False, "of all requests"),
    "output_tokens": Column("output tokens", "tokens", None, False, "of all requests"),
    "computed_tokens": Column("computed", "tokens", "min", False, "tokens that went through the model, padding too"),
    "cached_tokens": Column("cached", "tokens", None, False, "prompt tokens that needed no compute"),
    "steps": Column("steps", "", None, False, "forwards of the model"),
    "requests": Column("requests", "", None, False, "that were run"),
    "refused": Column("refused", "", "min", False, "requests that never fit"),
    "preemptions": Column("preemptions", "", "min", False, "times that a request lost its cache"),
    "evictions": Column("evictions", "", None, False, "cached blocks that made room"),
    "copies": Column("copies", "", None, False, "blocks that were copied"),
    "weights_bytes": Column("weights", "bytes", None, False, "parameters and buffers of the model"),
    "kl_mean": Column("KL", "nats", "min", False, "KL to the reference per token, mean"),
    "kl_p99": Column("KL p99", "nats", "min", False, "KL to the reference per token, 99th percentile"),
    "top1": Column("top-1", "share", "max", False, "tokens whose best successor is the reference's"),
    "token_match": Column("match", "share", "max", False, "output tokens before the first that differs"),
}
QUALITY = ("kl_mean", "kl_p99", "top1")
OF_QUALITY = (*QUALITY, "token_match")
FRONT_OF = ("kv_bytes_peak", "output_tokens_per_s", "kl_mean")


def columns() -> dict[str, dict[str, Any]]:
    return {key: asdict(column) for key, column in COLUMNS.items()}


def rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per candidate that has a run (see kvframe.comparison)."""
    outputs, found = results["outputs"], []
    for candidate in results["candidates"]:
        runs = [run for run in results["runs"] if run["cache"] == candidate["name"]]
        if not runs:
            continue
        row = {"cache": candidate["name"], "kind": candidate["kind"], "exact": candidate["exact"]}
        row |= {"reference": candidate["reference"], "runs": len(runs), "note": "; ".join(candidate["notes"])}
        row |= {"pareto": False, "best": ""}
        quality = results["quality"].get(candidate["name"], {})
        once = {key: quality.get(key) for key in QUALITY}
        once["token_match"] = token_match(outputs.get(results["reference"]), outputs.get(candidate["name"]))
        for key, column in COLUMNS.items():
            if key in once:
                row[key] = once[key]
                continue
            values = [run[key] for run in runs if run[key] is not None]
            row[key] = _median(values)
            if column.spread:
                row |= {f"{key}_min": min(values, default=None), f"{key}_max": max(values, default=None)}
        found.append(row)
    whole = max((row["requests"] for row in found), default=0)
    same_work = [row for row in found if row["requests"] == whole and not row["refused"]]
    for row in front(same_work):
        row["pareto"] = True
    for row in found:
        row["best"] = ",".join(key for key in COLUMNS if key in row and row in best(key, same_work))
    return found


def _median(values: Sequence[float]) -> float | None:
    if not values:
        return None
    middle = statistics.median(values)
    return int(middle) if all(isinstance(value, int) for value in values) and middle == int(middle) else middle


def best(key: str, among: Sequence[dict]) -> list[dict]:
    """The rows that are the best in a figure: of quality among those that are not exact, of memory among those that
    keep any. None where all are the same."""
    column = COLUMNS[key]
    if column.best is None:
        return []
    if key in OF_QUALITY:  # a text too short to show what is lost is no merit
        among = [row for row in among if not row["exact"] and (row["kl_mean"] is None or row["kl_mean"] >= NOTHING)]
    if key in ("kv_bytes_peak", "kv_bytes_reserved"):
        among = [row for row in among if row["kv_bytes_peak"]]
    known = [row[key] for row in among if row[key] is not None]
    if len(set(known)) < 2:
        return []
    top = min(known) if column.best == "min" else max(known)
    return [row for row in among if row[key] == top]


def front(among: Sequence[dict]) -> list[dict]:
    """The rows that no other beats: as good in KV peak, tokens/s and KL, and better in one. Exact caches have no KL:
    what is measured of them is rounding. Where KL was not measured, the first two decide."""
    points = {id(row): _costs(row) for row in among}
    known = [row for row in among if None not in points[id(row)]]
    beats = lambda a, b: all(x <= y for x, y in zip(a, b)) and a != b
    return [row for row in known if not any(beats(points[id(other)], points[id(row)]) for other in known)]


def _costs(row: dict) -> tuple[float | None, ...]:
    speed, memory, kl = row["output_tokens_per_s"], row["kv_bytes_peak"], row["kl_mean"]
    return memory, None if speed is None else -speed, 0.0 if row["exact"] or kl is None else kl


# -- the table -----------------------------------------------------------------------------------------------

SHOWN = (
    "output_tokens_per_s",
    "ttft_s_p50",
    "itl_s_p50",
    "kv_bytes_peak",
    "bytes_per_token",
    "waste",
    "hit_rate",
    "kl_mean",
)


def row_table(results: dict[str, Any], found: Sequence[dict]):
    """One line per candidate, in 100 columns. All else is in the files."""
    most = max((row["runs"] for row in found), default=0)
    spread = most > 1
    cells = []
    for row in found:
        name = f"{row['cache']} (reference)" if row["reference"] and "(reference)" not in row["cache"] else row["cache"]
        marked = [_cell(key, row, spread) + ("*" if key in row["best"].split(",") else " ") for key in SHOWN]
        cells.append([name, *marked, FRONT if row["pareto"] else ""])
    names = [COLUMNS[key].title for key in SHOWN]
    model, work = results["model"], results["workload"]
    title = (
        f"{model['name']}, {model['dtype']}, {results['machine']['threads']} threads; {work['what']}; "
        f"{work['prompt_tokens']:,} + {work['output_tokens']:,} tokens; median of {most}"
    )
    caption = (
        f"* best of a column (KL: of caches that are not exact); {FRONT} Pareto front: no other is as good in KV peak, "
        "tok/s and KL and better in one."
    )
    if spread:
        caption += " ± is half of max - min."
    made = table(cells, ["cache", *names, FRONT], title=title, right=names, whole=names)
    made.caption, made.caption_justify = caption, "left"
    made.padding = (0, 1, 0, 0)
    return made


def _cell(key: str, row: dict, spread: bool) -> str:
    value = row[key]
    if value is None:
        return "-"
    if key == "output_tokens_per_s":
        half = (row[f"{key}_max"] - row[f"{key}_min"]) / 2
        return f"{value:,.1f} ±{half:,.1f}" if spread else f"{value:,.1f}"
    if key.endswith("_s_p50"):
        return human_seconds(value)
    if key == "kv_bytes_peak":
        return human_bytes(value) if value else "0"
    if key == "bytes_per_token":
        return f"{value:,.0f}"
    if key == "kl_mean":
        return f"{value:.1e}" if value else "0"
    return f"{value:.1%}"
