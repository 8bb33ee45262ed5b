"""Byte images of one model, made once on a host and used by all of its workers.

They are one file. In `HostStore` it lies in memory (`/dev/shm`) and is mapped read-only; with CUDA the
mapping is pinned as well. In `DiskStore` it lies on a disk, and what a copy needs comes through a ring of
host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np
import torch

from worker.memory import MappingFailed, VirtualRange
from worker.model.config import ModelError
from worker.shape.checks import CheckedPages, WrongVariant
from worker.shape.copier import ByteSpan, CopyJob, Pause, Reads, host_copy
from worker.shape.host_ring import ALIGN_BYTES, HostRing, ImageLost
from worker.shape.shared_file import (
    HEADER_BYTES,
    FolderFull,
    OnProgress,
    SharedFile,
    open_shared,
    remove_abandoned,
)
from worker.shape.slots import Chunk
from worker.shape.staging import StagingBuffers

if TYPE_CHECKING:
    from worker.memory.pinned import Pinned

log = logging.getLogger(__name__)

Name = TypeVar("Name")
Put = Callable[[Name, torch.Tensor], None]  # stores the bytes of one image: uint8, on any device
Make = Callable[[Put[Name], OnProgress], None]

_MIB = 1024 * 1024


class NoRoom(ModelError):
    """The folder has no room for the images."""


@dataclass(frozen=True, slots=True)
class ImagePart(Generic[Name]):
    """Bytes of one image: `spans` are whole pages of a range that has the image's bytes."""

    name: Name
    spans: Sequence[ByteSpan]

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.spans)


class ImageStore(ABC, Generic[Name]):
    """Images by name, in one file that the last of its users removes."""

    setting = ""  # setting that names the folder
    remedy = ""  # advice for a folder without room

    def __init__(
        self,
        folder: Path,
        key: str,
        sizes: Mapping[Name, int],
        make: Make[Name],
        progress: OnProgress | None = None,
    ) -> None:
        """Open the images that `key`, any text, identifies; make them if no process has yet.

        make(put, progress) puts them, in any order; those that it does not put are zeros. progress(bytes
        done, bytes in all): also called while another process makes them. Raises NoRoom, ModelError, and what
        either raises; then no file is left.
        """
        self._offsets, total = _place(sizes)
        self._sizes, self._nbytes = dict(sizes), HEADER_BYTES + total
        digest = hashlib.sha256(f"{key} {total} {list(sizes.items())}".encode()).hexdigest()

        def write(fd: int, on_progress: OnProgress) -> None:
            make(self._putter(fd), on_progress)

        try:
            self._file: SharedFile = open_shared(folder, digest, total, write, progress or _silent)
        except FolderFull as error:
            raise NoRoom(
                f"{self.setting} {folder}: the variants of the layers take {total / _MIB:.1f} MiB and"
                f" {error.free_bytes / _MIB:.1f} MiB are free; keep fewer in worker.variants, or"
                f" {self.remedy}"
            ) from error
        except OSError as error:
            raise ModelError(
                f"{self.setting} {folder}: cannot hold the variants of the layers: {error}"
            ) from error
        self._leave = weakref.finalize(self, self._file.close)  # at the latest when the process ends

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._nbytes

    def place(self, name: Name) -> tuple[int, int]:
        """Return the offset of an image in the file, and its size."""
        return self._offsets[name], self._sizes[name]

    @abstractmethod
    def image(self, name: Name) -> torch.Tensor:
        """Return a whole image: uint8 [size of the name] in host memory, not to be written to."""

    @abstractmethod
    def copy_job(
        self, what: str, part: ImagePart[Name], sums: torch.Tensor, target: VirtualRange, device: torch.device
    ) -> CopyJob:
        """Return a job that copies a part of an image to the pages of `target`, and checks each chunk.

        sums: `row_sums` of the whole image. what: its name, for errors. Raises WrongVariant and ImageLost.
        """

    def expect(self, parts: Sequence[ImagePart[Name]]) -> None:
        """Have these parts ready: jobs that copy them follow. They replace those of the call before."""

    @abstractmethod
    def close(self) -> None:
        """Leave the images to the other workers; the last one removes them. No copy may run."""

    @abstractmethod
    def _putter(self, fd: int) -> Put[Name]:
        """Return the function that stores an image in the file that is being made."""


class HostStore(ImageStore[Name]):
    """Images in memory; writing to one faults."""

    setting = "worker.host_dir"
    remedy = (
        "let worker.host_dir name a folder with more room, or worker.disk_dir a folder on a disk with so much"
        " (a container's /dev/shm has the size of --shm-size)"
    )

    def __init__(
        self,
        folder: Path,
        key: str,
        sizes: Mapping[Name, int],
        make: Make[Name],
        *,
        gpu: torch.device | None = None,
        progress: OnProgress | None = None,
    ) -> None:
        """gpu: pin the images, so that copies to this GPU run beside its steps."""
        super().__init__(folder, key, sizes, make, progress)
        self._memory = _Mapping(self._file.fd, self.nbytes, mmap.PROT_READ)
        self._pinned = self._pin(gpu) if gpu else None

    @property
    def is_pinned(self) -> bool:
        return self._pinned is not None

    def image(self, name: Name) -> torch.Tensor:
        return self._view(self._memory, name)

    def copy_job(
        self, what: str, part: ImagePart[Name], sums: torch.Tensor, target: VirtualRange, device: torch.device
    ) -> CopyJob:
        return host_copy(what, self.image(part.name), sums, target, device, part.spans)

    def close(self) -> None:
        if self._pinned:
            self._pinned.close()
            self._pinned = None
        self._leave()

    def _putter(self, fd: int) -> Put[Name]:
        memory = _Mapping(fd, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        staging = cache(StagingBuffers)

        def put(name: Name, data: torch.Tensor) -> None:
            view = self._view(memory, name)
            for first, piece in _pieces(data, staging):
                view[first : first + len(piece)].copy_(piece)  # by all threads

        return put

    def _view(self, memory: _Mapping, name: Name) -> torch.Tensor:
        return memory.view(self._offsets[name], self._sizes[name])

    def _pin(self, gpu: torch.device) -> Pinned | None:
        from worker.memory.pinned import Pinned  # cuda-bindings exist only where CUDA does

        memory = self._memory
        with suppress(MappingFailed):  # some devices cannot pin read-only memory
            return Pinned(gpu, memory.address, memory.nbytes, memory, is_read_only=True)
        memory = _Mapping(self._file.fd, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            pinned = Pinned(gpu, memory.address, memory.nbytes, memory)
        except MappingFailed as error:
            why = "%s: %.1f MiB could not be pinned (%s), so swaps are slower: free memory of the host,"
            log.warning(why + " or keep fewer in worker.variants", self.path, memory.nbytes / _MIB, error)
            return None
        self._memory = memory
        return pinned


class DiskStore(ImageStore[Name]):
    """Images on a disk. Those of `kept` lie in memory too; of the others, what copies need is in `ring`."""

    setting = "worker.disk_dir"
    remedy = "let worker.disk_dir name a folder with more room"

    def __init__(
        self,
        folder: Path,
        key: str,
        sizes: Mapping[Name, int],
        make: Make[Name],
        *,
        ring: HostRing,
        kept: Collection[Name] = (),
        progress: OnProgress | None = None,
    ) -> None:
        super().__init__(folder, key, sizes, make, progress)
        try:
            self._kept = {name: self._read(name) for name in kept}
            # What was read and, by the maker, written lies in the page cache, where nobody needs it.
            os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._ring, self._number = ring, ring.attach(self.path, self._file.fd)
        except OSError as error:
            self._leave()
            raise ModelError(f"{self.setting} {folder}: cannot read {self.path}: {error}") from error
        self._stop_reading = weakref.finalize(self, ring.detach, self._number)

    @property
    def kept_bytes(self) -> int:
        """The bytes that lie in memory, beside the ring."""
        return sum(map(len, self._kept.values()))

    def image(self, name: Name) -> torch.Tensor:
        """Return a whole image. One that is not kept is read from the disk now. Raises ImageLost."""
        if name in self._kept:
            return self._kept[name]
        try:
            return self._read(name)
        except OSError as error:
            raise ImageLost(f"{self.path}: cannot read {name}: {error}") from error

    def copy_job(
        self, what: str, part: ImagePart[Name], sums: torch.Tensor, target: VirtualRange, device: torch.device
    ) -> CopyJob:
        advice = f"{self.path} or memory is damaged (to make the file again, stop all workers of this model)"
        pages = CheckedPages(what, target, self._sizes[part.name], sums, advice)
        places, reads = self._cut(part), Reads(is_disk=True)

        def copy(pause: Pause) -> None:
            try:
                with closing(self._ring.stream([chunk for _, chunk in places], pause, reads)) as chunks:
                    for number, ((first, _), data) in enumerate(zip(places, chunks, strict=True)):
                        if number:
                            pause()
                        pages.put(first, data)
            except WrongVariant:
                self._ring.forget(self._number)  # the damage may be there
                raise
            except ImageLost as error:
                raise ImageLost(f"{what}: {error}") from error

        return CopyJob(part.nbytes, part.nbytes, copy, reads)

    def expect(self, parts: Sequence[ImagePart[Name]]) -> None:
        self._ring.expect(self._number, [chunk for part in parts for _, chunk in self._cut(part)])

    def close(self) -> None:
        self._stop_reading()
        self._leave()

    def _cut(self, part: ImagePart[Name]) -> list[tuple[int, Chunk]]:
        """Return the chunks of a part, and the byte of the image at which each begins."""
        offset, step = self._offsets[part.name], self._ring.slot_bytes
        return [
            (first, Chunk(self._number, offset + first, min(step, end - first)))
            for begin, end in part.spans
            for first in range(begin, end, step)
        ]

    def _read(self, name: Name) -> torch.Tensor:
        data = np.empty(self._sizes[name], dtype=np.uint8)
        done = 0
        while done < len(data):
            if not (got := os.preadv(self._file.fd, [data.data[done:]], self._offsets[name] + done)):
                raise OSError(f"it ends at byte {self._offsets[name] + done}")
            done += got
        return torch.from_numpy(data)

    def _putter(self, fd: int) -> Put[Name]:
        staging = cache(StagingBuffers)

        def put(name: Name, data: torch.Tensor) -> None:
            for first, piece in _pieces(data, staging):
                left, at = memoryview(piece.contiguous().numpy()), self._offsets[name] + first
                while left:
                    written = os.pwrite(fd, left, at)
                    left, at = left[written:], at + written
            # Begins to write what is new to the disk, and drops what has been written.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        return put


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The folders in which a worker keeps the images of its models.

    host_dir: a folder in memory. disk_dir: a folder on a disk, with the `ring` for it; None: it has none.
    is_bounded: use the disk even if host_dir has room for all.
    """

    host_dir: Path
    disk_dir: Path | None = None
    ring: HostRing | None = None
    is_bounded: bool = False

    def open(
        self,
        key: str,
        sizes: Mapping[Name, int],
        make: Make[Name],
        *,
        kept: Collection[Name],
        gpu: torch.device | None,
        progress: OnProgress | None = None,
    ) -> ImageStore[Name]:
        """Open or make the images of a model. Raises ModelError.

        kept: small ones, in memory anyhow. gpu: as in `HostStore`.
        """
        if not self.is_bounded or self.disk_dir is None or self.ring is None:
            try:
                store = HostStore(self.host_dir, key, sizes, make, gpu=gpu, progress=progress)
                if self.disk_dir is not None:
                    with suppress(OSError):
                        remove_abandoned(self.disk_dir)  # nobody else may ever look there again
                return store
            except NoRoom as error:
                if self.disk_dir is None or self.ring is None:
                    raise
                log.warning("%s. They are read from worker.disk_dir %s", error, self.disk_dir)
        return DiskStore(self.disk_dir, key, sizes, make, ring=self.ring, kept=kept, progress=progress)


IN_MEMORY: Final = HostMemory(Path("/dev/shm"))


class _Mapping:
    """A file in the address space, for as long as a view of it lives."""

    def __init__(self, fd: int, nbytes: int, prot: int) -> None:
        self.nbytes = nbytes
        self._mmap = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
        # By its address: torch warns of read-only buffers.
        self.address = int(np.frombuffer(self._mmap, dtype=np.uint8).ctypes.data)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        buffer = (ctypes.c_char * nbytes).from_address(self.address + offset)
        buffer.mapping = self  # type: ignore[attr-defined]  # torch keeps the buffer, the buffer the mapping
        return torch.frombuffer(buffer, dtype=torch.uint8)


def _pieces(data: torch.Tensor, staging: Callable[[], StagingBuffers]) -> Iterable[tuple[int, torch.Tensor]]:
    """Return the bytes of uint8 [n] in pieces in host memory, each with its place."""
    return [(0, data)] if data.device.type == "cpu" else staging().pieces(data)


def _place(sizes: Mapping[Name, int]) -> tuple[dict[Name, int], int]:
    """Return the offset of each image in the file, and the bytes of all images."""
    offsets, end = {}, HEADER_BYTES
    for name, nbytes in sizes.items():
        offsets[name] = end
        end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return offsets, end - HEADER_BYTES


def _silent(done: int, total: int) -> None:
    pass
