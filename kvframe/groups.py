"""Layer groups: the layers that share one retention rule, and so one block table and one pool."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.errors import ConfigError, IncompatibleCacheError
from kvframe.interfaces import Retention
from kvframe.types import LayerSpec


def layer_groups(retention: Retention, layers: Sequence[LayerSpec]) -> tuple[list[Retention], dict[int, int]]:
    """Distinct rules in order of appearance, and layer index -> group. A layer that reads another layer's keys
    and values lives in that layer's group."""
    rules: list[Retention] = []
    group_of: dict[int, int] = {}
    for layer in layers:
        rule = retention.for_layer(layer)
        if layer.kv_source is not None:
            source = rules[group_of[layer.kv_source]]
            if source.forgets and source != rule:
                raise IncompatibleCacheError(
                    [
                        f"layer {layer.index} reads the keys of layer {layer.kv_source}, but sees other positions "
                        f"({rule.name} and {source.name}): cache/retention=model"
                    ]
                )
            group_of[layer.index] = group_of[layer.kv_source]
            continue
        if rule not in rules:
            rules.append(rule)
        group_of[layer.index] = rules.index(rule)
    if not rules:
        raise ConfigError("the model has no attention layers", fix="use a model whose attention can be probed")
    return rules, group_of
