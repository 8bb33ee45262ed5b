"""A bounded ring of host memory between images on a disk and the device.

Threads read large chunks into slots, a copy takes them from there (`RingSlots` decides). The file is opened
with O_DIRECT, so the disk writes into the slots itself:

- Through a mapping (mmap) a failed read ends the process with SIGBUS, each page costs a fault, and the reads
  are as large as the kernel's read-ahead.
- A read through the page cache keeps each byte twice, in the cache and in its slot, and pushes out what other
  programs have there. Its memory is not the set amount that was asked for, and a core copies every byte.
- O_DIRECT reads need no core while they run, and fail with an error that has a name.

Where a file system has no O_DIRECT the reads go through the page cache, and each chunk is dropped from it
(posix_fadvise) as soon as it is in its slot. With CUDA the ring is pinned, so that copies from it run beside
the steps. A file that has become shorter, or was written to, since it was opened is named and not used.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from worker.memory import MappingFailed
from worker.shape.copier import Pause, Reads
from worker.shape.slots import LEAST_SLOTS, Chunk, ChunkDemand, RingSlots

if TYPE_CHECKING:
    from worker.memory.pinned import Pinned

log = logging.getLogger(__name__)

ALIGN_BYTES: Final = 4096  # of offsets, lengths and addresses for O_DIRECT
SLOTS: Final = 8  # of a ring that is too small for more of the largest size
READERS: Final = 2  # reads at a time: with one the disk rests between two
POLL_S: Final = 0.05  # a copy that waits for the disk looks this often whether it was stopped


class ImageLost(RuntimeError):
    """A file of images cannot be read, or is not the one that was opened."""


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """An open file of images."""

    path: Path
    fd: int
    is_direct: bool
    stamp: tuple[int, int]  # size, and the time of the last write

    @classmethod
    def open(cls, path: Path, fd: int) -> StreamedFile:
        """Open the file behind `fd`, of this path, once more, to read from it. Raises OSError."""
        name, stat = f"/proc/self/fd/{fd}", os.fstat(fd)
        stamp = stat.st_size, stat.st_mtime_ns
        try:
            direct = os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return cls(path, os.open(name, os.O_RDONLY | os.O_CLOEXEC), False, stamp)
        return cls(path, direct, True, stamp)

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target`, aligned as its offset is. Raises ImageLost."""
        end = offset + len(target)
        try:
            stat = os.fstat(self.fd)
            if (stat.st_size, stat.st_mtime_ns) != self.stamp:
                raise ImageLost(f"{self.path} was changed by another program after it was made")
            done = 0
            while done < len(target):
                if not (got := os.preadv(self.fd, [target[done:]], offset + done)):
                    raise ImageLost(f"{self.path} ends at byte {offset + done}; {self.stamp[0]} were made")
                done += got
            if not self.is_direct:
                os.posix_fadvise(self.fd, offset, len(target), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise ImageLost(f"{self.path}: cannot read bytes [{offset}, {end}): {error.strerror}") from error


class HostRing:
    """Any thread may call it. Its memory and its threads are there while a file is attached."""

    def __init__(self, nbytes: int, *, slot_bytes: int, gpu: torch.device | None = None) -> None:
        """Use at most `nbytes`, in slots of at most `slot_bytes`.

        gpu: pin them, so that copies to this GPU run beside its steps.
        """
        each = min(slot_bytes, nbytes // SLOTS) // ALIGN_BYTES * ALIGN_BYTES
        if each < ALIGN_BYTES:
            raise ValueError(f"a ring of {nbytes} bytes is too small: it needs {SLOTS * ALIGN_BYTES}")
        self.slot_bytes, self._num_slots = each, max(LEAST_SLOTS, nbytes // each)
        self._gpu = gpu
        self._pinned: Pinned | None = None
        self._slots = RingSlots(self._num_slots)
        self._changed = threading.Condition()
        self._files: dict[int, StreamedFile] = {}
        self._num_files = 0  # that were ever attached
        self._memory: torch.Tensor | None = None
        self._readers: list[threading.Thread] = []
        self._read_at = 0.0  # when the last read ended

    @property
    def nbytes(self) -> int:
        """The memory that it takes while a file is attached."""
        return self._num_slots * self.slot_bytes

    def attach(self, path: Path, fd: int) -> int:
        """Read from a file from now on; return its number in chunks. Raises OSError."""
        file = StreamedFile.open(path, fd)
        with self._changed:
            self._num_files += 1
            number = self._num_files
            self._files[number] = file
            try:
                self._set_up()
            except BaseException:
                self._close(number)
                raise
            return number

    def detach(self, number: int) -> None:
        """Read from this file no more, when what is being read of it has ended. No copy may run."""
        with self._changed:
            self._slots.forget(number)
            while self._slots.is_reading(number):
                self._changed.wait()
            self._slots.forget(number)
            self._close(number)

    def expect(self, key: Hashable, chunks: Sequence[Chunk]) -> None:
        """Read these ahead while no copy misses anything; they replace what was expected under `key`."""
        with self._changed:
            self._slots.expect(key, chunks)
            self._changed.notify_all()

    def forget(self, number: int) -> None:
        """Drop what the ring has of a file, so that it is read again."""
        with self._changed:
            self._slots.forget(number)

    def stream(
        self, chunks: Sequence[Chunk], pause: Pause, reads: Reads
    ) -> Generator[torch.Tensor, None, None]:
        """Yield uint8 [chunk.nbytes] of each chunk, valid until the next. Close it, wherever it ends.

        pause: called also while it waits for the disk. reads: counts what the disk did. Raises ImageLost.
        """
        with self._changed:
            demand = self._slots.open(chunks)
            self._changed.notify_all()
        try:
            for chunk in chunks:
                slot = self._await(demand, pause, reads)
                reads.disk_bytes, reads.disk_s = demand.disk_bytes, demand.disk_s
                yield self._view(slot)[: chunk.nbytes]
                with self._changed:
                    self._slots.give(demand)
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._slots.close(demand)
                self._changed.notify_all()

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is lost or has two owners."""
        with self._changed:
            self._slots.check_integrity()

    def _await(self, demand: ChunkDemand, pause: Pause, reads: Reads) -> int:
        """Return the slot of the next chunk."""
        while True:
            began = time.perf_counter()
            with self._changed:
                slot = self._slots.take(demand)
                if slot is None:
                    self._changed.wait(POLL_S)
                    slot = self._slots.take(demand)
            reads.waited_s += time.perf_counter() - began
            if slot is not None:
                return slot
            pause()

    def _set_up(self) -> None:
        """Take the memory and start the threads, unless they are there. Raises OSError, RuntimeError."""
        if self._memory is None:
            memory = mmap.mmap(-1, self.nbytes)
            with contextlib.suppress(OSError):  # a kernel may be built without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)  # a read is then a few long pieces, which is faster
            self._memory = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
            self._pinned = self._pin(self._memory, self._gpu) if self._gpu else None
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._run, name="image-reads", daemon=True) for _ in range(READERS)
            ]
            for reader in self._readers:
                reader.start()

    def _close(self, number: int) -> None:
        """Close a file; with the last one the memory and the threads go."""
        os.close(self._files.pop(number).fd)
        if not self._files:
            self._readers = []  # they end: nothing is left to read
            self._changed.notify_all()
            if self._pinned:
                self._pinned.close()
            self._memory = self._pinned = None

    def _pin(self, memory: torch.Tensor, gpu: torch.device) -> Pinned | None:
        from worker.memory.pinned import Pinned  # cuda-bindings exist only where CUDA does

        try:
            return Pinned(gpu, memory.data_ptr(), self.nbytes, memory)
        except MappingFailed as error:
            why = "a ring of %d MiB could not be pinned (%s), so swaps are slower: free memory of the host,"
            log.warning(why + " or lower worker.host_memory_mb", self.nbytes >> 20, error)
            return None

    def _view(self, slot: int) -> torch.Tensor:
        assert self._memory is not None
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def _run(self) -> None:
        while True:
            with self._changed:
                while threading.current_thread() in self._readers:
                    if (slot := self._slots.next_read()) is not None:
                        break
                    self._changed.wait()
                else:
                    return
                chunk = self._slots.slots[slot].chunk
                assert chunk
                file, nbytes = self._files[chunk.file], -(-chunk.nbytes // ALIGN_BYTES) * ALIGN_BYTES
                target = memoryview(self._view(slot).numpy())[:nbytes]
            began, error = time.perf_counter(), None
            try:
                file.read(target, chunk.offset)
            except Exception as caught:  # noqa: BLE001 the copy's thread raises it
                error = caught
            del target
            with self._changed:
                ended = time.perf_counter()
                # Of reads that overlap, each counts from the end of the one before.
                took_s, self._read_at = ended - max(began, self._read_at), ended
                self._slots.read_done(slot, took_s, error)
                self._changed.notify_all()
