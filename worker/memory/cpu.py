"""Pages on a CPU device, for real: a memfd is the physical memory, mmap(2) maps parts of it.

Measured on a 2-core machine, for a page of 64 KiB: map 3 us, unmap 12 us, give the memory back to the system
5 us, first touch 20 to 40 us; so memory that was touched once is kept. Reading weights through such a
mapping is as fast as from malloc (31 GB/s, with 4 KiB frames and with 2 MiB ones alike), so no huge pages are
asked for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

import numpy as np
import torch

from worker.memory.backend import (
    NO_PAGE,
    AddressSpace,
    Finish,
    MappingFailed,
    OnWritten,
    PageNumbers,
    finished,
    runs,
    write_only,
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

# Constants of Linux that Python's mmap module lacks (the same on x86-64 and arm64).
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0x0, 0x10, 0x4000
_MADV_POPULATE_READ = 22
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x1, 0x2
_MAP_FAILED = ctypes.c_void_p(-1).value

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_PIECE_BYTES = 256 * 1024  # piece that stays in a core's second-level cache
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class CpuSpace(AddressSpace):
    """Reserved addresses, PROT_NONE wherever no page is mapped, so that a stray access faults."""

    def __init__(self, nbytes: int, page_bytes: int) -> None:
        super().__init__(_mmap(None, nbytes, _PROT_NONE, _RESERVED, -1, 0), nbytes, page_bytes)
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        buffer = (ctypes.c_char * nbytes).from_address(self.address + offset_bytes)
        buffer.space = self  # type: ignore[attr-defined]  # torch keeps the buffer, the buffer the addresses
        return torch.frombuffer(buffer, dtype=torch.uint8)


class CpuBackend:
    """A memory budget in the host's RAM; pages that were never touched cost nothing."""

    def __init__(self, page_bytes: int = 64 * 1024) -> None:
        """Open the memfd. Raises ValueError unless page_bytes is a multiple of the machine's page."""
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise ValueError(f"page_bytes is {page_bytes}; it must be a multiple of {mmap.PAGESIZE}")
        self.page_bytes = page_bytes
        self.device = torch.device("cpu")
        self._fd = os.memfd_create("instar-pages")
        self._close = weakref.finalize(self, os.close, self._fd)

    def create(self, num_pages: int) -> None:
        os.ftruncate(self._fd, num_pages * self.page_bytes)
        self._is_written = np.zeros(num_pages, dtype=np.bool_)  # pages that surely have memory

    def reserve(self, nbytes: int) -> CpuSpace:
        return CpuSpace(nbytes, self.page_bytes)

    def map(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool = True) -> None:
        if zeroed:
            self.discard(pages)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        for start, page, length in runs(pages):
            first = first_page + start
            target, nbytes = space.address + first * self.page_bytes, length * self.page_bytes
            try:
                _mmap(target, nbytes, _READ_WRITE, flags, self._fd, page * self.page_bytes)
            except MappingFailed:
                # Including the run that failed: mmap may have dropped its reservation already, and the next
                # allocation of the process could get those addresses.
                self._reserve_again(space, first_page, start + length)
                raise
            space.pages[first : first + length] = pages[start : start + length]

    def make(self, pages: PageNumbers) -> None:
        """Do nothing: the system makes memory at the first access."""

    def fence(self) -> None:
        """Return None: what uses pages has ended when its call returns."""

    def map_beside(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool) -> None:
        self.map(space, first_page, pages, zeroed=zeroed)

    def unmap(self, space: AddressSpace, first_page: int, num_pages: int) -> None:
        self._reserve_again(space, first_page, num_pages)

    def begin_write(
        self, space: AddressSpace, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only
    ) -> Finish:
        first, within = divmod(offset_bytes, self.page_bytes)
        num_pages = -(-(within + source.numel()) // self.page_bytes)
        done = 0
        for start, page, length in runs(space.pages[first : first + num_pages]):
            skipped = within if start == 0 else 0
            nbytes = min(length * self.page_bytes - skipped, source.numel() - done)
            at, position = space.address + offset_bytes + done, page * self.page_bytes + skipped
            written = self._is_written[page : page + length]
            self._write(
                at, position, source[done : done + nbytes], bool(written.all()), then, offset_bytes + done
            )
            written[:] = True
            done += nbytes
        return finished

    def discard(self, pages: PageNumbers) -> None:
        """Punch a hole into the memfd: the memory goes back to the system and the pages read as zeros."""
        self._is_written[pages] = False
        punch = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        for _, page, length in runs(pages):
            if _libc.fallocate(self._fd, punch, page * self.page_bytes, length * self.page_bytes):
                raise _failed("fallocate")

    def close(self) -> None:
        self._close()

    def _write(
        self,
        address: int,
        position: int,
        source: torch.Tensor,
        has_memory: bool,
        then: OnWritten,
        offset_bytes: int,
    ) -> None:
        """Write to `address`, which maps the file from `position` on and is `offset_bytes` into the space."""
        # Memory that is there is filled through the mapping (24 MB: 8.3 GB/s, into the file 4.6). Memory that
        # is not, by writing to the file, since the system then makes each frame with its contents (2.7 GB/s);
        # through the mapping it zeroes them first (1.5, and 0.8 if it stops for each).
        if has_memory:
            _populate(address, source.numel())
        for first in range(0, source.numel(), _PIECE_BYTES):
            piece = source[first : first + _PIECE_BYTES]
            nbytes = piece.numel()
            if has_memory:
                ctypes.memmove(address + first, piece.data_ptr(), nbytes)
            else:
                _write_file(self._fd, piece, position + first)
                _populate(address + first, nbytes)
            then(offset_bytes + first, offset_bytes + first + nbytes)

    def _reserve_again(self, space: AddressSpace, first_page: int, num_pages: int) -> None:
        address, nbytes = space.address + first_page * self.page_bytes, num_pages * self.page_bytes
        _mmap(address, nbytes, _PROT_NONE, _RESERVED | _MAP_FIXED, -1, 0)
        space.pages[first_page : first_page + num_pages] = NO_PAGE


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address, nbytes, prot, flags, fd, offset)
    if result == _MAP_FAILED:
        raise _failed("mmap")
    return int(result)


def _write_file(fd: int, source: torch.Tensor, position: int) -> None:
    data = memoryview((ctypes.c_char * source.numel()).from_address(source.data_ptr()))
    while data:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written


def _populate(address: int, nbytes: int) -> None:
    """Map the memory's frames now, so that no step waits for it. No effect before Linux 5.14."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    _libc.madvise(begin, address + nbytes - begin, _MADV_POPULATE_READ)


def _failed(call: str) -> MappingFailed:
    code = ctypes.get_errno()
    hint = "; raise vm.max_map_count, or take larger pages (page_kib)" if code == errno.ENOMEM else ""
    return MappingFailed(f"{call}: {os.strerror(code)}{hint}")
