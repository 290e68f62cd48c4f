"""`kvframe calibrate`: how large keys and values are, by layer. The table goes to stdout, progress to stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from omegaconf import DictConfig

from kvframe.errors import ConfigError
from kvframe.jobs import Run
from kvframe.report import check_ending, console, progress, table, versions, write_json


def run(cfg: DictConfig, job: Run) -> int:
    """Computes the text through the model and an exact cache, and writes what was seen."""
    check_ending("out", cfg.out, (".json",))
    out = job.out(cfg.out)
    found = calibrate(cfg, progress)
    rows = [(layer, f"{sizes['k']:.4g}", f"{sizes['v']:.4g}") for layer, sizes in found["layers"].items()]
    title = f"{found['model']}, {found['dtype']}, {found['tokens']} tokens"
    columns = ("layer", "largest |k|", "largest |v|")
    console().print(table(rows, columns, title=title, right=columns))
    if out is not None:
        write_json(out, {**found, "versions": versions()})
        print(f"written: {out}", file=sys.stderr)
    return 0


def calibrate(cfg: DictConfig, bar: Callable[[str, int], AbstractContextManager]) -> dict[str, Any]:
    """`{"layers": {"0": {"k": size, "v": size}, ...}, "model", "dtype", "tokens", "text"}`.

    Layers that read the keys and values of another one have its sizes.

    Raises: ConfigError: the text or the limits cannot be used, the cache changes what the model computes, or something
        that is not a number was seen. PluginError: the cache answers tokens of a text that it has never seen.
    """
    from kvframe.config import build_cache, build_model, cache_context
    from kvframe.evaluation import texts
    from kvframe.evaluation.teacher import Limits, Text, teach_unseen
    from kvframe.text import TextCodec

    wanted = cfg.max_tokens
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 2:
        raise ConfigError(f"max_tokens={wanted!r} cannot be used", options=["an integer >= 2"], fix="max_tokens=1024")
    texts.read(cfg.text)  # better said before the weights are loaded than after
    model = build_model(cfg)
    cache = build_cache(cfg, cache_context(cfg, model))
    if not cache.exact:
        raise ConfigError(
            f"{_inexact(cache)} changes what the model computes, and a calibration must not",
            fix="leave it out, or choose parts that `kvframe list` calls exact",
        )
    tokens = texts.tokens_of(cfg.text, TextCodec(model.tokenizer, vocab_size=model.vocab_size), wanted)
    longest = min(cache.capacity(), cache.context.max_len)
    pieces = [tokens[i : i + longest] for i in range(0, len(tokens), longest)]  # longer texts in requests of their own
    sizes = watch(cache, len(model.layers))
    todo = (Text(piece, salt=f"calibrate/{i}", first=len(piece) - 1) for i, piece in enumerate(pieces))
    limits = Limits.of(cfg, cfg.engine.max_step_tokens)
    with bar("calibrating", len(tokens)) as advance:
        for _text, _start, n, _logits in teach_unseen(model, cache, todo, limits):
            advance(n)
    layers = {}
    for spec in model.layers:
        found = sizes[spec.index if spec.kv_source is None else spec.kv_source]
        found = {kind: float(size) for kind, size in found.items()}
        if not all(map(math.isfinite, found.values())):
            raise ConfigError(f"layer {spec.index} has keys or values that are not finite", fix="model.dtype=float32")
        layers[str(spec.index)] = found
    return {"layers": layers, "model": model.name, "dtype": model.dtype, "tokens": len(tokens), "text": cfg.text}


def _inexact(cache: Any) -> str:
    """What of a cache is not exact, as a user knows it."""
    parts = getattr(cache, "parts", None)
    kinds = ("layout", "index", "eviction", "retention", "codec") if parts is not None else ()
    found = [(kind, getattr(parts, kind)) for kind in kinds if not getattr(parts, kind).exact]
    return " and ".join(f"cache.{kind} ({type(part).__qualname__})" for kind, part in found) or type(cache).__qualname__


def watch(cache: Any, layers: int) -> list[dict[str, Any]]:
    """From now on `cache.attend` keeps the largest size of the keys and of the values of each layer in the answer."""
    import torch

    sizes: list[dict[str, Any]] = [{"k": torch.zeros(()), "v": torch.zeros(())} for _ in range(layers)]
    attend = cache.attend

    def watching(layer, q, k, v, plan):
        for kind, x in (("k", k), ("v", v)):  # [T, Hkv, D]
            size = x.abs().amax().float()
            sizes[layer][kind] = torch.maximum(sizes[layer][kind].to(size.device), size)
        return attend(layer, q, k, v, plan)

    cache.attend = watching
    return sizes
