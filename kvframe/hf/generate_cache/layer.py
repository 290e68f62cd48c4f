"""One layer of a KVFrameCache, for those who look at `cache.layers`; everything is the cache's business."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import CacheLayerMixin


class Layer(CacheLayerMixin):
    """Args:
    cache: a KVFrameCache. number: of the layer, as transformers counts.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Any, number: int):
        super().__init__()
        self.cache, self.number, self.is_initialized = cache, number, True

    @property
    def is_sliding(self) -> bool:
        return self.cache.is_sliding[self.number]

    def lazy_initialization(self, key_states, value_states) -> None:
        """Nothing to do."""

    def update(self, key_states, value_states, *args, **kwargs):
        return self.cache.update(key_states, value_states, self.number)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.get_mask_sizes(query_length, self.number)

    def get_seq_length(self) -> int:
        return self.cache.get_seq_length()

    def get_max_length(self) -> int:
        return self.cache.get_max_length()

    get_max_cache_shape = get_max_length
