"""`kvframe list`: every preset and part that is found, from which plugin, exact or not, and what it costs."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvframe.config import build_skeleton, compose, files
from kvframe.configfiles import ConfigFile
from kvframe.create import create
from kvframe.errors import KVFrameError
from kvframe.jobs import Run
from kvframe.plugins import Plugin, plugins
from kvframe.report import console, human_seconds, table, write_json
from kvframe.sealing import unit
from kvframe.types import LayerSpec

PRESETS = "cache"  # the group of the presets; the groups below it hold the parts
ANY_LAYERS = (LayerSpec(0, 1, 1, 64, 64, 0.125),)  # where no model is named
ANY_LEN = 1 << 30


def run(cfg: DictConfig, job: Run) -> int:
    """Shows the table, and writes the same rows where `out` says."""
    out = job.out(cfg.out)
    found_ones = plugins()
    installed = [plugin_row(plugin, "in use") for plugin in found_ones.loaded]
    installed += [plugin_row(plugin, f"broken: {plugin.error}") for plugin in found_ones.broken]
    installed += [plugin_row(plugin, "left out by KVFRAME_PLUGINS") for plugin in found_ones.left_out]
    show = console()
    if cfg.plugins:
        found: dict[str, Any] = {"plugins": installed, "seconds": found_ones.seconds}
        show.print(plugin_table(installed))
        print(f"all found and loaded in {human_seconds(found_ones.seconds)}", file=sys.stderr)
    else:
        model = build_skeleton(cfg) if OmegaConf.select(cfg, "model") is not None else None
        rows = [row(file, model) for file in listed()]
        found = {"rows": rows, "model": model_row(model), "plugins": installed}
        show.print(row_table(rows, model))
        for row_ in rows:
            if row_["error"]:
                print(f"{row_['group']}={row_['name']} cannot be used: {row_['error']}", file=sys.stderr)
    if out is not None:
        write_json(out, found)
        print(f"written: {out}", file=sys.stderr)
    return 0


def listed() -> Iterator[ConfigFile]:
    """Presets first, then parts by group, then the other groups. The first provider of a name wins, as in Hydra."""
    seen: dict[tuple[str, str], ConfigFile] = {}
    for file in files():
        if file.group and file.group.split("/")[0] not in ("base", "hydra"):
            seen.setdefault((file.group, file.name), file)
    order = lambda file: (file.group != PRESETS, not file.group.startswith(f"{PRESETS}/"), file.group, file.name)
    yield from sorted(seen.values(), key=order)


def row(file: ConfigFile, model: Any = None) -> dict[str, Any]:
    """What is known of one config file. A target that cannot be imported is an `error`, not the end of the list."""
    kind = "preset" if file.group == PRESETS else file.group.removeprefix(f"{PRESETS}/")
    found: dict[str, Any] = {"group": file.group, "name": file.name, "kind": kind, **_origin(file.provider)}
    found |= {"target": None, "exact": None, "description": file.headline, "notes": [], "parts": {}}
    found |= {"bytes_per_token": None, "bytes_per_token_and_kv_head": None, "block_size": None, "error": None}
    try:
        if kind == "preset":
            _describe_preset(found, compose([f"{PRESETS}={file.name}"])[PRESETS], model)
        elif file.group.startswith(f"{PRESETS}/"):
            node = OmegaConf.create(file.text)
            if "defaults" in node:  # parts within a part
                composed = compose([f"{file.group}={file.name}"])
                node = OmegaConf.select(composed, file.group.replace("/", "."))
            _describe_part(found, node, model)
        else:
            found["target"] = OmegaConf.create(file.text).get("_target_")
    except KVFrameError as error:
        found["error"] = error.message
    return found


def _describe_preset(found: dict, node: DictConfig, model: Any) -> None:
    parts = {}
    for name, child in node.items():
        if OmegaConf.is_dict(child) and "_target_" in child:
            parts[name] = create(child, f"{PRESETS}.{name}")
    target = pkgutil.resolve_name(node["_target_"])
    found["target"] = node["_target_"]
    found["description"] = found["description"] or first_line(target)
    found["parts"] = {name: type(part).__name__ for name, part in parts.items()}
    found["exact"] = (
        all(getattr(part, "exact", True) for part in parts.values()) and getattr(target, "exact", True) is not False
    )
    found["notes"] = [note for part in (*parts.values(), target) for note in notes_of(part)]
    _add_block_size(found, parts.get("layout"), parts.get("codec"), model)
    _add_bytes(found, parts.get("codec"), model)


def _describe_part(found: dict, node: DictConfig, model: Any) -> None:
    found["target"] = node.get("_target_")
    part = create(node, f"{found['group'].replace('/', '.')}")
    found["description"] = found["description"] or first_line(type(part))
    found["exact"] = bool(getattr(part, "exact", True))
    found["notes"] = notes_of(part)
    _add_bytes(found, part, model)


def _add_block_size(found: dict, layout: Any, codec: Any, model: Any) -> None:
    """Tokens of a block, as a layout says under a codec; None where one holds a whole request."""
    if not hasattr(layout, "block_size") or not hasattr(codec, "for_layer"):
        return
    longest = (model and model.max_len) or ANY_LEN
    size = layout.block_size(longest, unit(codec, model.layers if model else ANY_LAYERS))
    if size < longest:
        found["block_size"] = size
        found["notes"].insert(0, f"blocks of {size} tokens")


def _add_bytes(found: dict, codec: Any, model: Any) -> None:
    """Bytes of one token over all layers, and their mean over the KV heads, from the codec's planes."""
    if model is None or not hasattr(codec, "planes"):
        return
    from kvframe.memory import layer_token_bytes

    total = sum(layer_token_bytes(codec, layer) for layer in model.layers)
    heads = sum(layer.kv_heads for layer in model.layers if layer.kv_source is None)
    found["bytes_per_token"], found["bytes_per_token_and_kv_head"] = total, total / heads


def first_line(target: Any) -> str:
    """First line of the docstring of a class or function."""
    return (inspect.getdoc(target) or "").partition("\n")[0]


def notes_of(part: Any) -> list[str]:
    """What a part wants its users to know: its attribute `notes`, a text or several."""
    notes = getattr(part, "notes", None) or ()
    return [notes] if isinstance(notes, str) else [str(note) for note in notes]


def _origin(provider: str) -> dict[str, str]:
    for plugin in plugins().loaded:
        if plugin.name == provider:
            return {"plugin": plugin.name, "distribution": plugin.distribution, "version": plugin.version}
    return {"plugin": provider, "distribution": "", "version": ""}


def model_row(model: Any) -> dict | None:
    """The facts of the model that bytes per token depend on."""
    if model is None:
        return None
    heads = sum(layer.kv_heads for layer in model.layers if layer.kv_source is None)
    return {
        "name": model.name,
        "dtype": model.dtype,
        "layers": len(model.layers),
        "kv_heads": heads,
        "max_len": model.max_len,
    }


def plugin_row(plugin: Plugin, state: str) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.value,
        "location": plugin.location,
        "config": plugin.config.url if plugin.config else None,
        "seconds": plugin.seconds,
        "state": state,
        "error": plugin.error,
    }


def plugin_table(rows: list[dict]):
    columns = ("plugin", "from", "module", "configs", "where", "loaded in", "state")
    cells = (
        (
            r["name"],
            f"{r['distribution']} {r['version']}",
            r["module"],
            r["config"] or "-",
            r["location"] or "-",
            f"{r['seconds'] * 1e3:.1f} ms",
            r["state"],
        )
        for r in rows
    )
    return table(cells, columns, right=("loaded in",))


def row_table(rows: list[dict], model: Any):
    columns = ["choose", "from", "exact", *(["bytes/token"] if model else []), "what it is"]
    cells = []
    for r in rows:
        exact = "" if r["exact"] is None else "yes" if r["exact"] else "no"
        cost = [_number(r["bytes_per_token"])] if model else []
        text = (
            f"cannot be used: {r['error']}"
            if r["error"]
            else " ".join([r["description"], *(f"({n})" for n in r["notes"])])
        )
        cells.append((f"{r['group']}={r['name']}", r["distribution"] or r["plugin"], exact, *cost, text))
    title = f"{model.name}, {model.dtype}, {len(model.layers)} layers" if model else None
    return table(cells, columns, title=title, right=("bytes/token",), whole=("choose", "from", "exact", "bytes/token"))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")
