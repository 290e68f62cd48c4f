"""What a plan says of a model: kinds of attention, windows, parameters and bytes. All from its layers and tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvframe.types import LayerSpec

LATENT = (
    "keys and values have different sizes (MLA): they are counted per head, as transformers computes them and kvframe "
    "stores them; an engine that stores the latent vectors needs less"
)


def attention(layer: LayerSpec) -> str:
    """MHA: a KV head for each query head; MQA: one for all; GQA: one for several."""
    if layer.kv_heads == layer.q_heads:
        return "MHA"
    return "MQA" if layer.kv_heads == 1 else "GQA"


def sees(layer: LayerSpec) -> str:
    """What a query of the layer sees by the model's own rule, e.g. "window 4,096"."""
    rules = [f"{name} {n:,}" for name, n in (("window", layer.window), ("chunk", layer.chunk)) if n is not None]
    return ", ".join(rules) or "everything"


def layer_kinds(layers: tuple[LayerSpec, ...]) -> list[dict[str, Any]]:
    """The different layers in order of appearance, and how many there are of each.

    Of each: `layers` (how many), `attention`, `group_factor` (query heads of a KV head), `q_heads`, `kv_heads`,
    `k_dim`, `v_dim`, `window`, `chunk`, `sees`, and `reads`: True where the keys and values are another layer's.
    """
    found: Counter[tuple] = Counter()
    for layer in layers:
        found[(
            ("attention", attention(layer)), ("group_factor", layer.q_heads // layer.kv_heads),
            ("q_heads", layer.q_heads), ("kv_heads", layer.kv_heads), ("k_dim", layer.k_dim), ("v_dim", layer.v_dim),
            ("window", layer.window), ("chunk", layer.chunk), ("sees", sees(layer)),
            ("reads", layer.kv_source is not None),
        )] += 1  # fmt: skip
    return [{"layers": count, **dict(key)} for key, count in found.items()]


def facts(model: Any, weights: int | None = None) -> dict[str, Any]:
    """What a plan says of the model; `weights`: its bytes, where the user knows better."""
    by_dtype: dict[str, dict[str, int]] = {}
    parameters = model.module.parameters() if hasattr(model, "module") else ()
    for parameter in parameters:  # each once, however many layers share it
        kind = by_dtype.setdefault(str(parameter.dtype).removeprefix("torch."), {"parameters": 0, "bytes": 0})
        kind["parameters"] += parameter.numel()
        kind["bytes"] += parameter.nbytes
    return {
        "name": model.name,
        "dtype": model.dtype,
        "layers": len(model.layers),
        "kinds": layer_kinds(model.layers),
        "parameters": sum(kind["parameters"] for kind in by_dtype.values()),
        "weights": by_dtype,
        "weights_bytes": model.weight_bytes if weights is None else weights,
        "weights_given": weights is not None,
        "max_len": model.max_len,
    }


def notes(model: Any, weights: int | None = None) -> list[str]:
    """What a reader should know of the model."""
    latent = [LATENT] if any(layer.k_dim != layer.v_dim for layer in model.layers) else []
    return [*getattr(model, "notes", ()), *latent]
