"""One team of threads for torch's products and our kernels: torch's own OpenMP runtime.

Two pools on the same cores fight: each spins while the other works. So a kernel is compiled to a C function
and handed to the `GOMP_parallel` of the runtime that torch loaded, whose threads are the very threads that
ran the last product and still spin. A launch costs about 2 us (numba's `omp` layer binds a second libgomp by
file name, its `workqueue` wakes sleeping threads in 20 us; see bench/LOG.md).

A kernel is `body(kind)`, run by every thread of the team at once. `kind` points at 8-byte words and its type
names the dtype of the tensors: word 0 counts the work items taken, word 1 the items there are, the rest are
the kernel's own. Threads take items with `next_item` until none is left, so a core that is busy elsewhere
does not hold up the others' share.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from numba import types

from kernels.cpu.compiled import c_function, compiled
from kernels.cpu.simd import KINDS, address_of, fetch_add, read_i64

_OPENMP = re.compile(r"/lib(gomp|iomp5|omp)[-.][^/]*$")

Launch = Callable[..., None]


@compiled
def next_item(kind: Any) -> int:
    """Return the index of a work item that no other thread has; -1 when all are taken."""
    params: int = address_of(kind)
    item: int = fetch_add(params, 1)
    return item if item < read_i64(params + 8) else -1


_recorder: ContextVar[CallRecorder | None] = ContextVar("recorder of kernel calls", default=None)


class CallRecorder(Protocol):
    """Takes the calls of kernels in place of running them."""

    def add(self, name: str, address: int, params: Any, items: int) -> None:
        """Take the call of the C function at `address` with `params`, for `items` work items."""


@contextmanager
def recorded_by(recorder: CallRecorder) -> Iterator[None]:
    """Give the kernel calls inside, in this thread, to `recorder`; nothing of them runs."""
    before = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(before)


def _loaded_openmp() -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _OPENMP.search(line):
            return line.split(maxsplit=5)[5]
    return None


@cache
def gomp_parallel() -> Launch | None:
    """Return GOMP_parallel(function, data, num_threads, flags) of torch's runtime; None if it has none."""
    path = _loaded_openmp()
    launch = getattr(ctypes.CDLL(path), "GOMP_parallel", None) if path else None
    if launch is None:
        return None
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    launch.restype = None
    found: Launch = launch
    return found


@cache
def function_address(name: str) -> int:
    """Return the address of a function of torch's OpenMP runtime or of the C library; 0 if there is none."""
    for library in (_loaded_openmp(), None):
        found = getattr(ctypes.CDLL(library), name, None)
        if found:
            return ctypes.cast(found, ctypes.c_void_p).value or 0
    return 0


class Kernel:
    """A kernel with the layout of its words; call it as `kernel(dtype, items, *words)`.

    `layout` is a struct format of the words behind the first two: q for integers and addresses, d for
    floats. Fewer than two items run on the calling thread. Compiled per dtype at its first call.
    """

    def __init__(self, function: Callable[..., Any], layout: str) -> None:
        self._function = function
        self._layout = struct.Struct("qq" + layout)
        self._words: Callable[[], Any] = ctypes.c_char * self._layout.size
        self._compiled: dict[torch.dtype, tuple[int, Launch]] = {}

    def compile(self, dtype: torch.dtype) -> tuple[int, Launch]:
        """Return the address of the C function for `dtype`, and the function; numba caches them on disk."""
        if dtype not in self._compiled:
            built = c_function(types.void(types.CPointer(KINDS[dtype])), self._function)
            self._compiled[dtype] = built.address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(built.address)
        return self._compiled[dtype]

    def __call__(self, dtype: torch.dtype, items: int, *words: float) -> None:
        address, alone = self._compiled.get(dtype) or self.compile(dtype)
        params = self._words()
        self._layout.pack_into(params, 0, 0, items, *words)
        if recorder := _recorder.get():
            recorder.add(self._function.__name__, address, params, items)
            return
        launch = gomp_parallel() if items > 1 else None
        threads = min(items, torch.get_num_threads()) if launch else 1
        if launch and threads > 1:
            launch(address, params, threads, 0)
        else:
            alone(params)
