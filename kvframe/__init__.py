"""kvframe: a pluggable framework of KV cache strategies for LLM decoding."""

from __future__ import annotations

__version__ = "0.1.0"
API = 1  # version of kvframe.interfaces; a plugin states the one it was written for

_PUBLIC = {
    "Engine": "kvframe.engine",
    "Request": "kvframe.types",
    "SamplingParams": "kvframe.types",
    "RequestOutput": "kvframe.outputs",
    "KVFrameError": "kvframe.errors",
    "build": "kvframe.config",
    "compose": "kvframe.config",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str):
    """Public names are imported on first use, so that `import kvframe` costs nothing."""
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'kvframe' has no attribute {name!r}")
