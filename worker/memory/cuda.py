"""Pages on a GPU: CUDA's virtual memory management, through cuda-bindings.

A physical page is created when it is first mapped, and kept: a budget of 128 GiB is 65,536 pages, and a start
does not wait for unused ones. The pool takes the lowest free numbers, so a page is created only if every page
created before is in use. Same contract as the CPU backend, same tests.

Neither mapping nor unmapping waits for the device. Pages are zeroed in a stream of their own, which later
work in the caller's stream comes after; the pool unmaps them behind a fence (`PagePool`).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from worker.memory.backend import (
    NO_PAGE,
    AddressSpace,
    Finish,
    MappingFailed,
    OnWritten,
    PageNumbers,
    write_only,
)
from worker.memory.driver import PrimaryContext, check
from worker.memory.pool import runs_of

log = logging.getLogger(__name__)


class CudaSpace(AddressSpace):
    """Reserved device addresses. A kernel that touches an unmapped one ends in an illegal access."""

    def __init__(self, nbytes: int, device: torch.device, dropped: _Dropped) -> None:
        super().__init__(int(check(driver.cuMemAddressReserve(nbytes, 0, 0, 0))), nbytes, dropped.page_bytes)
        self._device = device
        # Not at exit: the driver shuts down then and frees everything itself.
        weakref.finalize(self, dropped.add, self.address, self.pages).atexit = False

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        foreign = _DeviceBytes(self, self.address + offset_bytes, nbytes)
        seen = torch.as_tensor(foreign, device=self._device)  # the device named: without it torch copies
        if seen.data_ptr() != self.address + offset_bytes:
            raise MappingFailed(f"torch copied memory of {self._device} instead of viewing it")
        return seen


class _DeviceBytes:
    """The interface through which torch views foreign device memory, and keeps it alive."""

    def __init__(self, space: CudaSpace, address: int, nbytes: int) -> None:
        self.space = space
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class _Dropped:
    """The addresses of spaces that are gone, until the backend frees them.

    A finaliser runs in any thread at any time, even while a graph is captured, where a wait for the device
    would end the capture. So it only notes the addresses, as long as the backend is there to free them.
    """

    def __init__(self, page_bytes: int, context: PrimaryContext) -> None:
        self.page_bytes = page_bytes
        self.is_orphaned = False  # nobody calls `free`
        self._context = context
        self._spaces: deque[tuple[int, PageNumbers]] = deque()

    def add(self, address: int, pages: PageNumbers) -> None:
        self._spaces.append((address, pages))
        if self.is_orphaned:
            self.free()

    def free(self) -> None:
        """Unmap what the owners left mapped, and free the addresses. Those that are refused are lost.

        The driver keeps addresses that have memory behind them, and the memory with them. Only a pool that
        was not closed leaves pages, and waits for the device here.
        """
        with suppress(IndexError):  # another thread, or a finaliser in between, may have been quicker
            while self._spaces:
                self._free(*self._spaces.popleft())

    def _free(self, address: int, pages: PageNumbers) -> None:
        try:
            self._context.make_current()
            if np.any(pages != NO_PAGE):
                check(driver.cuCtxSynchronize())
                _unmap_runs(address, pages, self.page_bytes)
            check(driver.cuMemAddressFree(address, len(pages) * self.page_bytes))
        except MappingFailed as error:
            log.warning("%d pages of addresses at %#x cannot be freed: %s", len(pages), address, error)


class _CudaFence:
    """Events in the streams that may use pages."""

    def __init__(self, streams: Iterable[torch.cuda.Stream]) -> None:
        self._events = [stream.record_event() for stream in streams]

    @property
    def has_passed(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


class CudaBackend:
    """The memory of one GPU, in pages of a multiple of the driver's granularity (2 MiB)."""

    def __init__(self, device: str | torch.device = "cuda:0", page_bytes: int = 2 * 1024 * 1024) -> None:
        """Make `device` this thread's current device.

        Raises ValueError for a page size that the driver cannot map, and MappingFailed.
        """
        self.device = torch.device("cuda", torch.device(device).index or 0)
        self.page_bytes = page_bytes
        torch.cuda.set_device(self.device)
        self._context = PrimaryContext(self.device.index)
        self._context.make_current()
        # Zeroes new pages beside the compute streams.
        self._stream = torch.cuda.Stream(self.device)
        # Beside both, for weights that come in while steps run: their copies, and what checks these.
        self._copies: torch.cuda.Stream | None = None
        self._checks: torch.cuda.Stream | None = None
        self._prop = _allocation_properties(self.device.index)
        granularity = int(check(driver.cuMemGetAllocationGranularity(self._prop, _MINIMUM)))
        if page_bytes <= 0 or page_bytes % granularity:
            raise ValueError(f"page_bytes is {page_bytes}; it must be a multiple of {granularity}")
        self._handles: dict[int, Any] = {}  # handles of physical pages, the newest last
        self._dropped = _Dropped(page_bytes, self._context)
        weakref.finalize(self, _end, self._dropped, self._handles, self._context).atexit = False

    def create(self, num_pages: int) -> None:
        """Check that the budget fits; pages are made when they are first mapped."""
        free, wanted = torch.cuda.mem_get_info(self.device)[0], num_pages * self.page_bytes
        if wanted > free:
            raise MappingFailed(
                f"{num_pages} pages take {wanted >> 20} MiB; {self.device} has {free >> 20} MiB free;"
                " lower memory_mb"
            )

    def reserve(self, nbytes: int) -> CudaSpace:
        self._context.make_current()
        self._dropped.free()
        return CudaSpace(nbytes, self.device, self._dropped)

    def make(self, pages: PageNumbers) -> None:
        """Create those of these pages that were never mapped before: all of them, or none."""
        self._context.make_current()
        before = len(self._handles)
        missing = [page for page in pages.tolist() if page not in self._handles]
        try:
            for page in missing:
                self._handles[page] = check(driver.cuMemCreate(self.page_bytes, self._prop, 0))
        except MappingFailed as error:
            made = len(self._handles) - before
            _release(self._handles, self._context, keep=before)
            raise MappingFailed(
                f"{self.device} gave {made} of {len(missing)} more pages of {self.page_bytes >> 10} KiB, and"
                f" holds {before}: free what else uses its memory, or lower memory_mb ({error})"
            ) from error

    def map(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool = True) -> None:
        self.make(pages)
        self._map(space, first_page, pages, zeroed, self._hold_users)

    def map_beside(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool) -> None:
        self._map(space, first_page, pages, zeroed, self._stream.synchronize)

    def _map(
        self,
        space: AddressSpace,
        first_page: int,
        pages: PageNumbers,
        zeroed: bool,
        wait: Callable[[], None],
    ) -> None:
        """Map pages, and zero them where `zeroed`: beside what runs, since nothing uses them yet.

        wait: has whoever must wait for the zeros do so.
        """
        self._context.make_current()
        at, nbytes = space.address + first_page * self.page_bytes, len(pages) * self.page_bytes
        try:
            for i, page in enumerate(pages.tolist(), first_page):
                target = space.address + i * self.page_bytes
                check(driver.cuMemMap(target, self.page_bytes, 0, self._handles[page], 0))
                space.pages[i] = page
            check(driver.cuMemSetAccess(at, nbytes, [_read_write(self._prop.location)], 1))
            if zeroed:
                check(driver.cuMemsetD8Async(at, 0, nbytes, self._stream.cuda_stream))
                wait()
        except RuntimeError:  # the driver's MappingFailed, or torch's own about the stream
            self._stream.synchronize()
            _unmap_runs(at, space.pages[first_page : first_page + len(pages)], self.page_bytes)
            raise

    def fence(self) -> _CudaFence:
        self._context.make_current()
        self._dropped.free()
        return _CudaFence(self._users)

    def unmap(self, space: AddressSpace, first_page: int, num_pages: int) -> None:
        # cuMemUnmap waits for nothing: a kernel that still reads these pages would end in an illegal access.
        self._context.make_current()
        mapped = space.pages[first_page : first_page + num_pages]
        _unmap_runs(space.address + first_page * self.page_bytes, mapped, self.page_bytes)

    def begin_write(
        self, space: AddressSpace, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only
    ) -> Finish:
        self._context.make_current()
        with torch.cuda.device(self.device):
            if self._copies is None or self._checks is None:
                self._copies, self._checks = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self._copies.wait_stream(self._stream)
            try:
                with torch.cuda.stream(self._copies):
                    space.view(offset_bytes, source.numel()).copy_(source, non_blocking=True)
                self._checks.wait_stream(self._copies)
                with torch.cuda.stream(self._checks):  # of its own, so that the next copy waits for no check
                    then(offset_bytes, offset_bytes + source.numel())
                finish: Finish = self._checks.record_event().synchronize
                return finish
            except BaseException:
                self._copies.synchronize()  # no fence is behind these streams
                self._checks.synchronize()
                raise

    def discard(self, pages: PageNumbers) -> None:
        """Do nothing: a mapped page of a GPU keeps its memory."""

    def close(self) -> None:
        _end(self._dropped, self._handles, self._context)

    @property
    def _users(self) -> set[torch.cuda.Stream]:
        """The streams that use pages without waiting for their end: this thread's, and the default one."""
        return {torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)}

    def _hold_users(self) -> None:
        """Have what is launched from now on wait for the stream that zeroes pages."""
        for stream in self._users:
            stream.wait_stream(self._stream)


def _unmap_runs(address: int, pages: PageNumbers, page_bytes: int) -> None:
    """Unmap pages and update their record; `pages` is the part of it that begins at `address`.

    One call unmaps neighbours, as in NVIDIA's sample vectorAddMMAP: it must not cut a mapping, but may take
    several. If it is refused, each page is unmapped by a call of its own, so that the record stays true.
    """
    for first, length in runs_of(pages != NO_PAGE):
        at = address + first * page_bytes
        if length > 1 and driver.cuMemUnmap(at, length * page_bytes)[0] == driver.CUresult.CUDA_SUCCESS:
            pages[first : first + length] = NO_PAGE
            continue
        for i in range(length):
            check(driver.cuMemUnmap(at + i * page_bytes, page_bytes))
            pages[first + i] = NO_PAGE


def _end(dropped: _Dropped, handles: dict[int, Any], context: PrimaryContext) -> None:
    """Free what is left when a backend is closed or dropped; spaces that live on free themselves."""
    dropped.is_orphaned = True
    dropped.free()
    _release(handles, context)


def _release(handles: dict[int, Any], context: PrimaryContext, keep: int = 0) -> None:
    """Release physical pages, the newest first, until `keep` are left.

    A page that is still mapped lives until it is unmapped.
    """
    context.make_current()
    while len(handles) > keep:
        page = next(reversed(handles))
        check(driver.cuMemRelease(handles[page]))
        del handles[page]


_MINIMUM = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM


def _allocation_properties(ordinal: int) -> Any:
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = ordinal
    return prop


def _read_write(location: Any) -> Any:
    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
