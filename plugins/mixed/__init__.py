"""Mixed precision: one codec for keys, one for values, and others for single layers.

Keys are more sensitive than values to rounding, and so are first layers and those with a small window (Liu et al.,
"KIVI", arXiv:2402.02750; Hooper et al., "KVQuant", arXiv:2401.18079). Which codec goes where is configuration: any
codec that is installed can stand in each place.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvframe.errors import ConfigError
from kvframe.interfaces import Codec


class Mixed(Codec):
    """Answers other codecs, layer by layer; stores nothing itself.

    Args:
        k, v: codecs of keys and of values.
        layers: layer index -> the codec of that layer's keys and values.
    """

    def __init__(self, k: Codec, v: Codec, layers: Mapping | None = None):
        self.kinds, self.layers = {"k": k, "v": v}, {}
        for index, codec in (layers or {}).items():
            if isinstance(index, bool) or not str(index).isdecimal() or not hasattr(codec, "for_layer"):
                raise ConfigError(
                    f"cache.codec.layers={{{index}: {codec}}} cannot be used",
                    options=["a codec for each layer index"],
                    fix="+cache/codec@cache.codec.layers.0=none",
                )
            self.layers[int(index)] = codec
        self.exact = all(codec.exact for codec in self._all())

    def _all(self) -> list[Codec]:
        return [*self.kinds.values(), *self.layers.values()]

    def conflicts(self, others):
        beyond = [index for index in self.layers if index >= len(others.layers)]
        reasons = [
            f"cache.codec.layers names layer {index}, the model has 0 .. {len(others.layers) - 1}: "
            f"leave cache.codec.layers.{index} out"
            for index in beyond
        ]
        return reasons + [reason for codec in self._all() for reason in codec.conflicts(others)]

    def for_layer(self, layer, kind):
        return self.layers.get(layer.index, self.kinds[kind]).for_layer(layer, kind)

    def planes(self, dim):
        raise NotImplementedError("codecs differ by layer: ask for_layer(layer, kind)")

    encode = decode = planes
