"""Fetching a checkpoint: space, parts that an interrupted pull left, digests, and the record at the end."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from bus.checkpoints import BadCheckpoint, read_checkpoint
from bus.pulled import RECORD, PulledCheckpoint, models_folder, read_record, record_text
from instar.errors import CommandError, InputError, ServerError
from instar.output.progress import StatusLine
from instar.pull.files import INDEX, BadRepository, RemoteFile, companions, gguf_files, total_size, weights
from instar.pull.hub import Hub, Progress, RemoteSnapshot

PARTS: Final = ".parts"
FULL: Final = (errno.ENOSPC, errno.EDQUOT)
HASH_BYTES: Final = 1 << 20
SHOW_EVERY_S: Final = 0.2
AGAIN: Final = "what came is kept: run the same command again to go on"


def pull(hub: Hub, repo: str, revision: str, line: StatusLine, gguf: str = "") -> Path:
    """Fetch a repository at the commit that `revision` is now. Returns the folder.

    gguf: the name of a GGUF file, which is fetched in place of a model folder's files.

    Raises:
        InputError: the repository is not a model that can be served, or the folder cannot be written.
        ServerError: the hub does not answer, or refuses.
        CommandError: the disk is too small or full, or another process pulls the same commit.
    """
    snapshot = hub.snapshot(repo, revision)
    chosen = _chosen(snapshot, gguf) if gguf else []  # before there is a folder, which may be another pull's
    folder = models_folder() / repo / snapshot.commit
    try:
        with _locked(folder):
            fetch = _Fetch(hub, snapshot, folder, line)
            files = fetch.fetch_checked(chosen) if chosen else fetch.run()
            _write_record(folder, hub, snapshot, revision, files)
            _clear_parts(folder, is_all=not chosen)
    except (BadRepository, BadCheckpoint) as error:
        if read_record(folder) is None:  # nothing that another pull could use
            shutil.rmtree(folder, ignore_errors=True)
        raise InputError(str(error)) from error
    except OSError as error:
        if error.errno in FULL:
            raise CommandError(f"the disk of {folder} is full; free some of it. Then {AGAIN}") from error
        raise InputError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}; XDG_DATA_HOME names "
            "another folder for models"
        ) from error
    return folder


def _chosen(snapshot: RemoteSnapshot, gguf: str) -> list[RemoteFile]:
    """Return what is fetched for a GGUF file. Raises InputError."""
    try:
        return gguf_files(snapshot.repo, snapshot.files, gguf)
    except BadRepository as error:
        raise InputError(str(error)) from error


class _Fetch:
    """One pull into one folder."""

    def __init__(self, hub: Hub, snapshot: RemoteSnapshot, folder: Path, line: StatusLine) -> None:
        self._hub = hub
        self._snapshot = snapshot
        self._folder = folder
        self._line = line
        self._shown_at = 0.0

    def run(self) -> list[RemoteFile]:
        """Fetch all files: first those that say whether the model can be served, and how large it is."""
        repo, files = self._snapshot.repo, self._snapshot.files
        first = companions(repo, files)
        self._fetch(first)
        read_checkpoint(self._folder)
        index = (self._folder / INDEX).read_bytes() if files.get(INDEX) in first else None
        return [*first, *self.fetch_checked(weights(repo, files, index))]

    def fetch_checked(self, files: list[RemoteFile]) -> list[RemoteFile]:
        """Fetch files if there is room for them. Returns them."""
        self._check_space(files)
        self._fetch(files)
        return files

    def _fetch(self, files: list[RemoteFile]) -> None:
        total, before, began = total_size(files), 0, time.monotonic()
        resumed = sum(map(self._have, files))
        for file in files:

            def show(done: int, before: int = before, name: str = file.name) -> None:
                now = time.monotonic()
                if now - self._shown_at >= SHOW_EVERY_S:
                    self._shown_at = now
                    rate = max(0, before + done - resumed) / max(now - began, 0.001)
                    self._line.show(progress_text(name, before + done, total, rate))

            if not self._is_there(file):
                self._fetch_one(file, show)
            before += file.size
            if not self._line.is_watched:
                self._line.end(f"{file.name}: {size_text(file.size)}")

    def _fetch_one(self, file: RemoteFile, show: Progress) -> None:
        part = self._part(file)
        have = self._have(file)
        with open_part(part) as out:
            out.truncate(have)
            self._hub.download(self._snapshot, file, out, have, show)
            out.flush()
            os.fsync(out.fileno())
        self._line.show(f"  {file.name}: comparing its digest")
        if part.stat().st_size != file.size or not has_digest(part, file):
            part.unlink()
            raise ServerError(
                f"{file.name} came with another digest than {self._hub.endpoint} names ({file.digest}); "
                "it was removed. Run it again; if it stays so, the hub or something before it changes files"
            )
        part.replace(self._folder / file.name)

    def _check_space(self, files: Iterable[RemoteFile]) -> None:
        need = sum(file.size - self._have(file) for file in files)
        free = shutil.disk_usage(self._folder).free
        if need > free:
            raise CommandError(
                f"{self._snapshot.repo} needs {size_text(need)} more in {self._folder}, where "
                f"{size_text(free)} are free; free {size_text(need - free)}, or let XDG_DATA_HOME name a "
                "folder of a larger disk"
            )

    def _is_there(self, file: RemoteFile) -> bool:
        """Return whether the file came before: it was moved here after its digest had been compared."""
        path = self._folder / file.name
        return path.is_file() and path.stat().st_size == file.size

    def _have(self, file: RemoteFile) -> int:
        """Return the bytes of a file that an earlier pull left."""
        if self._is_there(file):
            return file.size
        try:
            have = self._part(file).stat().st_size
        except FileNotFoundError:
            return 0
        return have if have <= file.size else 0

    def _part(self, file: RemoteFile) -> Path:
        return self._folder / PARTS / f"{file.name}.part"


def open_part(part: Path) -> BinaryIO:
    """Open a part to append to it."""
    return part.open("ab")


def has_digest(path: Path, file: RemoteFile) -> bool:
    """Return whether the content is what the hub named: by SHA-256, or by git's SHA-1 of a small file."""
    if file.sha256:
        digest, wanted = hashlib.sha256(), file.sha256
    else:
        digest, wanted = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False), file.blob_id
    with path.open("rb") as content:
        while chunk := content.read(HASH_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == wanted


def size_text(num_bytes: float) -> str:
    """Return `1.2 GiB`, or a smaller unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def progress_text(name: str, done: int, total: int, rate: float) -> str:
    """Return how far the pull is. `rate` is in bytes a second; 0: not known yet."""
    left_s = (total - done) / rate if rate else 0.0
    left = f", {size_text(rate)}/s, {left_s / 60:.0f} min left" if left_s >= 60 else f", {size_text(rate)}/s"
    return f"  {name}: {size_text(done)} of {size_text(total)}{left if rate else ''}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from pulling into the folder within the block."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"another `instar pull` fetches {folder}; wait until it has ended") from None
        yield


def _clear_parts(folder: Path, *, is_all: bool) -> None:
    """Remove what is left of parts; those of another pull stay unless `is_all`."""
    with suppress(OSError):
        if is_all:
            shutil.rmtree(folder / PARTS)
        else:
            (folder / PARTS).rmdir()


def _write_record(
    folder: Path, hub: Hub, snapshot: RemoteSnapshot, revision: str, files: Iterable[RemoteFile]
) -> None:
    before = read_record(folder)
    record = PulledCheckpoint(
        repo=snapshot.repo,
        commit=snapshot.commit,
        endpoint=hub.endpoint,
        revisions=sorted({revision, *(before.revisions if before else [])} - {snapshot.commit}),
        pulled_at=time.time(),
        files=(before.files if before else {}) | {file.name: file.digest for file in files},
    )
    new = folder / PARTS / RECORD
    new.write_text(record_text(record))
    new.replace(folder / RECORD)
