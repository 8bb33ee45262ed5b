"""A file that is made once on a host, shared by the processes that need it, and removed by the last one.

Users hold a shared lock on the file (flock), makers and removers the exclusive one. Its header, one page,
is: magic | key | bytes written | bytes in all | 1 if whole. A file that is not whole is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)

HEADER_BYTES = 4096
_MAGIC = b"instar images 1\n"
_HEADER = struct.Struct("<16s64sQQ?")
_POLL_S = 0.05  # interval while another process makes the file


class FolderFull(OSError):
    """The folder cannot hold the file; it has `free_bytes`."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(f"{free_bytes} bytes are free")
        self.free_bytes = free_bytes


class SharedFile:
    """An open, whole file under a shared lock."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    def close(self) -> None:
        """Release the file; the last process removes it. Repeating it is harmless."""
        if self.fd < 0:
            return
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        if _try_lock(self.fd, fcntl.LOCK_EX) and _is_at(self.path, self.fd):
            self.path.unlink()
        os.close(self.fd)
        self.fd = -1


def open_shared(
    folder: Path, key: str, nbytes: int, write: Callable[[int, OnProgress], None], progress: OnProgress
) -> SharedFile:
    """Open the whole file of this `key` (64 letters); make it if no process has yet.

    write(fd, progress) fills bytes HEADER_BYTES and later of a file of zeros. What it or `progress` raises
    leaves no file. Raises FolderFull before anything is written, and OSError.
    """
    path = folder / f"instar-{os.getuid()}-{key[:24]}.images"
    remove_abandoned(folder, but=path)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if _is_ready(path, fd, key, HEADER_BYTES + nbytes, write, progress):
                return SharedFile(path, fd)
        except BaseException:
            os.close(fd)
            raise
        # Unlock explicitly: a mapping keeps the open file and its lock until the last view of it is gone.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def remove_abandoned(folder: Path, but: Path | None = None) -> list[Path]:
    """Remove files of this user that no process holds, left by processes that were killed."""
    removed = []
    for path in folder.glob(f"instar-{os.getuid()}-*.images"):
        with contextlib.suppress(OSError), _opened(path) as fd:
            if path != but and _try_lock(fd, fcntl.LOCK_EX) and _is_at(path, fd):
                path.unlink()
                removed.append(path)
    return removed


def _is_ready(
    path: Path, fd: int, key: str, size: int, write: Callable[[int, OnProgress], None], progress: OnProgress
) -> bool:
    """Return True with the shared lock on a whole file, which is made if necessary; False to try again."""
    if os.fstat(fd).st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    while not _try_lock(fd, fcntl.LOCK_SH):
        progress(*_read_header(fd)[1:3])
        time.sleep(_POLL_S)
    if not _is_at(path, fd):
        return False  # removed between opening and locking
    if _is_whole(fd, key, size):
        return True
    if not _try_lock(fd, fcntl.LOCK_EX):  # another process may be faster from shared to exclusive
        time.sleep(_POLL_S)
        return False
    if _is_at(path, fd) and not _is_whole(fd, key, size):
        _make(path, fd, key, size, write, progress)
    # Start again and take the shared lock: converting a lock is not atomic.
    return False


def _make(
    path: Path, fd: int, key: str, size: int, write: Callable[[int, OnProgress], None], progress: OnProgress
) -> None:
    total = size - HEADER_BYTES

    def on_progress(done: int, in_all: int) -> None:
        _write_header(fd, key, done, in_all, is_whole=False)
        progress(done, in_all)

    try:
        os.ftruncate(fd, 0)  # drop what a killed process left
        _allocate(fd, path.parent, size)
        on_progress(0, total)
        write(fd, on_progress)
        os.fsync(fd)
        _write_header(fd, key, total, total, is_whole=True)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _allocate(fd: int, folder: Path, size: int) -> None:
    """Allocate all blocks, since a page missing later would end the process. Raises FolderFull."""
    free = writable_bytes(folder)
    if free < size:
        raise FolderFull(free)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        raise FolderFull(writable_bytes(folder)) from error


def writable_bytes(folder: Path) -> int:
    """Return a folder's free bytes, limited by the machine's free memory for a file system in memory."""
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    return min(free, psutil.virtual_memory().available) if _is_memory(folder) else free


def _is_memory(folder: Path) -> bool:
    """Return True if the folder's file system is a tmpfs."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = {str(parent) for parent in (folder.resolve(), *folder.resolve().parents)}
    inside = [(len(mount[1]), mount[2]) for mount in mounts if mount[1] in above]
    return bool(inside) and max(inside)[1] == "tmpfs"


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, fd: int) -> bool:
    """Return True if the path still leads to this open file."""
    try:
        there, here = path.stat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _is_whole(fd: int, key: str, size: int) -> bool:
    found, _, total, is_whole = _read_header(fd)
    return is_whole and found == key and HEADER_BYTES + total == size == os.fstat(fd).st_size


def _read_header(fd: int) -> tuple[str, int, int, bool]:
    """Return (key, bytes written, bytes in all, is_whole)."""
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size:
        return "", 0, 1, False
    magic, key, done, total, is_whole = _HEADER.unpack(raw)
    if magic != _MAGIC:
        return "", 0, 1, False
    return key.decode(errors="replace"), done, total or 1, is_whole


def _write_header(fd: int, key: str, done: int, total: int, *, is_whole: bool) -> None:
    os.pwrite(fd, _HEADER.pack(_MAGIC, key.encode(), done, total, is_whole), 0)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
