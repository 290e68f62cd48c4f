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
import torch

PLACES = {  # first part of a name -> module of kvframe.kernels and the function that makes it of the other parts
    "scatter": ("cpu_decode", "scatter_function"),
    "attend": ("cpu_decode", "attend_function"),
    "encode": ("cpu_encode", "encode_function"),
    "linear": ("cpu_multiply", "linear_function"),
    "norm": ("cpu_rowwise", "norm_function"),
    "chain": ("cpu_chained", "chain_function"),
    "rotate": ("cpu_rowwise", "rotate_function"),
}
NEXT = 1  # the word of every block of arguments that counts the pieces which a thread has taken

_lock, _callbacks = threading.Lock(), {}


@functools.cache
def _stamp() -> int:
    """Of all that compiled functions are made of: numba watches the time of the file of a function only."""
    stamp = 0
    for source in sorted(Path(__file__).parent.glob("cpu_*.py")):
        stamp = zlib.crc32(source.read_bytes(), stamp)
    return stamp


def maker(*name: str):
    """The Python function of this name, before it is compiled."""
    module, function = PLACES[name[0]]
    return getattr(importlib.import_module(f"kvframe.kernels.{module}"), function)(*name[1:], _stamp())


def compiled(*name: str):
    """A C callback, from the disk cache or compiled. Names: `("scatter",)` and `("encode", dtype, type)` store,
    `("attend", ...)` attends, `("linear", many)` multiplies, `("norm",)` is a norm, `("rotate", dtype)` a rotary
    embedding, `("chain",)` the latter three and element-wise operations in a row.

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


@functools.cache
def team():
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP runtime that torch uses, or None.

    A pool of our own would fight with torch's workers, which spin for milliseconds after each operation.
    """
    try:
        function, _ = ctypes.CDLL(None).GOMP_parallel, ctypes.CDLL(None).omp_get_num_threads  # see `team_size`
        function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
    except (AttributeError, OSError, TypeError):
        return None
    return function


@functools.cache
def team_size() -> int:
    """The address of `omp_get_num_threads`: a team may have fewer threads than were asked for. Only where there is a
    `team`."""
    return ctypes.cast(ctypes.CDLL(None).omp_get_num_threads, ctypes.c_void_p).value


def threads(worth: bool = True) -> int:
    """How many threads share work that is worth more than one."""
    return torch.get_num_threads() if worth and team() is not None else 1


def run(function, at: int, threads: int) -> None:
    """Runs `function(at)` on so many threads at once; more than one only where there is a `team`."""
    if threads > 1:
        team()(function.pointer, at, threads, 0)
    else:
        function(at)


def address(array: np.ndarray) -> int:
    """Where the first number of an array lies."""
    return array.__array_interface__["data"][0]
