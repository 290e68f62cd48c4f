"""One architecture -> one row of the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvframe.errors import UnsupportedModelError
from kvframe.hf import HFModel
from kvframe.testing.coverage.build import build, configs
from kvframe.testing.coverage.bypass import short, without_refusal
from kvframe.testing.coverage.compare import compare
from kvframe.testing.coverage.scope import out_of_scope

STATUSES = ("exact", "out_of_scope", "refused", "wrong")  # a class has the last one that a config of it has


def classify(name: str) -> dict[str, Any]:
    """The row of a model class: `architecture, status, reason, seconds`, and what was seen of each of its configs."""
    began = time.perf_counter()
    rows = [classify_config(name, config_class) for config_class in configs(name)]
    last = max(rows, key=lambda row: STATUSES.index(row["status"]))
    verdict = _status(last["status"], last["reason"])
    return {"architecture": name, **verdict, "seconds": round(time.perf_counter() - began, 2), "configs": rows}


def classify_config(name: str, config_class: type) -> dict[str, Any]:
    """`config, status, reason`, and facts. Never raises an Exception: what went wrong is the reason."""
    row: dict[str, Any] = {"config": config_class.__name__}
    try:
        module = build(name, config_class)
    except Exception as error:
        return row | _status("wrong", f"no tiny model of it could be built: {_named(error)}")
    row["parameters"] = sum(p.numel() for p in module.parameters())
    try:
        model = HFModel.from_module(module)
    except UnsupportedModelError as error:
        return row | _refused(name, config_class, error)
    except Exception as error:
        return row | _status("wrong", f"loading it fails: {_named(error)}")
    row |= facts(model)
    try:
        found = compare(module, model)
    except AssertionError as error:
        return row | _status("wrong", short(error))
    except Exception as error:
        return row | _status("wrong", _named(error))
    row |= {"tokens": found.tokens, "error": found.error, "hits": found.hits}
    if note := out_of_scope(build(name, config_class), name, config_class):
        row["note"] = note
    return row | _status("exact", f"{found.tokens} tokens and their logits are REF's")


def _refused(name: str, config_class: type, error: UnsupportedModelError) -> dict[str, Any]:
    """Out of scope, or refused with evidence, or wrong where there was no need for it.

    Fresh models each time: the one that was refused may have been bound already.
    """
    reason = " ".join(error.message.split()).removeprefix(f"{name}: ").removeprefix(f"{name} ")
    scope = out_of_scope(build(name, config_class), name, config_class)
    if scope is not None:
        return _status("out_of_scope", scope) | {"refusal": reason}
    needed, seen = without_refusal(build(name, config_class))
    if not needed:
        return _status("wrong", f"refused ({reason}), but {seen}")
    return _status("refused", reason) | {"evidence": seen}


def _status(status: str, reason: str) -> dict[str, str]:
    return {"status": status, "reason": reason}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {short(error)}"


def facts(model: HFModel) -> dict[str, Any]:
    """What the probe saw: e.g. layers "3 window8, 1 full", heads "4/2", sizes "24/16" (keys/values)."""
    layers = model.layers
    also = {
        "shared KV": sum(s.kv_source is not None for s in layers),
        "learned sinks": sum(s.sinks for s in layers),
        "softcap": sum(s.softcap is not None for s in layers),
        "not rotated": sum(s.rotary is not None and not s.rotary.inv_freq for s in layers),
        "rotation unknown": sum(s.rotary is None for s in layers),
    }
    return {
        "layers": ", ".join(f"{n} {kind}" for kind, n in Counter(map(_kind, layers)).items()),
        "heads": _pairs((s.q_heads, s.kv_heads) for s in layers),
        "sizes": _pairs((s.k_dim, s.v_dim) for s in layers),
        "also": ", ".join(f"{n} {what}" for what, n in also.items() if n),
        "first_position": model.first_position,
        "verified": model.verified,
    }


def _kind(spec) -> str:
    if spec.chunk is not None:
        return f"chunk{spec.chunk}"
    return "full" if spec.window is None else f"window{spec.window}"


def _pairs(pairs: Iterable[tuple[int, int]]) -> str:
    return ", ".join(dict.fromkeys(f"{a}/{b}" for a, b in pairs))
