"""Fixed scales: one number, a mapping of layers, or a file that `kvframe calibrate` wrote.

scales: 0.02                                 all layers, keys and values
scales: {0: 0.05, 1: {k: 0.1, v: 0.02}}      every layer of the model has to be named
scales: calib.json                           {"layers": {"0": {"k": 31.5, "v": 4.2}, ...}}: largest sizes; the scale
                                             is what the format's largest number stands for, size / largest
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvframe.errors import ConfigError

KEY = "cache.codec.scales"
LEAST, MOST = 2.0**-126, 1e30
OPTIONS = ("null", "a number > 0", "{LAYER: NUMBER, ...}", "{LAYER: {k: NUMBER, v: NUMBER}, ...}", "FILE.json")
FIX = "kvframe calibrate out=calib.json, then cache.codec.scales=calib.json"


@dataclass(frozen=True)
class Scales:
    """Attributes: common: the scale of all layers, or None; layers: layer index -> {"k", "v"}; origin: for messages."""

    common: float | None
    layers: dict[int, dict[str, float]]
    origin: str

    def of(self, layer: int, kind: str) -> float:
        """The scale of one layer and kind, a float32. Raises ConfigError where there is none."""
        if self.common is not None:
            return self.common
        if layer not in self.layers:
            known = ", ".join(map(str, sorted(self.layers))) or "none"
            raise ConfigError(f"{self.origin} has no scale for layer {layer}; it has layers: {known}", fix=FIX)
        return self.layers[layer][kind]


def read(value, largest: float) -> Scales | None:
    """What the option `scales` says; `largest`: the largest number of the format."""
    if value is None:
        return None
    if isinstance(value, str):
        return _from_file(value, largest)
    if isinstance(value, Mapping):
        return Scales(None, _layers(value, f"{KEY}={dict(value)!r}", 1.0), f"{KEY}={dict(value)!r}")
    return Scales(_number(value, f"{KEY}={value!r}"), {}, f"{KEY}={value!r}")


def _from_file(name: str, largest: float) -> Scales:
    where = f"{KEY}={name}"
    try:
        layers = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))["layers"]
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}", options=OPTIONS, fix=FIX) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} is no calibration file: it has no JSON key 'layers'", fix=FIX) from error
    if not isinstance(layers, Mapping):
        raise ConfigError(f"{where} is no calibration file: 'layers' is no mapping of layers", fix=FIX)
    return Scales(None, _layers(layers, where, largest, sizes=True), where)


def _layers(mapping: Mapping, where: str, largest: float, sizes: bool = False) -> dict[int, dict[str, float]]:
    """The scales `number / largest` of each layer. sizes: numbers may be 0 (a layer that only ever saw zeros)."""
    found = {}
    for key, value in mapping.items():
        try:
            if isinstance(key, bool) or int(key) < 0:
                raise ValueError
        except (TypeError, ValueError):
            raise ConfigError(f"{where} names layer {key!r}", options=["an integer >= 0"], fix=FIX) from None
        pair = value if isinstance(value, Mapping) else {"k": value, "v": value}
        if set(pair) != {"k", "v"}:
            raise ConfigError(f"{where}: layer {key} has {sorted(map(str, pair))}", options=["a number", "k and v"])
        of = lambda kind, key=key, pair=pair: _number(pair[kind], f"{where}: layer {key}, {kind}", sizes)
        found[int(key)] = {kind: float(np.float32(max(of(kind) / largest, LEAST))) for kind in ("k", "v")}
    return found


def _number(value, where: str, zero: bool = False) -> float:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    if not fine or not (0 if zero else LEAST) <= value <= MOST:
        raise ConfigError(f"{where}: {value!r} cannot be used", options=OPTIONS if not zero else ["a number >= 0"])
    return float(np.float32(value))
