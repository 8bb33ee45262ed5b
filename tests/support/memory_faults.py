"""Systems that refuse: the calls below a backend, counted, of which chosen ones fail.

`FaultyLinux` refuses calls of the real system, whose /proc says what is mapped. `FaultyDriver` keeps the few
rules of CUDA's driver that matter here, for the order of calls and for what is left after a refusal; what
real memory does is tested on a GPU.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.memory_backends import SMALL_PAGE
from worker.memory import MappingFailed, PagePool, VirtualRange, cpu
from worker.memory.backend import NO_PAGE, Backend


class Faults:
    """After `arm`, refuses call number `first` and those after it, `count` in all."""

    def __init__(self) -> None:
        self.calls, self.refused, self.has_struck = 0, range(0), False

    def arm(self, first: int, count: int) -> None:
        self.calls, self.refused, self.has_struck = 0, range(first, first + count), False

    def disarm(self) -> None:
        self.refused = range(0)

    def strikes(self) -> bool:
        self.calls += 1
        is_refused = self.calls in self.refused
        self.has_struck |= is_refused
        return is_refused

    def backend(self) -> Backend:
        raise NotImplementedError

    def mapped(self, owned: VirtualRange) -> list[int]:
        """The physical page behind each of the range's pages, as the system has it; -1 for none."""
        raise NotImplementedError


class FaultyLinux(Faults):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        real_mmap, real_libc = cpu._mmap, cpu._libc

        def mmap(address: int | None, *args: int) -> int:
            if address is not None and self.strikes():  # not the reservation of new addresses
                raise MappingFailed("mmap: refused")
            return real_mmap(address, *args)

        def fallocate(*args: int) -> int:
            return errno.EIO if self.strikes() else int(real_libc.fallocate(*args))

        patch.setattr(cpu, "_mmap", mmap)
        patch.setattr(
            cpu, "_libc", SimpleNamespace(mmap=real_libc.mmap, munmap=real_libc.munmap, fallocate=fallocate)
        )

    def backend(self) -> Backend:
        return cpu.CpuBackend(SMALL_PAGE)

    def mapped(self, owned: VirtualRange) -> list[int]:
        return [_page_at(owned.address + i * SMALL_PAGE) for i in range(owned.num_pages)]


def _page_at(address: int) -> int:
    """Return the page that the address is mapped to, by /proc/self/maps; NO_PAGE: none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            is_shared = line.split()[1] == "rw-s"
            return (int(line.split()[2], 16) + address - start) // SMALL_PAGE if is_shared else NO_PAGE
    raise AssertionError(f"the addresses of {address:#x} are nobody's")


class Result(Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_NOT_SUPPORTED = 801


class _Stream:
    def __init__(self, **has: Any) -> None:
        self.__dict__.update(has)


class FaultyDriver(Faults):
    """Handles are numbers, in the order in which they were made; addresses grow for ever.

    Every call on memory needs a context that is current in the calling thread, and no thread begins with one.
    A step that was launched uses all pages that ranges have, until it has ended: unmapping one is an error
    of the caller. `waits`: of the host, for a step.
    """

    PAGE = 2 * 1024 * 1024
    CUresult = Result
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAccessDesc = SimpleNamespace
    CU_MEMHOSTREGISTER_READ_ONLY = 8

    def __init__(self, patch: pytest.MonkeyPatch, memory_pages: int = 1 << 20) -> None:
        super().__init__()
        self.memory_pages = memory_pages
        self.handles: set[int] = set()
        self.spaces: dict[int, int] = {}  # address -> bytes
        self.at: dict[int, int] = {}  # address of a mapped page -> handle
        self.pinned: dict[int, int] = {}  # address of host memory -> bytes
        self.pins_read_only = True
        self._made, self._next = itertools.count(), 1 << 40
        self.num_contexts = 0  # retained
        self.launched = self.ended = self.waits = self.fences = 0
        self.used: dict[int, int] = {}  # address -> the last step that uses it
        self._thread = threading.local()
        patch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=self))
        patch.setitem(sys.modules, "worker.memory.driver", _fresh("worker.memory.driver"))
        patch.setitem(sys.modules, "worker.memory.pinned", _fresh("worker.memory.pinned"))
        self._module = _fresh("worker.memory.cuda")
        self._module.torch = SimpleNamespace(cuda=self._torch_cuda(), device=torch.device)
        patch.setattr(self._module.CudaSpace, "view", lambda _, __, n: torch.empty(n, dtype=torch.uint8))

    def backend(self) -> Backend:
        made: Backend = self._module.CudaBackend()
        self._handle_of = made._handles  # type: ignore[attr-defined]
        return made

    def mapped(self, owned: VirtualRange) -> list[int]:
        page_of = {handle: page for page, handle in self._handle_of.items()} | {None: NO_PAGE}
        return [page_of[self.at.get(owned.address + i * self.PAGE)] for i in range(owned.num_pages)]

    def launch(self, pool: PagePool) -> None:
        """Launch a step, which runs until `end`."""
        self.launched += 1
        for owned in pool._ranges:
            for page in (owned.pages != NO_PAGE).nonzero()[0].tolist():
                self.used[owned.address + page * self.PAGE] = self.launched

    def end(self, steps: int = 1) -> None:
        self.ended = min(self.launched, self.ended + steps)

    def wait_for(self, step: int) -> None:
        self.waits += self.ended < step
        self.ended = max(self.ended, step)

    def _torch_cuda(self) -> SimpleNamespace:
        def refuse() -> None:
            if self.strikes():
                raise RuntimeError("CUDA error: refused")

        def record_event() -> SimpleNamespace:
            refuse()
            self.fences += 1
            step = self.launched
            return SimpleNamespace(query=lambda: self.ended >= step, synchronize=lambda: self.wait_for(step))

        # One object: a set of streams has it once.
        steps = _Stream(cuda_stream=0, record_event=record_event, wait_stream=lambda _: refuse())
        beside = _Stream(cuda_stream=1, synchronize=refuse)
        return SimpleNamespace(
            set_device=lambda _: None,
            device=lambda _: nullcontext(),
            Stream=lambda _: beside,
            current_stream=lambda _: steps,
            default_stream=lambda _: steps,
            mem_get_info=lambda _: (self.memory_pages * self.PAGE, 0),
        )

    def _answer(self, is_allowed: bool, do: Callable[[], object] = lambda: None) -> tuple[Any, ...]:
        if getattr(self._thread, "context", None) is None:
            return (Result.CUDA_ERROR_INVALID_CONTEXT, None)
        if not is_allowed or self.strikes():
            return (Result.CUDA_ERROR_INVALID_VALUE, None)
        return (Result.CUDA_SUCCESS, do())

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    def cuInit(self, _: int) -> tuple[Result]:
        return (Result.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.num_contexts += 1
        return Result.CUDA_SUCCESS, f"context of {device}"

    def cuDevicePrimaryCtxRelease(self, _: int) -> tuple[Result]:
        self.num_contexts -= 1
        return (Result.CUDA_SUCCESS,)

    def cuCtxSetCurrent(self, context: str) -> tuple[Result]:
        self._thread.context = context
        return (Result.CUDA_SUCCESS,)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._answer(True, lambda: self.wait_for(self.launched))

    def cuGetErrorString(self, status: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, status.name.encode()

    def cuMemGetAllocationGranularity(self, *_: object) -> tuple[Any, ...]:
        return Result.CUDA_SUCCESS, self.PAGE

    def cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[Any, ...]:
        address, self._next = self._next, self._next + nbytes
        self.spaces[address] = nbytes
        return Result.CUDA_SUCCESS, address

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        is_empty = not any(address <= at < address + nbytes for at in self.at)
        return self._answer(is_empty and self.spaces[address] == nbytes, lambda: self.spaces.pop(address))

    def cuMemCreate(self, nbytes: int, *_: object) -> tuple[Any, ...]:
        if len(self.handles) == self.memory_pages:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, None)

        def make() -> int:
            handle = next(self._made)
            self.handles.add(handle)
            return handle

        return self._answer(nbytes == self.PAGE, make)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        return self._answer(handle in self.handles, lambda: self.handles.remove(handle))

    def cuMemMap(self, at: int, nbytes: int, offset: int, handle: int, _: int) -> tuple[Any, ...]:
        is_allowed = handle in self.handles and at not in self.at and offset == 0 and nbytes == self.PAGE
        return self._answer(is_allowed, lambda: self.at.update({at: handle}))

    def cuMemSetAccess(self, at: int, nbytes: int, *_: object) -> tuple[Any, ...]:
        return self._answer(all(page in self.at for page in range(at, at + nbytes, self.PAGE)))

    def cuMemsetD8Async(self, at: int, _: int, nbytes: int, __: int) -> tuple[Any, ...]:
        return self.cuMemSetAccess(at, nbytes)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        if address in self.pinned:
            return (Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        if flags and not self.pins_read_only:
            return (Result.CUDA_ERROR_NOT_SUPPORTED,)
        return self._answer(True, lambda: self.pinned.update({address: nbytes}))[:1]

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        return self._answer(address in self.pinned, lambda: self.pinned.pop(address))[:1]

    def cuMemUnmap(self, at: int, nbytes: int) -> tuple[Any, ...]:
        pages = range(at, at + nbytes, self.PAGE)
        assert all(self.used.get(page, 0) <= self.ended for page in pages), "a step in flight uses them"

        def unmap() -> None:
            for page in pages:
                del self.at[page]

        return self._answer(all(page in self.at for page in pages), unmap)


def _fresh(name: str) -> Any:
    """The module once more, known to nobody else: it sees the driver of its import."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_the_records_are_true(faults: Faults, pool: PagePool) -> None:
    pool.check_integrity()
    for owned in pool._ranges:
        assert owned.mapped.tolist() == faults.mapped(owned)
