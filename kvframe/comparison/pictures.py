"""The pictures of a comparison, from its results (see kvframe.comparison): matplotlib figures by name.

    tradeoff   KV memory against throughput; the colour is the quality
    timeline   bytes of one request alone, token by token: the steps of blocks, the plateau of a window, the waste
    latency    time to the first token and between tokens, median and 99th percentile
    quality    KL to the exact cache against bytes per token
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvframe.comparison.summary import FRONT, unseen

FLOOR = 1e-6  # nats; below this a KL is rounding and is drawn at 0
MIB = 2**20
COLOURS = [f"C{i}" for i in range(10)]
STYLES = ["-", "--", "-.", ":"]


def pictures(results: dict[str, Any], figure_class: Callable) -> dict[str, Any]:
    """Name -> figure, of those that the results have numbers for."""
    made = {name: draw(results, figure_class) for name, draw in DRAWN.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def _names(results: dict) -> dict[str, tuple[str, str]]:
    """Candidate -> its colour and line style, the same in all pictures."""
    names = [candidate["name"] for candidate in results["candidates"]]
    return {name: (COLOURS[i % 10], STYLES[i // 10 % 4]) for i, name in enumerate(names)}


def _subtitle(results: dict) -> str:
    return f"{results['model']['name']}, {results['model']['dtype']}; {results['workload']['what']}"


def _short(name: str, width: int = 30) -> str:
    """The name in lines of at most so many letters, broken between words."""
    lines = [""]
    for word in name.split():
        fits = len(lines[-1]) + len(word) < width
        lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if fits else [*lines, word]
    return "\n".join(line for line in lines if line)


def tradeoff(results: dict, figure_class):
    """Peak KV bytes and tokens per second of each candidate, with the spread; a ring marks the Pareto front."""
    rows = [row for row in results["rows"] if row["output_tokens_per_s"] and row["kv_bytes_peak"]]
    if not rows:
        return None
    figure = figure_class(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.add_subplot()
    known = [row["kl_mean"] for row in rows if not row["exact"] and row["kl_mean"] is not None]
    colours = None
    if known:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        norm = LogNorm(max(min(known), FLOOR), max(max(known), 10 * FLOOR))
        colours = ScalarMappable(norm, "plasma_r")
    for row in rows:
        x, y = row["kv_bytes_peak"] / MIB, row["output_tokens_per_s"]
        lossy = not row["exact"] and row["kl_mean"] is not None
        colour = colours.to_rgba(max(row["kl_mean"], FLOOR)) if lossy and colours else "0.45"
        reach = [[y - row["output_tokens_per_s_min"]], [row["output_tokens_per_s_max"] - y]]
        axes.errorbar([x], [y], reach, fmt="o" if lossy else "s", color=colour, ecolor="0.7", markersize=8, zorder=3)
        if row["pareto"]:
            axes.plot([x], [y], "o", markersize=15, markerfacecolor="none", markeredgecolor="C2", zorder=2)
    _label(axes, [(r["kv_bytes_peak"] / MIB, r["output_tokens_per_s"], r["cache"]) for r in rows])
    axes.plot([], [], "s", color="0.45", label="exact cache or baseline")
    axes.plot([], [], "o", markersize=12, markerfacecolor="none", markeredgecolor="C2", label=f"Pareto front ({FRONT})")
    axes.legend(fontsize=8, loc="lower right")
    if colours is not None:
        figure.colorbar(colours, ax=axes, label="KL to the exact cache, nats per token")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_plain_number)
    axes.xaxis.set_minor_formatter(_plain_number)
    axes.tick_params(axis="x", which="both", labelsize=8, pad=4)
    axes.margins(0.15, 0.18)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV peak, MiB (blocks that requests held, tails)")
    axes.set_ylabel("output tokens per second (bars: min to max)")
    axes.set_title(f"Memory against throughput\n{_subtitle(results)}", fontsize=10)
    axes.grid(alpha=0.3, which="both")
    return figure


def _plain_number(value: float, _: Any = None) -> str:
    return f"{value:g}"


def _label(axes, points: list[tuple[float, float, str]]) -> None:
    """Writes the names beside their points, those that would lie on each other one below the other."""
    top = max(y for _, y, _ in points) or 1.0
    xs = [math.log(x) for x, _, _ in points]
    middle, taken = (min(xs) + max(xs)) / 2, []
    for x, y, name in sorted(points, key=lambda point: -point[1]):
        text, left = _short(name), math.log(x) > middle
        at = y
        while any(left == other_left and abs(at - other) < 0.045 * top for other, other_left in taken):
            at -= 0.01 * top
        taken.append((at, left))
        shift = (-9 if left else 9, -3)
        style = {"fontsize": 8, "ha": "right" if left else "left"}
        note = axes.annotate(text, (x, at), textcoords="offset points", xytext=shift, **style)
        if at != y:  # a line to the point that it belongs to
            note.set_zorder(4)
            axes.annotate("", (x, y), (x, at), arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.8})


def timeline(results: dict, figure_class):
    """Reserved bytes of one request above, and what of it is not used below."""
    lines = {name: line for name, line in results["timeline"].items() if line["tokens"]}
    if not lines:
        return None
    figure = figure_class(figsize=(8.5, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    looks, same = _names(results), {}
    for name, line in lines.items():  # caches that hold the same are one line
        same.setdefault(tuple(map(tuple, line.values())), []).append(name)
    for names in same.values():
        line, (colour, style) = lines[names[0]], looks[names[0]]
        held = [(a + b) / MIB for a, b in zip(line["reserved"], line["tail"])]
        waste = [100 * max(1 - u / r, 0) if r else 0.0 for r, u in zip(line["reserved"], line["used"])]
        above.plot(line["tokens"], held, style, color=colour, label=",\n".join(names), drawstyle="steps-post")
        below.plot(line["tokens"], waste, style, color=colour)
    above.set_ylabel("MiB held (blocks and tails)")
    below.set_ylabel("waste, % of blocks held")
    below.set_ylim(0, 100)
    below.set_xlabel("tokens of the request")
    model = results["model"]
    above.set_title(f"One request alone, token by token\n{model['name']}, {model['dtype']}", fontsize=10)
    figure.legend(fontsize=7, ncols=2, loc="outside lower center")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    return figure


def latency(results: dict, figure_class):
    """Two panels of horizontal bars: median, and a line to the 99th percentile."""
    panels = [("ttft_s", "time to the first token, ms"), ("itl_s", "time between two tokens, ms")]
    rows = [row for row in results["rows"] if any(row[f"{key}_p50"] is not None for key, _ in panels)][::-1]
    if not rows:
        return None
    figure = figure_class(figsize=(9, 1.6 + 0.42 * len(rows)), layout="constrained")
    figure.suptitle(f"Latency (bar: median, line: to the 99th percentile)\n{_subtitle(results)}", fontsize=10)
    for axes, (key, what) in zip(figure.subplots(1, 2, sharey=True), panels):
        for i, row in enumerate(rows):
            middle, high = row[f"{key}_p50"], row[f"{key}_p99"]
            if middle is None:
                axes.text(0, i, " not known", va="center", fontsize=8, color="0.4")
                continue
            axes.barh(i, 1e3 * middle, color="C0" if row["kind"] == "cache" else "0.6")
            axes.plot([1e3 * middle, 1e3 * high], [i, i], color="0.2", linewidth=1.5)
        axes.set_yticks(range(len(rows)), [_short(row["cache"]) for row in rows], fontsize=8)
        axes.set_xlabel(what)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3, axis="x")
    return figure


def quality(results: dict, figure_class):
    """KL against bytes per token; squares are exact caches."""
    rows = [row for row in results["rows"] if row["kl_mean"] is not None and row["bytes_per_token"] and not unseen(row)]
    if not any(not row["exact"] for row in rows):
        return None
    figure = figure_class(figsize=(8.5, 5), layout="constrained")
    axes = figure.add_subplot()
    groups: dict[tuple[float, float], list[str]] = {}
    for row in rows:
        kl = row["kl_mean"] if row["kl_mean"] > FLOOR and not row["exact"] else 0.0
        point = row["bytes_per_token"] / 1024, kl
        groups.setdefault(point, []).append(row["cache"])
        axes.plot(*point, "s" if row["exact"] else "o", color="0.45" if row["exact"] else "C0")
    widest = max(x for x, _ in groups)
    for (x, y), names in groups.items():
        left = x > widest / 2
        text = "\n".join(_short(name) for name in names)
        shift, side = (-7 if left else 7, 3), "right" if left else "left"
        axes.annotate(text, (x, y), textcoords="offset points", xytext=shift, ha=side, fontsize=8)
    axes.plot([], [], "s", color="0.45", label="exact")
    axes.plot([], [], "o", color="C0", label="not exact")
    axes.legend(fontsize=8, loc="upper right")
    axes.set_yscale("symlog", linthresh=1e-5)
    axes.set_ylim(-2e-6, 5 * max([y for _, y in groups] + [1e-5]))
    axes.set_xlim(0, 1.15 * widest)
    axes.set_xlabel("KiB per token, all layers")
    axes.set_ylabel("KL to the exact cache, nats per token")
    positions = max(found["positions"] for found in results["quality"].values())
    axes.set_title(f"Quality against bytes\n{results['model']['name']}, {positions:,} tokens of text", fontsize=10)
    axes.grid(alpha=0.3)
    return figure


DRAWN = {"tradeoff": tradeoff, "timeline": timeline, "latency": latency, "quality": quality}
