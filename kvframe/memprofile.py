"""Where the memory goes: weights, keys and values, activations, counted from the tensors that exist.

    with activations(engine.model) as seen:
        engine.generate(requests)
    report = profile(engine, seen)

No size is guessed from a number of parameters or an assumed width: each tensor says its dtype and its bytes, and memory
that several tensors share counts once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvframe.engine import Engine


@dataclass
class Activations:
    """Bytes of the tensors that a forward makes: `peak` at the worst moment of the worst one, of `tokens` tokens. What
    the linear algebra library takes inside an operation is not seen."""

    peak: int = 0
    tokens: int = 0


class _Watch(TorchDispatchMode):
    """Counts the memory of every tensor that an operation answers, until nobody holds it any more."""

    def __init__(self, known: Iterable[torch.Tensor]):
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata: 0 for tensor in known}  # was there before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage) -> None:
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self.known.pop(key)


@contextmanager
def activations(model: Any) -> Iterator[Activations]:
    """Measures what the forwards of an HFModel take inside the block. They are slower meanwhile."""
    seen, forward = Activations(), model.forward

    def watched(tokens, plan, logits_at):
        cache = model.running.cache
        known = (*model.module.parameters(), *model.module.buffers(), *cache.tensors())
        with _Watch(known) as watch:
            logits = forward(tokens, plan, logits_at)
        if watch.peak > seen.peak:
            seen.peak, seen.tokens = watch.peak, len(tokens)
        return logits

    model.forward = watched
    try:
        yield seen
    finally:
        del model.forward


def by_dtype(tensors: Iterable[torch.Tensor]) -> dict[str, int]:
    """dtype -> bytes of the memory behind the tensors, each piece of it once, under the dtype that was seen first."""
    found: dict[str, int] = {}
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + storage.nbytes()
    return found


def profile(engine: Engine, seen: Activations | None = None) -> dict[str, Any]:
    """Bytes of an engine, after a run.

    Returns:
        weights, kv_allocated: dtype -> bytes, of parameters and buffers, and of every tensor of the cache (pools with
            their null blocks, tails); weight_copies: see kvframe.hf.linear.
        kv_peak, kv_pool: what requests held at most, tails included, and what they could have (from the cache's books).
        activations_peak, activations_tokens: None where they were not measured.
        total: of all of these that exist at once.
        allocator: on CUDA, its own counters: allocated and peak_allocated by tensors, reserved from the device.
    """
    module, stats = engine.model.module, engine.cache.stats()
    weights = by_dtype((*module.parameters(), *module.buffers()))
    kv = by_dtype(engine.cache.tensors())
    copies = engine.model.packed_bytes or 0
    peak = None if seen is None else seen.peak
    found = {
        "weights": weights,
        "weight_copies": copies,
        "kv_allocated": kv,
        "kv_peak": stats.peak,
        "kv_pool": sum(group.num_blocks * group.block_bytes + group.tail_pool for group in stats.groups),
        "activations_peak": peak,
        "activations_tokens": None if seen is None else seen.tokens,
        "total": sum(weights.values()) + copies + sum(kv.values()) + (peak or 0),
    }
    if str(engine.model.device).startswith("cuda"):
        counters = torch.cuda.memory_stats(engine.model.device)
        found["allocator"] = {
            "allocated": counters["allocated_bytes.all.current"],
            "peak_allocated": counters["allocated_bytes.all.peak"],
            "reserved": counters["reserved_bytes.all.current"],
        }
    return found
