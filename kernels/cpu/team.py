"""One team of threads for torch's products and our kernels: torch's own OpenMP runtime.

Two pools on the same cores fight: each spins while the other works. So a kernel is compiled to a C function
and handed to the `GOMP_parallel` of the runtime that torch loaded, whose threads are the very threads that
ran the last product and still spin. A launch costs about 2 us (numba's `omp` layer binds a second libgomp by
file name, its `workqueue` wakes sleeping threads in 20 us; see bench/LOG.md).

A kernel is `body(params)`, run by every thread of the team at once. `params` points at int64 words: word 0
counts the work items taken, word 1 the items there are, the rest are the kernel's own. Threads take items
with `next_item` until none is left, so a core that is busy elsewhere slows nobody down for long.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from numba import cfunc, njit, types

from kernels.cpu.simd import fetch_add, read_i64

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[-.][^/]*$")

Launch = Callable[..., None]


def compiled(function: Callable[..., Any]) -> Any:
    """numba's njit with this package's settings; a folder that cannot hold the cache costs only time."""
    try:
        return njit(function, nogil=True, cache=True, error_model="numpy")
    except RuntimeError:  # no cache locator: a read-only installation without a home directory
        return njit(function, nogil=True, error_model="numpy")


def _c_function(function: Callable[..., Any]) -> Any:
    signature = types.void(types.int64)  # the address of params; a pointer is one word
    try:
        return cfunc(signature, cache=True)(function)
    except RuntimeError:
        return cfunc(signature)(function)


@compiled
def next_item(params: int) -> int:
    """Index of a work item no other thread has, or -1 when all are taken."""
    item = fetch_add(params, 1)
    return item if item < read_i64(params + 8) else -1


def _loaded_openmp() -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _OPENMP.search(line):
            return line.split(maxsplit=5)[5]
    return None


@cache
def _gomp_parallel() -> Launch | None:
    """`GOMP_parallel(function, data, num_threads, flags)` of torch's runtime; None where it has none."""
    path = _loaded_openmp()
    launch = getattr(ctypes.CDLL(path), "GOMP_parallel", None) if path else None
    if launch is None:
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    launch.restype = None
    found: Launch = launch
    return found


class Kernel:
    """A compiled body and the layout of its words: `call(items, *words)`.

    `layout` is a struct format of the words behind the first two: q for integers and addresses, d for
    floats. Fewer than two items run on the calling thread.
    """

    def __init__(self, function: Callable[..., Any], layout: str) -> None:
        self._function = function
        self._layout = struct.Struct("qq" + layout)

    @cached_property
    def _body(self) -> Any:
        return _c_function(self._function)

    @cached_property
    def _alone(self) -> Launch:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._body.address)

    def compile(self) -> None:
        """Now instead of at the first call."""
        _ = self._alone

    def __call__(self, items: int, *words: float) -> None:
        params = ctypes.create_string_buffer(self._layout.size)
        self._layout.pack_into(params, 0, 0, items, *words)
        threads = min(items, torch.get_num_threads())
        launch = _gomp_parallel()
        if threads < 2 or launch is None:
            self._alone(params)
        else:
            launch(self._body.address, params, threads, 0)
