"""What the `cpu` kernel has to know of a codec to read its planes without decoding them.

A plain codec is read as the model's dtype. An affine one (see `Codec.affine`) is read as int8, or as one of the float8
formats when its table of values is that format's, or through its table.

Shape legend: D size of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from kvframe.interfaces import Codec
from kvframe.types import LayerSpec

DIM = 64  # vectors of a layer that nobody has seen yet; how they are read does not depend on it
DTYPES = ("float32", "bfloat16")  # of queries, results and plain planes
SCALES = ("float32", "float16")
FORMATS = {"float8_e4m3fn": 256.0, "float8_e5m2": 1.0}  # name -> unit, see `cpu_bits`


@dataclass(frozen=True, eq=False, slots=True)
class Reader:
    """How one kind of vectors is read.

    Attributes:
        type: what the payload points at: a dtype of DTYPES, int8, a name of FORMATS, or uint8 (through `table`).
        factor: what all numbers are multiplied by, besides their scales.
        scale: dtype of the scale plane, or None.
        fixed: the scale of all vectors where there is no plane. table: float32 [256] or None.
        peak, most: see `Codec.peak`, and the largest scale that this allows; peak None: only `encode` makes codes.
    """

    type: str
    factor: float = 1.0
    scale: str | None = None
    fixed: float = 1.0
    table: np.ndarray | None = None
    peak: float | None = None
    most: float = 1.0

    @property
    def plain(self) -> bool:
        return self.type in DTYPES


def reader(codec: Codec, dim: int, dtype: str) -> Reader | str:
    """The Reader for vectors `[dim]` of a model of this dtype, or the reason why there is none."""
    if codec.plain:
        return Reader(dtype)
    if not codec.affine:
        return "it reads payload * scale only, and this codec stores something else"
    planes = codec.planes(dim)
    payload, scale = planes.get("payload"), planes.get("scale")
    names = {"payload"} if scale is None else {"payload", "scale"}
    if set(planes) != names or codec.group != 1 or any(plane.per != "token" for plane in planes.values()):
        return f"it reads planes payload and scale per token, not {', '.join(sorted(planes))}"
    if payload.shape != (dim,) or (scale is not None and (scale.shape != (1,) or scale.dtype not in SCALES)):
        return "it reads one number per channel and one scale of float32 or float16 per vector"
    values, fixed = codec.values(), 1.0 if codec.fixed is None else float(codec.fixed)
    if payload.dtype == "int8" and values is None:
        kind, unit, table = "int8", 1.0, None
    elif payload.dtype == "uint8" and values is not None and np.shape(values) == (256,):
        kind, unit, table = "uint8", 1.0, np.ascontiguousarray(values, dtype=np.float32)
        for name, its_unit in FORMATS.items():
            if np.array_equal(table, format_values(name), equal_nan=True):
                kind, unit, table = name, its_unit, None
    else:
        return f"it reads int8 numbers, or uint8 codes of a table of 256 values, not {payload.dtype}"
    stored = None if scale is None else scale.dtype
    peak = codec.peak if kind != "uint8" and stored in (None, "float32") else None
    return Reader(kind, unit * fixed if stored is None else unit, stored, fixed, table, peak, most_scale(peak or 1.0))


def likely_readers(codec: Codec | None, dtype: str) -> list[tuple[Reader, Reader]]:
    """How layers of a model of this dtype will read keys and values, by a guess at two of them: the first one, which
    is an exception in some mixtures, and the next. Empty where nothing can be read. codec None: a plain one."""
    if codec is None:
        return [(Reader(dtype), Reader(dtype))]
    found = []
    for index in (0, 1):
        layer = LayerSpec(index, 1, 1, DIM, DIM, 1.0, dtype=dtype)
        try:
            pair = tuple(reader(codec.for_layer(layer, kind), DIM, dtype) for kind in "kv")
        except Exception:  # whatever is wrong with it, or with a layer that may not exist, is said when it is used
            continue
        if all(isinstance(how, Reader) for how in pair):
            found.append(pair)
    return found


def most_scale(peak: float) -> float:
    """The largest float32 whose product with `peak` is finite."""
    top = float(np.finfo(np.float32).max)
    most = np.float32(top / peak)
    return float(most if float(most) * peak <= top else np.nextafter(most, np.float32(0)))


@cache
def format_values(name: str) -> np.ndarray:
    """float32 [256]: the values of a float8 format."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
