"""What a model hands to a transformers cache: heard in one dry forward with a cache that only listens.

transformers numbers the layers of its caches itself (`layer_idx`); layers that share keys have no number of their own.
And what is cached need not be what is attended to: models with latent attention (MLA) cache the latents.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache

from kvframe.errors import UnsupportedModelError
from kvframe.hf.past import ARGUMENTS
from kvframe.hf.probe import record
from kvframe.types import LayerSpec


class Listener(DynamicCache):
    """An empty cache that keeps what it is given in `heard`: (layer_idx, keys, values)."""

    def __init__(self):
        super().__init__()
        self.heard: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.heard.append((layer_idx, key_states, value_states))
        return key_states, value_states


@dataclass(frozen=True)
class Heard:
    """Attributes:
    numbers: layer_idx of transformers -> index of the attention layer, in order of the calls.
    layers: the attention layers as a cache knows them that only stores columns: with heads, sizes and dtype of what it
        is given. Chunks begin where the text of a row begins, behind its padding, so as many columns must be there as a
        chunk has: a window.
    """

    numbers: dict[int, int]
    layers: tuple[LayerSpec, ...]


def listen(model) -> Heard:
    """One dry forward of a kvframe.hf.HFModel with a cache.

    Raises: UnsupportedModelError: the model takes no cache, or does not tell it of each attention layer once.
    """
    module, name, listener = model.module, type(model.module).__name__, Listener()
    argument = next((a for a in ARGUMENTS if a in inspect.signature(module.forward).parameters), None)
    if argument is None:
        raise UnsupportedModelError(f"{name}.forward takes no cache ({' or '.join(ARGUMENTS)})")
    ids = torch.full((1, 2), model.vocab_size // 2, device=model.device)

    def run() -> None:
        with torch.inference_mode():
            module(input_ids=ids, use_cache=True, **{argument: listener})

    calls = record(module, run).calls
    own = [spec for spec in model.layers if spec.kv_source is None]
    numbers = {number: spec.index for (number, _, _), spec in zip(listener.heard, own)}
    if len(calls) != len(model.layers) or len(listener.heard) != len(own) or len(numbers) != len(own):
        raise UnsupportedModelError(
            f"{name} has {len(own)} attention layers with keys of their own, and gives a cache those of "
            f"{len(listener.heard)} (layers {[number for number, _, _ in listener.heard]} as transformers counts)"
        )
    layers = [replace(spec, window=spec.window or spec.chunk, chunk=None) for spec in model.layers]
    for (_, k, v), spec in zip(listener.heard, own):
        if k.shape[1] != v.shape[1]:
            raise UnsupportedModelError(f"{name} caches {k.shape[1]} heads of keys and {v.shape[1]} of values")
        dtype = str(k.dtype).removeprefix("torch.")
        sizes = {"kv_heads": k.shape[1], "k_dim": k.shape[3], "v_dim": v.shape[3]}
        layers[spec.index] = replace(layers[spec.index], **sizes, dtype=dtype)
    return Heard(numbers, tuple(layers))
