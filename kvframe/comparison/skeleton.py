"""results.json as it is before the first run: who takes part, in what, on which model and machine."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf

from kvframe.comparison.candidates import Contender, fingerprint
from kvframe.comparison.settings import Settings
from kvframe.comparison.store import SCHEMA
from kvframe.comparison.summary import columns
from kvframe.report import versions
from kvframe.workloads.workload import Size, Workload


def skeleton(
    cfg: DictConfig, settings: Settings, workload: Workload, size: Size, model: Any, found: list[Contender]
) -> dict[str, Any]:
    """results.json without a run."""
    config = OmegaConf.to_container(cfg, resolve=True)
    reference = next(c.name for c in found if c.baseline is None and c.exact)
    made = [
        {
            "name": c.name,
            "kind": c.kind,
            "exact": c.exact,
            "reference": c.name == reference,
            "config": c.config,
            "fingerprint": fingerprint(c.config, config["workload"], size.digest, config["model"]),
            "kernels": c.kernels,
            "notes": list(c.notes),
        }
        for c in found
    ]
    own = {"name": workload.name, "config": config["workload"], "what": workload.what}
    line = settings.timeline and dict(zip(("prompt", "output"), settings.timeline))
    return {
        "schema": SCHEMA,
        "complete": False,
        "model": _model(model),
        "workload": {**own, **vars(size)},
        "settings": {
            "repeat": settings.repeat,
            "quality_tokens": settings.quality_tokens,
            "text": settings.text,
            "timeline": line,
            "max_len": cfg.engine.max_len or size.longest,
            "clock": cfg.engine.clock,
        },
        "machine": _machine(model),
        "reference": reference,
        "candidates": made,
        "rows": [],
        "runs": [],
        "quality": {},
        "timeline": {},
        "memory": {},
        "outputs": {},
        "columns": columns(),
        "skipped": {},
        "notes": [],
        "config": config,
        "versions": versions(),
    }


def _model(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "dtype": model.dtype,
        "device": str(model.device),
        "layers": len(model.layers),
        "kv_heads": sum(layer.kv_heads for layer in model.layers if layer.kv_source is None),
        "vocab_size": model.vocab_size,
        "max_len": model.max_len,
        "weights_bytes": model.weight_bytes,
        "packed_bytes": model.packed_bytes or 0,
    }


def _machine(model: Any) -> dict[str, Any]:
    cuda = str(model.device).startswith("cuda")
    return {
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(model.device) if cuda else None,
    }
