"""`kvframe plan`: what fits. Tables go to stdout, what a reader should know to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.commands.results import places
from kvframe.fitting import Fitting, fit
from kvframe.jobs import Run
from kvframe.report import (
    console,
    fitted,
    human_bytes,
    save_figure,
    table,
    versions,
    write_result,
)

WIDTH = 100  # columns of the tables, where the terminal has as many


def run(cfg: DictConfig, job: Run) -> int:
    """Shows and writes what fits. That nothing does is an answer, too: always 0."""
    out, plot, figure = places(cfg, job)
    found = fit(cfg, curves=plot is not None)
    show = console()
    width = min(WIDTH, show.width)
    for text, made in shown(found, width):
        show.print(text, width=width)
        show.print(made, width=width)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    for name, reason in found.skipped.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr)
    if plot is not None:
        save_figure(draw(found, figure), plot)
        print(f"written: {plot}", file=sys.stderr)
    if out is not None:
        facts = {**vars(found), "config": OmegaConf.to_container(cfg, resolve=True), "versions": versions()}
        write_result(out, [_flat(row) for row in (*found.rows, *found.contexts)], facts)
        print(f"written: {out}", file=sys.stderr)
    return 0


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not isinstance(value, list)}


# -- tables --------------------------------------------------------------------------------------------------


def shown(found: Fitting, width: int = WIDTH) -> Iterator[tuple[str, Any]]:
    """Each table, so wide at most, under its heading."""
    yield _about(found.model), model_table(found.model)
    yield _asked(found), row_table(found, width)
    if found.contexts:
        yield f"by context, {_requests(found)}{_at_once(found)}", context_table(found, width)


def _about(model: dict[str, Any]) -> str:
    stored = ", ".join(f"{kind['parameters'] / 1e6:,.1f} M in {dtype}" for dtype, kind in model["weights"].items())
    weights = f"{human_bytes(model['weights_bytes'])} of weights" + (" (as given)" if model["weights_given"] else "")
    counted = f"; parameters: {stored}" if stored else ""
    longest = f"; up to {model['max_len']:,} tokens" if model["max_len"] else ""
    return f"{model['name']}: {weights}{counted}; keys and values in {model['dtype']}{longest}"


def _asked(found: Fitting) -> str:
    text = f"{_requests(found)} of {found.rows[0]['context']:,} tokens{_at_once(found)}, nothing shared"
    if found.memory is None:
        return text
    weights, reserve = human_bytes(found.model["weights_bytes"]), human_bytes(found.reserve_bytes)
    return (
        f"{text}\n{human_bytes(found.memory)} of memory = {weights} of weights + {reserve} of reserve + "
        f"{human_bytes(max(found.kv_room_bytes, 0))} for keys and values\n"
        f"fit: requests that fit; longest: tokens that {_requests(found)} can have each, = is the longest allowed"
    )


def _requests(found: Fitting) -> str:
    return f"{found.requests:,} request{'s' if found.requests > 1 else ''}"


def _at_once(found: Fitting) -> str:
    return " at once" if found.requests > 1 else ""


def model_table(model: dict[str, Any]):
    """One line per kind of layer."""
    cells = [
        [
            kind["layers"],
            _attention(kind),
            f"{kind['q_heads']} / {kind['kv_heads']}",
            f"{kind['k_dim']} / {kind['v_dim']}",
            kind["sees"] + (", keys and values of another layer" if kind["reads"] else ""),
        ]
        for kind in model["kinds"]
    ]
    columns = ["layers", "attention", "query / KV heads", "key / value size", "a query sees"]
    return table(cells, columns, right=["layers"], whole=columns[:-1])


def _attention(kind: dict[str, Any]) -> str:
    latent = " (MLA)" if kind["k_dim"] != kind["v_dim"] else ""
    return kind["attention"] + latent + (f", factor {kind['group_factor']}" if kind["group_factor"] > 1 else "")


DROPPED = ("KV/weights", "headroom", "B/token", "longest", "each")  # where it is too narrow


def row_table(found: Fitting, width: int = WIDTH):
    """One line per cache."""
    columns = _size_columns(found) + (["fit", "longest", "headroom"] if found.memory is not None else [])
    cells = [[row["cache"], *_sizes(row)] for row in found.rows]
    if found.memory is not None:
        for line, row in zip(cells, found.rows):
            line += [f"{row['requests_that_fit']:,}", _longest(row), human_bytes(row["headroom_bytes"])]
    columns, cells = fitted(["cache", *columns], cells, width, "cache", DROPPED)
    return table(cells, columns, right=columns[1:], whole=columns[1:])


def context_table(found: Fitting, width: int = WIDTH):
    """One line per cache and context."""
    columns = ["context", *_size_columns(found), *(["fit"] if found.memory is not None else [])]
    cells, before = [], None
    for row in found.contexts:
        name, before = row["cache"] if row["cache"] != before else "", row["cache"]
        fitting = [f"{row['requests_that_fit']:,}"] if found.memory is not None else []
        cells.append([name, f"{row['context']:,}", *_sizes(row), *fitting])
    columns, cells = fitted(["cache", *columns], cells, width, "cache", DROPPED)
    return table(cells, columns, right=columns[1:], whole=columns[1:])


def _size_columns(found: Fitting) -> list[str]:
    every = [f"all {found.requests:,}"] if found.requests > 1 else []
    return ["B/token", "each", *every, "KV/weights"]


def _sizes(row: dict[str, Any]) -> list[str]:
    each, ratio = human_bytes(row["bytes_per_request"]), row["kv_to_weights"]
    every = [human_bytes(row["bytes_total"])] if row["requests"] > 1 else []
    per_token = f"{row['bytes_per_token']:,.1f}".removesuffix(".0")
    return [per_token, each, *every, "-" if ratio is None else f"{ratio:,.3f}"]


def _longest(row: dict[str, Any]) -> str:
    if row["longest_context_bound"] == "no limit":
        return "no limit"
    return f"{'' if row['longest_context_bound'] == 'memory' else '= '}{row['longest_context']:,}"


# -- picture -------------------------------------------------------------------------------------------------


def draw(found: Fitting, figure_class):
    """Bytes of all requests over the context, one line per cache; caches of the same bytes share one."""
    figure = figure_class(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple, list[str]] = {}
    for name, points in found.curves.items():
        lines.setdefault(tuple(points), []).append(name)
    for points, names in lines.items():
        axes.plot([n for n, _ in points], [size / 2**30 for _, size in points], ".-", label=", ".join(names))
    weights = found.model["weights_bytes"]
    axes.axhline(weights / 2**30, linestyle="--", color="0.2", label=f"weights, {human_bytes(weights)}")
    if found.kv_room_bytes is not None and found.kv_room_bytes > 0:
        room = found.kv_room_bytes
        axes.axhline(room / 2**30, linestyle=":", color="0.2", label=f"room in {human_bytes(found.memory)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    axes.set_xlabel("context of each request in tokens")
    axes.set_ylabel(f"keys and values of {found.requests:,} request(s) in GiB")
    axes.set_title(f"{found.model['name']}, {found.model['dtype']}, {found.requests:,} request(s) at once", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
