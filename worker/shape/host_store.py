"""Byte images in host memory, made once on a host and mapped by all of its workers.

They are one file in memory (`/dev/shm`), mapped read-only. With CUDA the mapping is pinned as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import mmap
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch

from worker.model.config import ModelError
from worker.shape.shared_file import HEADER_BYTES, FolderFull, OnProgress, SharedFile, open_shared

log = logging.getLogger(__name__)

Name = TypeVar("Name")
Images = Mapping[Name, torch.Tensor]  # uint8 each

_ALIGN_BYTES = 4096
_MIB = 1024 * 1024
_CUDA_REGISTER_READ_ONLY = 8  # cudaHostRegisterReadOnly


class HostStore(Generic[Name]):
    """Images by name: `image(name)` is uint8 [size of the name], and read-only (writing faults)."""

    def __init__(
        self,
        folder: Path,
        key: str,
        sizes: Mapping[Name, int],
        make: Callable[[Images[Name], OnProgress], None],
        *,
        pin: bool = False,
        progress: OnProgress | None = None,
    ) -> None:
        """Map the images that `key`, any text, identifies; make them if no process has yet.

        make(images, progress) fills zeros. progress(bytes done, bytes in all): also called while another
        process makes them. Raises ModelError: no room, and what either raises; then no file is left.
        """
        self._offsets, total = _place(sizes)
        self._sizes = dict(sizes)
        digest = hashlib.sha256(f"{key} {total} {list(sizes.items())}".encode()).hexdigest()

        def write(fd: int, on_progress: OnProgress) -> None:
            memory = _Mapping(fd, HEADER_BYTES + total, mmap.PROT_READ | mmap.PROT_WRITE)
            make({name: self._view(memory, name) for name in sizes}, on_progress)

        try:
            self._file: SharedFile = open_shared(folder, digest, total, write, progress or _silent)
        except FolderFull as error:
            raise ModelError(
                f"worker.host_dir {folder}: the variants of the layers take {total / _MIB:.1f} MiB of host"
                f" memory and {error.free_bytes / _MIB:.1f} MiB are free; keep fewer in worker.variants, or"
                " let worker.host_dir name a folder with more room"
            ) from error
        except OSError as error:
            raise ModelError(
                f"worker.host_dir {folder}: cannot hold the variants of the layers: {error}"
            ) from error
        self._leave = weakref.finalize(self, self._file.close)  # at the latest when the process ends
        self._memory = _Mapping(self._file.fd, HEADER_BYTES + total, mmap.PROT_READ)
        self.is_pinned = pin and self._pin()

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def image(self, name: Name) -> torch.Tensor:
        return self._view(self._memory, name)

    def close(self) -> None:
        """Leave the images to the other workers; the last one frees the memory. No copy may run."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.address)
            self.is_pinned = False
        self._leave()

    def _view(self, memory: _Mapping, name: Name) -> torch.Tensor:
        return memory.view(self._offsets[name], self._sizes[name])

    def _pin(self) -> bool:
        register, nbytes = torch.cuda.cudart().cudaHostRegister, self._memory.nbytes
        if int(register(self._memory.address, nbytes, _CUDA_REGISTER_READ_ONLY)) == 0:
            return True
        # Some devices cannot pin read-only memory.
        self._memory = _Mapping(self._file.fd, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        if (code := int(register(self._memory.address, nbytes, 0))) == 0:
            return True
        why = "%d MiB of host memory could not be pinned (CUDA error %d): swaps are slower"
        log.warning(why, nbytes // _MIB, code)
        return False


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


def _place(sizes: Mapping[Name, int]) -> tuple[dict[Name, int], int]:
    """Return the offset of each image in the file, and the bytes of all images."""
    offsets, end = {}, HEADER_BYTES
    for name, nbytes in sizes.items():
        offsets[name] = end
        end += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return offsets, end - HEADER_BYTES


def _silent(done: int, total: int) -> None:
    pass
