"""Mixed precision: one codec for keys, one for values, and others for single layers.

Keys are more sensitive than values to rounding, and so are first layers and those with a small window (Liu et al.,
"KIVI", arXiv:2402.02750; Hooper et al., "KVQuant", arXiv:2401.18079). Which codec goes where is configuration: any
codec that is installed can stand in each place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvframe.errors import OptionError
from kvframe.interfaces import Codec


class Mixed(Codec):
    """Answers other codecs, layer by layer; stores nothing itself.

    Args:
        k, v: codecs of keys and of values.
        layers: layer index -> the codec of that layer's keys and values.
    Raises: OptionError for what is no codec.
    """

    def __init__(self, k: Codec, v: Codec, layers: Mapping | None = None):
        for name, codec in (("k", k), ("v", v)):
            if not _is_codec(codec):
                raise OptionError(name, codec, "is no codec", fix="cache/codec@{name}=none")
        if layers is not None and not isinstance(layers, Mapping):
            raise _no_layers(layers)
        self.kinds, self.layers = {"k": k, "v": v}, {}
        for index, codec in (layers or {}).items():
            decimal = str(index).isdecimal() and not isinstance(index, bool)
            if not decimal or int(index) in self.layers or not _is_codec(codec):
                raise _no_layers({index: type(codec).__name__ if _is_codec(codec) else codec})
            self.layers[int(index)] = codec
        self.exact = all(codec.exact for codec in (k, v, *self.layers.values()))

    def _place(self, layer, kind: str) -> str:
        """Where the codec of a layer and kind stands, within this one."""
        return f"layers.{layer.index}" if layer.index in self.layers else kind

    def conflicts(self, others):
        """What each codec says of the layers and kinds that it serves, and layers that do not exist."""
        key, last = others.codec_key, len(others.layers) - 1
        reasons = [
            f"{key}.layers names layer {index}, the model has 0 .. {last}: leave {key}.layers.{index} out"
            for index in self.layers
            if index > last
        ]
        served: dict[str, list] = {}
        for layer, kind, size in others.stored:
            served.setdefault(self._place(layer, kind), []).append((layer, kind, size))
        for place, stored in served.items():
            layer, kind, _ = stored[0]
            within = replace(others, stored=tuple(stored), codec_key=f"{key}.{place}")
            reasons += self._codec(layer, kind).conflicts(within)
        return reasons

    def _codec(self, layer, kind: str) -> Codec:
        return self.layers.get(layer.index, self.kinds[kind])

    def for_layer(self, layer, kind):
        return self._codec(layer, kind).for_layer(layer, kind)

    def planes(self, dim):
        raise NotImplementedError("codecs differ by layer: ask for_layer(layer, kind)")

    encode = decode = planes


def _is_codec(part: Any) -> bool:
    return hasattr(part, "for_layer")


def _no_layers(value: Any) -> OptionError:
    return OptionError("layers", value, options=["a codec for each layer index"], fix="+cache/codec@{name}.0=none")
