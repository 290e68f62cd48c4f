"""`kvframe evaluate`: what caches cost in quality. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.jobs import Run
from kvframe.report import (
    PICTURES,
    check_ending,
    console,
    figure_class,
    human_seconds,
    progress,
    save_figure,
    table,
    versions,
    write_result,
)

ENDINGS = {"out": (".json", ".csv"), "plot": PICTURES}
FLOOR = 1e-7  # nats; a KL that float32 cannot tell from 0 is drawn as 0
LINEAR = 1e-5  # nats; the scale of the picture is linear below and logarithmic above


def run(cfg: DictConfig, job: Run) -> int:
    """Evaluates the lineup. Answers 1 when presets had to be skipped."""
    for key in ENDINGS:
        check_ending(key, cfg[key], ENDINGS[key])
    plot, out = job.out(cfg.plot, "plot"), job.out(cfg.out)
    figure = figure_class() if plot is not None else None
    from kvframe.evaluation.evaluate import evaluate

    found = evaluate(cfg, progress=progress)
    console().print(row_table(found))
    if any(row.get("lm_eval") for row in found.rows):
        console().print(task_table(found.rows))
    for note in found.notes:
        print(note, file=sys.stderr)
    for name, reason in found.skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if plot is not None:
        save_figure(draw(found, figure), plot)
        print(f"written: {plot}", file=sys.stderr)
    if out is not None:
        flat = [{k: v for k, v in row.items() if not isinstance(v, list | dict)} for row in found.rows]
        facts = {**vars(found), "config": OmegaConf.to_container(cfg, resolve=True), "versions": versions()}
        write_result(out, flat, facts)
        print(f"written: {out}", file=sys.stderr)
    return 1 if found.skipped else 0


# -- what is shown -------------------------------------------------------------------------------------------

# key -> title, how a value is written, and which is best: the least or the most
COLUMNS = {
    "perplexity": ("perplexity", "{:.4f}", min),
    "kl_mean": ("KL mean", "{:.2e}", min),
    "kl_p99": ("KL p99", "{:.2e}", min),
    "top1": ("top-1", "{:.2%}", max),
    "greedy_divergence": ("differs at", "{}", max),
    "needle_found": ("needles", "{:.0%}", max),
    "needle_logprob": ("needle logprob", "{:.3f}", max),
    "warm_kl_mean": ("KL warm", "{:.2e}", min),
    "bytes_per_token": ("bytes/token", "{:,.1f}", min),
    "kv_bytes_peak": ("KV peak", "{:,}", min),
    "seconds": ("took", None, min),
}
COSTS = ("bytes_per_token", "kv_bytes_peak", "seconds")
OPTIONAL = ("greedy_divergence", "needle_found", "needle_logprob", "warm_kl_mean")


def row_table(found):
    """One line per cache; `*` marks the best of a column: of costs among all caches, of quality among those that are
    not exact, when there are any."""
    rows = found.rows
    columns = [key for key in COLUMNS if key not in OPTIONAL or any(row.get(key) is not None for row in rows)]
    lossy = [row for row in rows if not row["exact"]]
    cells = []
    for row in rows:
        name = f"{row['cache']} (reference)" if row["reference"] and "(reference)" not in row["cache"] else row["cache"]
        cells.append([name, *(_cell(key, row) + _mark(key, row, rows if key in COSTS else lossy) for key in columns)])
    names = [COLUMNS[key][0] for key in columns]
    title = (
        f"{found.model['name']}, {found.model['dtype']}, {found.tokens:,} tokens in {found.texts} text(s); "
        f"KL in nats per token to {found.reference}; * is the best, of quality among caches that are not exact"
    )
    if found.noise_kl_mean is not None:
        title += f"\n{found.model['dtype']} itself: KL {found.noise_kl_mean:.2e} to float32, with an exact cache"
    return table(cells, ["cache", *names], title=title, right=names, whole=names)


def task_table(rows: list[dict]):
    """One line per task and metric of lm-eval, one column per cache."""
    scores = [
        {(task, key): value for task, values in row["lm_eval"].items() for key, value in values.items()} for row in rows
    ]
    names = list(dict.fromkeys(key for score in scores for key in score if isinstance(score[key], float)))
    cells = [[*key, *(f"{s[key]:.4f}" if isinstance(s.get(key), float) else "-" for s in scores)] for key in names]
    caches = [row["cache"] for row in rows]
    return table(cells, ["task", "metric", *caches], title="lm-eval", right=caches, whole=["task", "metric"])


def _cell(key: str, row: dict[str, Any]) -> str:
    value, form = row.get(key), COLUMNS[key][1]
    if value is None:
        return "-"
    return human_seconds(value) if form is None else form.format(value)


def _mark(key: str, row: dict[str, Any], among: list[dict]) -> str:
    """`*` for the best; a space else, so that numbers stay in line."""
    least = COLUMNS[key][2] is min
    worth = lambda r: float("inf") if key == "greedy_divergence" and r[key] is None else r.get(key)
    known = [worth(r) for r in among if worth(r) is not None and worth(r) == worth(r)]
    if row not in among or len(among) < 2 or not known or worth(row) != (min if least else max)(known):
        return " "
    return "*"


def draw(found, figure_class):
    """KL against bytes per token; each point has the names of its caches."""
    figure = figure_class(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    points: dict[tuple[float, float, bool], list[str]] = {}
    for row in found.rows:
        if row["kl_mean"] is not None and row["kl_mean"] == row["kl_mean"]:
            kl = row["kl_mean"] if row["kl_mean"] > FLOOR else 0.0
            points.setdefault((row["bytes_per_token"] / 1024, kl, row["exact"]), []).append(row["cache"])
    widest = max((x for x, _, _ in points), default=1.0)
    for (x, y, exact), names in points.items():
        axes.plot([x], [y], "s" if exact else "o", color="0.4" if exact else "C0")
        right = x > widest / 2  # the label is where there is room for it
        axes.annotate(
            "\n".join(name.replace(" ", "\n") for name in names),
            (x, y),
            textcoords="offset points",
            xytext=(-6 if right else 6, 3),
            ha="right" if right else "left",
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
