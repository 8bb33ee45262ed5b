"""Pages on a GPU: CUDA's virtual memory management, through cuda-bindings.

Physical pages are made once, when the pool starts: the budget is then really there, and a morph pays for
mapping only. Same contract as the CPU backend, same tests.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from cuda.bindings import driver

from worker.memory.backend import AddressSpace, Pages
from worker.memory.errors import MappingFailed


class CudaSpace:
    """Reserved device addresses. A kernel that touches one without a page ends in an illegal access."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._device = device
        self.address = int(_check(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
        weakref.finalize(self, driver.cuMemAddressFree, self.address, nbytes).atexit = False

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        foreign = _DeviceBytes(self, self.address + offset_bytes, nbytes)
        seen = torch.as_tensor(foreign, device=self._device)  # the device named: without it torch copies
        if seen.data_ptr() != self.address + offset_bytes:
            raise MappingFailed(f"torch copied memory of {self._device} instead of viewing it")
        return seen


class _DeviceBytes:
    """What torch reads to see foreign device memory; torch keeps it, and it keeps the addresses."""

    def __init__(self, space: CudaSpace, address: int, nbytes: int) -> None:
        self.space = space
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaBackend:
    """The memory of one GPU, in pages of a multiple of the driver's granularity (2 MiB)."""

    def __init__(self, device: str | torch.device = "cuda:0", page_bytes: int = 2 * 1024 * 1024) -> None:
        """Makes `device` this thread's current one. Raises ValueError for a page size the driver cannot
        map, MappingFailed if the driver says no."""
        self.device = torch.device("cuda", torch.device(device).index or 0)
        self.page_bytes = page_bytes
        torch.cuda.set_device(self.device)
        # Zeroes new pages beside the compute streams. Making it also makes the driver's context current.
        self._stream = torch.cuda.Stream(self.device)
        self._prop = _allocation_properties(self.device.index)
        granularity = int(_check(driver.cuMemGetAllocationGranularity(self._prop, _MINIMUM)))
        if page_bytes <= 0 or page_bytes % granularity:
            raise ValueError(f"page_bytes is {page_bytes}; it must be a multiple of {granularity}")
        self._handles: list[Any] = []  # _handles[p] is physical page p

    def create(self, num_pages: int) -> None:
        try:
            for _ in range(num_pages):
                self._handles.append(_check(driver.cuMemCreate(self.page_bytes, self._prop, 0)))
        except MappingFailed as error:
            made = len(self._handles)
            self.close()
            raise MappingFailed(
                f"the device gave {made} of {num_pages} pages; lower memory_mb ({error})"
            ) from error

    def reserve(self, nbytes: int) -> CudaSpace:
        return CudaSpace(nbytes, self.device)

    def map(self, space: AddressSpace, first_page: int, pages: Pages) -> None:
        at = space.address + first_page * self.page_bytes
        nbytes = len(pages) * self.page_bytes
        mapped = 0
        try:
            for page in pages.tolist():
                target = at + mapped * self.page_bytes
                _check(driver.cuMemMap(target, self.page_bytes, 0, self._handles[page], 0))
                mapped += 1
            _check(driver.cuMemSetAccess(at, nbytes, [_read_write(self._prop.location)], 1))
            self._zero(at, nbytes)
        except RuntimeError:  # the driver's MappingFailed, or torch's own about the stream
            self._unmap_each(at, mapped)
            raise

    def unmap(self, space: AddressSpace, first_page: int, pages: Pages) -> None:
        torch.cuda.synchronize(self.device)  # cuMemUnmap does not wait for kernels that were launched before
        self._unmap_each(space.address + first_page * self.page_bytes, len(pages))

    def close(self) -> None:
        while self._handles:
            _check(driver.cuMemRelease(self._handles.pop()))

    def _unmap_each(self, address: int, num_pages: int) -> None:
        # One call per page, as it was mapped: the driver refuses to unmap part of a mapping.
        for i in range(num_pages):
            _check(driver.cuMemUnmap(address + i * self.page_bytes, self.page_bytes))

    def _zero(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self.device):
            _check(driver.cuMemsetD8Async(address, 0, nbytes, self._stream.cuda_stream))
            self._stream.synchronize()


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


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or MappingFailed with the driver's words."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise MappingFailed(f"{status.name}: {text.decode() if text else 'no description'}")
    return values[0] if values else None
