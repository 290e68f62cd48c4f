"""From runs to rows: medians and spread, the best of each figure, the Pareto front; and the table of a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvframe.comparison.quality import token_match
from kvframe.report import fitted, human_bytes, human_seconds, table

FRONT = "◆"
NOTHING = 1e-9  # nats; a KL below it is rounding
SAME = 0.005  # figures that differ by less are one


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
    "utilization": Column("used", "share", "max", False, "live bytes / bytes of held blocks and tails, mean over time"),
    "waste": Column("waste", "share", "min", False, "1 - used, mean over time"),
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
    if key in OF_QUALITY:
        among = [row for row in among if not row["exact"] and not unseen(row)]
    if key in ("kv_bytes_peak", "kv_bytes_reserved"):
        among = [row for row in among if row["kv_bytes_peak"]]
    known = [row[key] for row in among if row[key] is not None]
    if not known:
        return []
    top = min(known) if column.best == "min" else max(known)
    tops = [row for row in among if row[key] is not None and (row[key] == top or _near(key, row, top, among))]
    return tops if len(tops) < len(known) else []


def _near(key: str, row: dict, top: float, among: Sequence[dict]) -> bool:
    """Is the figure the best one as far as the runs can tell?"""
    if f"{key}_min" not in row or row["runs"] < 2:
        return abs(row[key] - top) <= SAME * abs(top)
    return any(
        other[key] == top and row[f"{key}_min"] <= other[f"{key}_max"] and other[f"{key}_min"] <= row[f"{key}_max"]
        for other in among
    )


def unseen(row: dict) -> bool:
    """Was a cache that is not exact held against a text too short to show what it loses?"""
    return not row["exact"] and row["kl_mean"] is not None and row["kl_mean"] < NOTHING


def front(among: Sequence[dict]) -> list[dict]:
    """The rows that no other beats: as good in KV peak, tokens/s and KL, and better in one. Exact caches have no KL:
    what is measured of them is rounding. One that is not exact and whose KL is not known is not on it; where nobody's
    is, the first two decide."""
    judged = judges_quality(among)
    points = {id(row): _costs(row, judged) for row in among}
    known = [row for row in among if None not in points[id(row)]]
    beats = lambda a, b: all(x <= y for x, y in zip(a, b)) and a != b
    return [row for row in known if not any(beats(points[id(other)], points[id(row)]) for other in known)]


def judges_quality(among: Sequence[dict]) -> bool:
    """Does the front look at KL? Where it was measured of anyone who is not exact."""
    return any(not row["exact"] and row["kl_mean"] is not None for row in among)


def _costs(row: dict, judged: bool) -> tuple[float | None, ...]:
    speed, kl = row["output_tokens_per_s"], 0.0 if row["exact"] or not judged else row["kl_mean"]
    return row["kv_bytes_peak"], None if speed is None else -speed, None if judged and unseen(row) else kl


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


DROPPED = ("bytes_per_token", "hit_rate", "waste", "ttft_s_p50", "itl_s_p50", "kl_mean")  # where it is too narrow


def row_table(results: dict[str, Any], found: Sequence[dict], width: int = 100):
    """One line per candidate, in so many columns. All else is in the files."""
    runs = sorted({row["runs"] for row in found}) or [0]
    cells = []
    for row in found:
        name = f"{row['cache']} (reference)" if row["reference"] and "(reference)" not in row["cache"] else row["cache"]
        marked = [_cell(key, row) + ("*" if key in row["best"].split(",") else " ") for key in SHOWN]
        cells.append([FRONT if row["pareto"] else "", name, *marked])
    names = [COLUMNS[key].title for key in SHOWN]
    model, work, threads = results["model"], results["workload"], results["machine"]["threads"]
    title = (
        f"{model['name']}, {model['dtype']}, {threads} thread{'s' if threads > 1 else ''}; {work['what']}; "
        f"{work['prompt_tokens']:,} + {work['output_tokens']:,} tokens; median of {_span(runs)}"
    )
    if results["settings"]["clock"] == "virtual":
        title += "; TTFT and ITL are simulated (engine.clock=virtual)"
    of = "KV peak, tok/s and KL" if judges_quality(found) else "KV peak and tok/s (quality was not measured)"
    caption = (
        f"* best of a column (KL: of caches that are not exact); {FRONT} Pareto front: no other is as good in {of} and "
        "better in one."
    )
    if runs[-1] > 1:
        caption += " ± is half of max - min."
    if any(unseen(row) for row in found):
        caption += " KL short: the text was too short to show what the cache loses."
    columns = [FRONT, "cache", *names]
    columns, cells = fitted(columns, cells, width, "cache", [COLUMNS[key].title for key in DROPPED], gap=1)
    made = table(cells, columns, title=title, right=names, whole=[FRONT, *names])
    made.caption, made.caption_justify, made.padding = caption, "left", (0, 1, 0, 0)
    return made


def _span(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _cell(key: str, row: dict) -> str:
    value = row[key]
    if value is None:
        return "-"
    if key == "output_tokens_per_s":
        half = (row[f"{key}_max"] - row[f"{key}_min"]) / 2
        return f"{value:,.1f} ±{half:,.1f}" if row["runs"] > 1 else f"{value:,.1f}"
    if key.endswith("_s_p50"):
        return human_seconds(value)
    if key == "kv_bytes_peak":
        return human_bytes(value) if value else "0"
    if key == "bytes_per_token":
        return f"{value:,.0f}"
    if key == "kl_mean":
        return "short" if unseen(row) else f"{value:.1e}" if value else "0"
    return f"{value:.1%}"
