"""`kvframe simulate`: hit rates of a cache over a request trace. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import sys

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
from kvframe.simulation.sweep import PARTS, Settings, flat, simulate


def run(cfg: DictConfig, job: Run) -> int:
    """Simulates each capacity. Answers 1 when requests did not fit."""
    settings = Settings.of(cfg)
    out, plot, figure = places(cfg, job)
    rows = simulate(cfg, progress=progress, names=_chosen())
    console().print(row_table(rows))
    refused = [row for row in rows if row["refused"]]
    for row in refused:
        print(
            f"refused: {row['refused']} of {row['requests']} requests are larger than {_blocks(row['num_blocks'])} "
            "blocks (or engine.max_len); they count as found nothing",
            file=sys.stderr,
        )
    if plot is not None:
        save_figure(draw(rows, figure), plot)
        print(f"written: {plot}", file=sys.stderr)
    if out is not None:
        facts = {"trace": settings.trace, "config": OmegaConf.to_container(cfg, resolve=True)}
        write_result(out, flat(rows), {"rows": rows, **facts, "versions": versions()})
        print(f"written: {out}", file=sys.stderr)
    return 1 if refused else 0


def _chosen() -> dict[str, str]:
    """Names of the parts' options, as the user chose them."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return {}
    choices = HydraConfig.get().runtime.choices
    return {part: choices[f"cache/{part}"] for part in PARTS if choices.get(f"cache/{part}")}


# -- what is shown -------------------------------------------------------------------------------------------


def _blocks(capacity: int | None) -> str:
    return "unbounded" if capacity is None else f"{capacity:,}"


def row_table(rows: list[dict]):
    """One line per capacity."""
    first = rows[0]
    columns = ["blocks", "hit blocks", "hit tokens", "evictions", "peak blocks", "peak live"]
    cells = [
        [
            _blocks(row["num_blocks"]),
            f"{row['hit_rate_blocks']:.2%}",
            f"{row['hit_rate_tokens']:.2%}",
            f"{row['evictions']:,}",
            f"{row['peak_blocks']:,}",
            f"{row['peak_live_blocks']:,}",
        ]
        for row in rows
    ]
    extra = {"preemptions": lambda r: f"{r['preemptions']:,}"} if first["mode"] == "engine" else {}
    if any(row["refused"] for row in rows):
        extra["refused"] = lambda r: f"{r['refused']:,}"
    if first["mode"] == "engine":
        extra["TTFT p50 / p99"] = lambda r: f"{human_seconds(r['ttft_s_p50'])} / {human_seconds(r['ttft_s_p99'])}"
        extra["simulated"] = lambda r: human_seconds(r["simulated_s"])
    extra["took"] = lambda r: human_seconds(r["seconds"])
    for name, cell in extra.items():
        columns.append(name)
        for line, row in zip(cells, rows):
            line.append(cell(row))
    title = (
        f"{first['requests']:,} requests, {first['input_tokens']:,} tokens in {first['input_blocks']:,} blocks of "
        f"{first['block_size']}; mode={first['mode']}, eviction {first['eviction']}; "
        f"with every input cached for ever {first['ideal_hit_rate_tokens']:.2%} of the tokens"
    )
    return table(cells, columns, title=title, right=columns, whole=columns)


def draw(rows: list[dict], figure_class):
    """Hit rates over the capacities; what an unbounded cache finds is a line across."""
    figure = figure_class(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    bounded = sorted((row for row in rows if row["num_blocks"] is not None), key=lambda row: row["num_blocks"])
    first = rows[0]
    for key, name, style in (("hit_rate_blocks", "of blocks", "o-"), ("hit_rate_tokens", "of tokens", "s--")):
        if bounded:
            axes.plot([row["num_blocks"] for row in bounded], [100 * row[key] for row in bounded], style, label=name)
        for row in rows:
            if row["num_blocks"] is None:
                axes.axhline(100 * row[key], linestyle=style[1:], color="0.5", label=f"{name}, unbounded")
    axes.axhline(100 * first["ideal_hit_rate_tokens"], linestyle=":", color="0.3", label="of tokens, ideal")
    if bounded:
        axes.set_xscale("log")
    axes.set_xlabel(f"capacity in blocks of {first['block_size']} tokens")
    axes.set_ylabel("hit rate in %")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{first['requests']:,} requests, mode={first['mode']}, eviction {first['eviction']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
