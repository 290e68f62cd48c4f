"""KVFrameCache: a cache of transformers over any kvframe composition.

    cache = KVFrameCache(model, "PRESET cache/codec=CODEC")
    model.generate(**inputs, past_key_values=cache)

Who attends decides what such a cache can be:

- transformers (`sdpa`, `eager`, ...): it stores, and gives back all that is stored, as DynamicCache does.
- kvframe (`model.set_attn_implementation("kvframe")`): its kernels read the stored blocks where they lie. Only this
  way prefixes can be shared, sinks kept, and groups of tokens sealed.

Shape legend: B rows, T columns of a forward, H heads, D size of a vector.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from transformers import Cache

from kvframe.errors import ConfigError, RequestError
from kvframe.hf import seam
from kvframe.hf.generate_cache import building, hooks
from kvframe.hf.generate_cache.columns import forgets, new_columns
from kvframe.hf.generate_cache.layer import Layer
from kvframe.hf.generate_cache.listening import listen
from kvframe.hf.generate_cache.packed import Packed
from kvframe.hf.generate_cache.plain import Plain, first_seen
from kvframe.hf.generate_cache.rows import Rows
from kvframe.types import CacheStats

seam.register(seam.NAME, seam.attention)  # so that a model can be loaded with attn_implementation="kvframe"


class KVFrameCache(Cache):
    """Keys and values of one batch, kept by a kvframe composition.

    Args:
        model: a causal LM of transformers, on its device and in its dtype, or a kvframe.hf.HFModel. It is probed here
            (see kvframe.hf.probe), and must be the one that is called with the cache.
        composition: "PRESET", "cache=PRESET cache/codec=CODEC" (overrides), a list of overrides, or a config of
            `kvframe.compose`. `kernel=...` and all keys of `cache` may be in it. By default that of `kvframe generate`.
        max_len: tokens of the longest row; None: what the model was made for.
        max_batch: most rows (texts x beams) at once.
        prefill_chunk: most tokens of a row in one forward; None: max_len. With less, and the same number in
            `generate(prefill_chunk_size=...)`, layers with a window need less memory.
        salt: caches whose index should not share prefixes; see kvframe.types.Request.

    Attributes:
        cache: the KVCache. attends: who computes attention, "kvframe" or "transformers".

    Raises:
        ConfigError, IncompatibleCacheError: a composition that does not exist, does not fit together, or that
            transformers' attention cannot be told about; UnsupportedModelError; CapacityError.
    """

    def __init__(
        self,
        model: Any,
        composition: Any = (),
        *,
        max_len: int | None = None,
        max_batch: int = 16,
        prefill_chunk: int | None = None,
        salt: str = "",
    ):
        made = building.subject(model)
        self.module = made.module
        self.attends = "kvframe" if building.attends(made.module) else "transformers"
        heard = listen(made)
        self._specs = made.layers if self.attends == "kvframe" else heard.layers
        cfg = building.composed(composition, made, max_len, max_batch, prefill_chunk)
        self.cache = building.built(cfg, made, self._specs)
        if self.attends == "transformers":
            building.refuse_unsayable(self.cache)
        self._device, self._running, self._numbers = made.device, made.running, heard.numbers
        self._windows = any(forgets(spec) for spec in self._specs)
        self._rows = Rows(self.cache, int(cfg.engine.max_len), max_batch, salt)
        self._forward: Packed | Plain | None = None
        this = weakref.proxy(self)  # no circle: its memory goes when nobody has it any more
        super().__init__(layers=[Layer(this, i) for i in range(max(self._numbers) + 1)])
        hooks.install(self.module)

    # -- a forward, as the model sees it ---------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Stores a layer's new keys and values `[B, H, T, D]`.

        Answers those that the layer has to attend to: of all columns, or the same again where kvframe attends.
        """
        if self.attends == "kvframe":
            if self._running.batch is None:
                raise self._wrong("a module that is not the one this cache was made for")
            _no_gradients(key_states)
            return key_states, value_states
        layer = self._numbers.get(layer_idx)
        if layer is None:
            raise self._wrong(f"layer {layer_idx} of a model")
        spec = self._specs[layer]
        got = (key_states.shape[1], key_states.shape[3], value_states.shape[3], str(key_states.dtype))
        if got != (spec.kv_heads, spec.k_dim, spec.v_dim, f"torch.{spec.dtype}"):
            raise self._wrong(f"keys of {got[0]} heads of {got[1]} numbers, values of {got[2]} ({got[3]})")
        _no_gradients(key_states)
        return self._plain(layer, key_states, value_states)

    def _plain(self, layer: int, key: torch.Tensor, value: torch.Tensor):
        if self._forward is None or not self._forward.left:
            B, T, past = key.shape[0], key.shape[2], self._rows.length
            plan = self._rows.begin(np.ones((B, T), dtype=bool), None)
            self._forward = Plain(self.cache, plan, (B, T), past)
        with torch.no_grad():
            out = self._forward.update(layer, key, value)
        self._rows.finished = not self._forward.left
        return out

    def forward_begins(self, module, input_ids, inputs_embeds, attention_mask) -> None:
        """The model is called with this cache (see generate_cache.hooks)."""
        self._forward = None
        if building.attends(module) != (self.attends == "kvframe"):
            raise ConfigError(
                f"this cache was made for a model whose attention is {self.attends}'s, and now it is another's",
                fix="make the cache after model.set_attn_implementation(...)",
            )
        if self.attends == "transformers":
            return
        if module is not self.module:
            raise self._wrong(type(module).__name__)
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise RequestError("the model is called without input_ids or inputs_embeds")
        self._rows.settle()
        real = new_columns(self._rows.columns, tuple(given.shape[:2]), attention_mask, self._windows)
        tokens = input_ids.detach().cpu().numpy() if input_ids is not None and self._rows.looked_up else None
        plan = self._rows.begin(real, tokens)
        self._forward = Packed(self.cache, real, plan, len(self._specs), self._device)
        self._running.batch = self._running.plan = self._forward

    def forward_ends(self) -> None:
        """The model has answered, or failed."""
        if self.attends == "kvframe":
            self._running.batch = self._running.plan = None
            self._rows.finished = self._forward is not None and not self._forward.left

    def _wrong(self, what: str) -> RequestError:
        return RequestError(
            f"the cache was made for {type(self.module).__name__}, and is given {what}",
            fix="KVFrameCache(model, ...) for the model that is called, and call that model, not a part of it",
        )

    # -- sizes -----------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are held, padding included."""
        return self._rows.length

    def get_mask_sizes(self, query_length, layer_idx: int = 0) -> tuple[int, int]:
        """`(length, offset)` of the columns that `update` will answer for a layer."""
        if isinstance(query_length, torch.Tensor):
            query_length = query_length.shape[0]
        past, offset, layer = self._rows.length, 0, self._numbers.get(layer_idx, 0)
        if self.attends == "transformers":
            offset = first_seen(self.cache.storage.layers[layer].retention, past)
        return past + query_length - offset, offset

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._rows.max_len

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        """False: a plan is made on the host for each forward."""
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_sliding(self) -> list[bool]:
        specs = [self._specs[self._numbers.get(i, 0)] for i in range(len(self.layers))]
        return [forgets(spec) for spec in specs]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_dummy(self) -> list[bool]:
        return [i not in self._numbers for i in range(len(self.layers))]

    # -- between forwards ------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-n` columns; a positive n keeps the first n.

        Raises: RequestError: what the next query needs was given back, or sealed; see `Rows.cut`.
        """
        length, n = self._rows.length, int(tokens_to_remove)
        self._rows.cut(min(n, length) if n > 0 else max(length + n, 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is."""
        self._rows.select([int(i) for i in beam_idx])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows, in this order; indices or a mask of booleans."""
        rows = range(len(self._rows))
        self._rows.select(np.asarray(rows)[torch.as_tensor(indices).cpu().numpy()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side. They share what they have."""
        self._rows.select([i for i in range(len(self._rows)) for _ in range(repeats)])

    def activate_past_recording(self) -> None:
        """Nothing to do: the last forward can always be taken back."""

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def early_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: everything is allocated from the beginning."""

    def match(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_) -> int:
        """Begins a batch of texts with what the index has of them from earlier ones; what was held before is released.

        `generate` with the whole texts then computes the rest. Where kvframe attends and the composition has an index.

        Args:
            input_ids: [B, T]. attention_mask: [B, T]; None: no padding.
        Returns: columns that need no compute; the same for all rows.
        """
        if self.attends != "kvframe":
            raise RequestError("transformers' attention cannot be told of prefixes", fix=building.FIX)
        ids = input_ids.detach().cpu().numpy()
        mask = np.ones(ids.shape, dtype=bool) if attention_mask is None else attention_mask.cpu().numpy() != 0
        return self._rows.match(mask, ids)

    def release(self) -> None:
        """The batch is over. What it left in an index stays, for `match`."""
        self._rows.settle()
        self._rows.clear()

    def reset(self) -> None:
        """Forgets everything, the index included."""
        self._forward = None
        self._rows.finished = False
        self._rows.clear()
        self.cache.reset()

    # -- looking at it ---------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Bytes and counts of the composition, the last forward included."""
        self._rows.settle()
        return self.cache.stats()

    def check(self) -> None:
        """Raises AssertionError when the books of the composition are wrong."""
        self._rows.settle()
        self.cache.check()

    def __deepcopy__(self, memo):
        raise RequestError(
            "a KVFrameCache is not copied: it is blocks of memory and a model",
            fix="batch_repeat_interleave(n), or match() with an index, which finds a prefix again",
        )

    def __repr__(self) -> str:
        rows = f"{len(self._rows)} rows of {self._rows.length} columns"
        return f"KVFrameCache({type(self.cache).__name__}, {self.attends} attends, {rows})"


def _no_gradients(x: torch.Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise RequestError("KVFrameCache keeps no gradients", fix="with torch.no_grad(): ...")
