"""A composition and a model -> a cache for `generate`, and what has to be refused.

A composition is what the command line takes: `"PRESET"`, `"cache=PRESET cache/codec=CODEC"`, a list of such overrides,
or a composed config.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import nn

from kvframe.errors import ConfigError, IncompatibleCacheError
from kvframe.hf import masks, seam
from kvframe.hf.model import HFModel
from kvframe.interfaces import KVCache
from kvframe.types import LayerSpec

FIX = 'model.set_attn_implementation("kvframe") before the cache is made'


def subject(model: Any) -> HFModel:
    """The model as kvframe knows it, probed. Its attention stays what it was."""
    if hasattr(model, "module") and hasattr(model, "layers") and hasattr(model, "flat_logits"):
        return model
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(
            f"{str(model)[:60]!r} is no model", options=["a causal LM of transformers", "a kvframe.hf.HFModel"]
        )
    before, training = [(c, c._attn_implementation) for c in seam.configs(model)], model.training
    try:
        return HFModel(model, verify=attends(model))
    finally:
        for config, name in before:
            config._attn_implementation = name
        model.train(training)


def attends(module: nn.Module) -> bool:
    """Is the model's attention kvframe's?"""
    return any(config._attn_implementation == seam.NAME for config in seam.configs(module))


def composed(composition: Any, model: HFModel, max_len, max_batch: int, prefill_chunk) -> DictConfig:
    """The config of a composition under these limits (see KVFrameCache).

    Raises: ConfigError naming the valid names.
    """
    from kvframe.config import compose

    if OmegaConf.is_config(composition):
        cfg = composition.copy()
        if missing := [key for key in ("cache", "engine", "kernel") if key not in cfg]:
            raise ConfigError(f"the config has no {missing[0]!r}", fix='compose(["cache=PRESET"])')
    else:
        words = shlex.split(composition) if isinstance(composition, str) else composition
        if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"composition={composition!r} cannot be used",
                options=['"PRESET"', '"cache=PRESET cache/codec=CODEC"', "a list of overrides", "a composed config"],
            )
        cfg = compose([word if "=" in word else f"cache={word}" for word in words])
    for name, value in (("max_len", max_len), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not whole and (value is not None or name == "max_batch"):
            raise ConfigError(f"{name}={value!r} cannot be used", options=["an integer >= 1"])
    with open_dict(cfg):
        longest = max_len or cfg.engine.max_len or model.max_len
        cfg.engine.update(max_len=longest, max_requests=max_batch, max_step_tokens=prefill_chunk or longest)
    return cfg


def built(cfg: DictConfig, model: HFModel, layers: tuple[LayerSpec, ...]) -> KVCache:
    """The cache of a config for a model that hands it these layers. Its tensors are ordinary ones, wherever it is made.

    Raises: ConfigError: rows longer than the model's texts; IncompatibleCacheError, CapacityError.
    """
    from kvframe.config import build_cache, cache_context

    with torch.inference_mode(False), torch.no_grad():
        context = replace(cache_context(cfg, model), layers=layers)
        cache = build_cache(cfg, context)
    if model.max_len is not None and context.max_len > model.max_len and not cache.unbounded:
        longer = f"; for longer rows {cache.unbounded_fix}" if cache.unbounded_fix else ""
        raise ConfigError(
            f"max_len={context.max_len} is more than the {model.max_len} tokens this model takes",
            options=[f"1 .. {model.max_len}"],
            fix=f"max_len={model.max_len}{longer}",
        )
    return cache


def refuse_unsayable(cache: KVCache) -> None:
    """IncompatibleCacheError with all that transformers' own attention cannot be told about a cache."""
    reasons = []
    storage, index = getattr(cache, "storage", None), getattr(cache, "index", None)
    if storage is None or index is None:
        reasons.append(f"{type(cache).__name__} is not made of parts, and only attends by itself: {FIX}")
    else:
        if index.keeps:
            reasons.append(
                "an index (rows that share blocks, and prefixes that are found again) needs to know padding from "
                f"tokens: cache/index=none, or {FIX}"
            )
        if cache.unit > 1:
            reasons.append(
                "a codec that seals groups of tokens shows each query another version of its own group, and "
                f"transformers takes one: a codec that stores token by token, or {FIX}"
            )
        seen = {(layer.spec.window, layer.spec.chunk): layer for layer in storage.layers}
        reasons += dict.fromkeys(filter(None, (_unsayable(layer.spec, layer.retention) for layer in seen.values())))
    if reasons:
        raise IncompatibleCacheError(reasons)


def _unsayable(spec: LayerSpec, rule) -> str:
    """Why transformers' mask of the layer is not what its retention says; empty: it is."""

    def visible(batch, head, q, k):
        return torch.from_numpy(rule.visible(q.numpy(), k.numpy()).copy())

    found = masks.fit(visible)
    if not found.what and (found.window, found.chunk) == (spec.window, spec.chunk) and _own(rule):
        return ""
    model = masks.Fit(spec.window, spec.chunk).name
    return (
        f"retention {rule.name} is not what the model's own mask says ({model}), and transformers' attention follows "
        f"the mask: cache/retention=model, or {FIX}"
    )


def _own(rule) -> bool:
    """Every query looks at the keys from its own position."""
    return rule.sink_position(np.zeros(1, dtype=np.int64)) is None
