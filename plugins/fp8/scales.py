"""Fixed scales: one number, a mapping of layers, or a file that `kvframe calibrate` wrote.

scales: 0.02                                 all layers, keys and values
scales: {0: 0.05, 1: {k: 0.1, v: 0.02}}      every layer that stores something has to be named
scales: calib.json                           {"layers": {"0": {"k": 31.5, "v": 4.2}, ...}}: largest sizes; the scale
                                             is what the format's largest number stands for, size / largest
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvframe.errors import OptionError

OPTION = "scales"
LEAST, MOST = 2.0**-126, 1e30
OPTIONS = ("null", "a number > 0", "{LAYER: NUMBER, ...}", "{LAYER: {k: NUMBER, v: NUMBER}, ...}", "FILE.json")
FIX = "{name}=null, or kvframe calibrate out=calib.json and then {name}=calib.json"


@dataclass(frozen=True)
class Scales:
    """Attributes: given: the option; common: the scale of all layers, or None; layers: layer index -> {"k", "v"}."""

    given: Any
    common: float | None
    layers: dict[int, dict[str, float]]

    def of(self, layer: int, kind: str) -> float | None:
        """The scale of one layer and kind, a float32; None where there is none."""
        return self.layers.get(layer, {}).get(kind) if self.common is None else self.common

    def conflicts(self, stored: Iterable[int], layers: int, key: str) -> Iterator[str]:
        """Why they do not fit a model of so many layers that stores vectors in those of `stored`. key: of the codec."""
        if self.common is not None:
            return
        name = f"{key}.{OPTION}"
        what, fix, known = f"{name}={self.given!r}", FIX.replace("{name}", name), set(self.layers)
        missing, beyond = set(stored) - known, known - set(range(layers))
        if missing:
            yield f"{what} has no scale for layer {_listed(missing)}; it has layers: {_listed(known)}: {fix}"
        if beyond:
            yield f"{what} names layer {_listed(beyond)}, the model has 0 .. {layers - 1}: {fix}"


def read(value: Any, largest: float) -> Scales | None:
    """What the option `scales` says; `largest`: the largest number of the format. Raises OptionError."""
    if value is None:
        return None
    if isinstance(value, str):
        return Scales(value, None, _layers(value, _from_file(value), largest, sizes=True))
    if isinstance(value, Mapping):
        return Scales(dict(value), None, _layers(dict(value), value, 1.0))
    if not _fits(value):
        raise _wrong(value)
    return Scales(value, float(np.float32(value)), {})


def _from_file(name: str) -> Mapping:
    try:
        layers = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))["layers"]
    except OSError as error:
        raise _wrong(name, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _wrong(name, "is no calibration file: it has no JSON key 'layers'") from error
    if not isinstance(layers, Mapping):
        raise _wrong(name, "is no calibration file: 'layers' is no mapping of layers")
    return layers


def _layers(given: Any, mapping: Mapping, largest: float, sizes: bool = False) -> dict[int, dict[str, float]]:
    """The scales `number / largest` of each layer. sizes: numbers may be 0 (a layer that only ever saw zeros)."""
    found: dict[int, dict[str, float]] = {}
    for key, value in mapping.items():
        if isinstance(key, bool) or not str(key).isdecimal() or int(key) in found:
            raise _wrong(given, f"names layer {key!r}", "an integer >= 0, once")
        pair = value if isinstance(value, Mapping) else {"k": value, "v": value}
        if set(pair) != {"k", "v"}:
            raise _wrong(given, f"has {sorted(map(str, pair))} for layer {key}", "a number", "k and v")
        for kind, number in pair.items():
            if not _fits(number, sizes):
                words = f"has {number!r} as {kind} of layer {key}"
                raise _wrong(given, words, "a number >= 0" if sizes else "a number > 0")
        found[int(key)] = {kind: float(np.float32(max(pair[kind] / largest, LEAST))) for kind in ("k", "v")}
    return found


def _fits(value: Any, zero: bool = False) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (0 if zero else LEAST) <= value <= MOST


def _wrong(value: Any, why: str = "cannot be used", *valid: str) -> OptionError:
    return OptionError(OPTION, value, why, options=valid or OPTIONS, fix=FIX)


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers))) or "none"
