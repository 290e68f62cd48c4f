"""Compiled functions on the threads of a CPU: where they come from, and how they are called.

A function is a C callback of one argument, the address of an int64 array of sizes and addresses: no tensor is unpacked
in a call, the GIL is free, and the thread team of torch runs it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import zlib
from pathlib import Path

import numpy as np

PLACES = {  # first part of a name -> module of kvframe.kernels and the function that makes it of the other parts
    "scatter": ("cpu_decode", "scatter_function"),
    "attend": ("cpu_decode", "attend_function"),
    "encode": ("cpu_encode", "encode_function"),
    "linear": ("cpu_multiply", "linear_function"),
    "norm": ("cpu_rowwise", "norm_function"),
    "chain": ("cpu_chained", "chain_function"),
    "rotate": ("cpu_rowwise", "rotate_function"),
}
SOURCES = ("cpu_bits", "cpu_vector", "cpu_math", "cpu_rows", *sorted({module for module, _ in PLACES.values()}))

_lock, _callbacks, _team = threading.Lock(), {}, []


def maker(*name: str):
    """The Python function of this name, before it is compiled."""
    module, function = PLACES[name[0]]
    stamp = 0  # numba watches the time of the file of a function only
    for source in SOURCES:
        stamp = zlib.crc32(Path(__file__).with_name(f"{source}.py").read_bytes(), stamp)
    return getattr(importlib.import_module(f"kvframe.kernels.{module}"), function)(*name[1:], stamp)


def compiled(*name: str):
    """A C callback, from the disk cache or compiled: `("scatter",)` and `("encode", ...)` store, `("attend", ...)`
    attends, `("linear", ...)` multiplies, `("norm",)` is a norm,
    `("rotate", ...)` a rotary embedding, `("chain",)` all of them in a row.

    numba keeps its cache beside the module, or in NUMBA_CACHE_DIR or the user's cache folder when that is read-only. It
    finds a function again when what it closes over are plain values: the functions that it calls are globals of its
    module.
    """
    from numba import cfunc

    try:
        return cfunc("void(int64)", cache=True, error_model="numpy")(maker(*name))
    except RuntimeError:  # no folder can be written
        return cfunc("void(int64)", error_model="numpy")(maker(*name))


def callback(*name: str):
    """A compiled function (see `compiled`) as a ctypes `void f(int64 address)` that runs without the GIL."""
    if name not in _callbacks:
        with _lock:
            if name not in _callbacks:
                native = compiled(*name)
                function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(native.address)
                function.native = native  # its code lives as long as this object
                function.pointer = native.address
                _callbacks[name] = function
    return _callbacks[name]


def team():
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP runtime that torch uses, or None.

    A pool of our own would fight with torch's workers, which spin for milliseconds after each operation.
    """
    if not _team:
        try:
            function = ctypes.CDLL(None).GOMP_parallel
            function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint)
            function.restype = None
        except (AttributeError, OSError, TypeError):
            function = None
        _team.append(function)
    return _team[0]


@functools.cache
def team_size() -> int:
    """The address of `omp_get_num_threads`: a team may have fewer threads than were asked for."""
    return ctypes.cast(ctypes.CDLL(None).omp_get_num_threads, ctypes.c_void_p).value


def run(function, at: int, threads: int) -> None:
    """Runs `function(at)` on so many threads at once."""
    if threads > 1:
        team()(function.pointer, at, threads, 0)
    else:
        function(at)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
