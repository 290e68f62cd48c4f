"""`kvframe evaluate`: what caches cost in quality. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.commands.results import places
from kvframe.jobs import Run
from kvframe.report import (
    console,
    human_seconds,
    progress,
    save_figure,
    table,
    versions,
    write_result,
)

FLOOR = 1e-7  # nats; a KL that float32 cannot tell from 0 is drawn as 0
LINEAR = 1e-5  # nats; the scale of the picture is linear below and logarithmic above


def run(cfg: DictConfig, job: Run) -> int:
    """Evaluates the lineup. Answers 1 when presets had to be skipped. Ctrl-C, or a cache that fails, ends it after what
    is complete was shown and written."""
    out, plot, figure = places(cfg, job)
    from kvframe.evaluation.evaluate import Evaluation

    evaluation = Evaluation(cfg)
    found = evaluation.found
    try:
        evaluation.run(progress)
    finally:
        if found.rows:
            _tell(found)
            if plot is not None:
                _picture(found, figure, plot)
            if out is not None:
                _write(found, cfg, out)
    return 1 if found.skipped else 0


def _tell(found) -> None:
    """Tables to stdout; what a reader should know beside them to stderr."""
    tables = [quality_table(found), cost_table(found.rows)]
    if any(row.get("lm_eval") for row in found.rows):
        tables.append(task_table(found.rows))
    for one in tables:
        console().print(one)
    for note in found.notes:
        print(note, file=sys.stderr)
    for name, reason in found.skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if not found.complete:
        print(f"not complete: {', '.join(found.missing) or 'the noise of the model'} missing", file=sys.stderr)


def _picture(found, figure, path: Path) -> None:
    if not found.complete:
        print(f"not drawn: plot={path} is of complete evaluations", file=sys.stderr)
        return
    save_figure(draw(found, figure), path)
    for row in found.rows:
        if not math.isfinite(row["kl_mean"]):
            print(f"not in the picture: {row['cache']}, whose mean KL is {row['kl_mean']}", file=sys.stderr)
    print(f"written: {path}", file=sys.stderr)


def _write(found, cfg: DictConfig, path: Path) -> None:
    """JSON says `complete`; CSV has a line for each cache that is missing, with its name alone."""
    flat = [{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in found.rows]
    lines = [{**row, "complete": True} for row in flat]
    lines += [{"cache": name, "complete": False} for name in found.missing]
    facts = {**vars(found), "config": OmegaConf.to_container(cfg, resolve=True), "versions": versions()}
    write_result(path, lines, facts)
    print(f"written: {path}" + ("" if found.complete else ", not complete"), file=sys.stderr)


# -- what is shown -------------------------------------------------------------------------------------------

# key -> title, how a value is written, and which is marked as the best: the least, the most or none
Column = tuple[str, Callable[[Any], str], Callable | None]
QUALITY: dict[str, Column] = {
    "perplexity": ("perplexity", "{:#.6g}".format, min),
    "kl_mean": ("KL mean", "{:.2e}".format, min),
    "kl_p99": ("KL p99", "{:.2e}".format, min),
    "top1": ("top-1", "{:.2%}".format, max),
    "greedy_divergence": ("differs\nat", lambda at: "never" if at == math.inf else str(at), max),
    "needle_found": ("needles", "{:.0%}".format, max),
    "needle_logprob": ("needle\nlogprob", "{:.3f}".format, max),
    "warm_kl_mean": ("KL warm", "{:.2e}".format, min),
}
COSTS: dict[str, Column] = {
    "bytes_per_token": ("bytes/token", "{:,.1f}".format, min),
    "bytes_ratio": ("of reference", "{:.1%}".format, None),
    "kv_bytes_peak": ("KV peak", "{:,}".format, min),
    "tail_bytes_peak": ("tails in it", "{:,}".format, None),
    "seconds": ("took", human_seconds, min),
}
OPTIONAL = ("greedy_divergence", "needle_found", "needle_logprob", "warm_kl_mean")


def quality_table(found):
    """One line per cache; `*` marks the best of a column among the caches that are not exact, when there are any."""
    told = [key for key in OPTIONAL if any(_value(key, row) is not None for row in found.rows)]
    columns = {key: column for key, column in QUALITY.items() if key not in OPTIONAL or key in told}
    title = (
        f"{found.model['name']}, {found.model['dtype']}, {found.tokens:,} tokens in {found.texts} text(s); "
        f"KL in nats per token to {found.reference}; * is the best of those that are not exact"
    )
    if found.noise_kl_mean is not None:
        title += f"\n{found.model['dtype']} itself: KL {found.noise_kl_mean:.2e} to float32, with an exact cache"
    return _table(found.rows, columns, [row for row in found.rows if not row["exact"]], title)


def cost_table(rows: list[dict]):
    """One line per cache; `*` marks the best of a column."""
    columns = {key: column for key, column in COSTS.items() if key != "tail_bytes_peak" or any(r[key] for r in rows)}
    title = "bytes: of a token over all layers, and the most that the texts held at one moment; took: the texts"
    return _table(rows, columns, rows, title)


def _table(rows: list[dict], columns: dict[str, Column], among: list[dict], title: str):
    cells = []
    for row in rows:
        name = f"{row['cache']} (reference)" if row["reference"] and "(reference)" not in row["cache"] else row["cache"]
        line = [_cell(key, column, row) + _mark(key, column, row, among) for key, column in columns.items()]
        cells.append([name, *line])
    names = [name for name, _, _ in columns.values()]
    made = table(cells, ["cache", *names], title=title, right=names, whole=names)
    made.padding = 0  # the place of the mark keeps columns apart, and names have more room
    return made


def task_table(rows: list[dict]):
    """One line per task and metric of lm-eval, one column per cache."""
    scores = [
        {(task, key): value for task, values in row["lm_eval"].items() for key, value in values.items()} for row in rows
    ]
    names = list(dict.fromkeys(key for score in scores for key in score if isinstance(score[key], float)))
    cells = [[*key, *(f"{s[key]:.4f}" if isinstance(s.get(key), float) else "-" for s in scores)] for key in names]
    caches = [row["cache"] for row in rows]
    return table(cells, ["task", "metric", *caches], title="lm-eval", right=caches, whole=["task", "metric"])


def _value(key: str, row: dict[str, Any]) -> Any:
    """What a column compares; None: not measured. Greedy texts that never differ do so in infinity."""
    if key == "greedy_divergence" and row["greedy_tokens"] and row[key] is None:
        return math.inf
    return row.get(key)


def _cell(key: str, column: Column, row: dict[str, Any]) -> str:
    value = _value(key, row)
    return "-" if value is None else column[1](value)


def _mark(key: str, column: Column, row: dict[str, Any], among: list[dict]) -> str:
    """`*` for the best; a space else, so that numbers stay in line. NaN is never the best."""
    values = [_value(key, other) for other in among]
    known = [value for value in values if value is not None and not math.isnan(value)]
    if column[2] is None or row not in among or not known or min(known) == max(known):
        return " "
    return "*" if _value(key, row) == column[2](known) else " "


def draw(found, figure_class):
    """KL against bytes per token; each point has the names of its caches."""
    figure = figure_class(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    points: dict[tuple[float, float, bool], list[str]] = {}
    for row in found.rows:
        if math.isfinite(row["kl_mean"]):
            kl = row["kl_mean"] if row["kl_mean"] > FLOOR else 0.0
            points.setdefault((row["bytes_per_token"] / 1024, kl, row["exact"]), []).append(row["cache"])
    widest, highest = max((x for x, _, _ in points), default=1.0), max((y for _, y, _ in points), default=0.0)
    for (x, y, exact), names in points.items():
        axes.plot([x], [y], "s" if exact else "o", color="0.4" if exact else "C0")
        right, top = x > widest / 2, y > highest / 3 and y > LINEAR  # the label is where there is room for it
        axes.annotate(
            "\n".join(name.replace(" ", "\n") for name in names),
            (x, y),
            textcoords="offset points",
            xytext=(-6 if right else 6, -3 if top else 3),
            ha="right" if right else "left",
            va="top" if top else "bottom",
            fontsize=8,
        ).set_in_layout(False)
    if found.noise_kl_mean:
        axes.axhline(
            found.noise_kl_mean, linestyle=":", color="0.3", label=f"{found.model['dtype']} itself, to float32"
        )
        axes.legend(fontsize=8)
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_ylim(bottom=-0.2 * LINEAR, top=max([3 * y for _, y, _ in points] + [10 * LINEAR]))
    axes.set_xlim(0, 1.1 * widest)
    axes.set_xlabel("KiB per token, all layers")
    axes.set_ylabel(f"KL to {found.reference}, mean, nats per token")
    axes.set_title(
        f"{found.model['name']}, {found.model['dtype']}, {found.tokens:,} tokens; squares: exact caches", fontsize=10
    )
    axes.grid(alpha=0.3)
    return figure
