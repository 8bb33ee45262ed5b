"""API keys: what each may do and how much of it, and the file that has them as digests.

The digest is one SHA-256 of a key: keys are made here from 24 random bytes, which nobody finds by trying.
A file, and not Redis: Redis may lose its data, and every worker can write to it. Every gateway reads its file
again when it changes, so one file that all see, or a Secret that is mounted, changes all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec

Scope = Literal["inference", "admin-read", "admin-write"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
SECRET_BYTES: Final = 24
MOST_BYTES: Final = 16 * 1024 * 1024  # of a file; one key takes about 300

Limit = Annotated[int, msgspec.Meta(ge=0)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. A limit of 0 is none."""

    id: str  # the first 16 digits of its digest; "": the caller of a gateway without keys
    digest: str = ""  # SHA-256 of the key, in hexadecimal
    name: str = ""  # whose it is, for people
    scopes: tuple[Scope, ...] = ("inference",)
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0  # share of tokens where several keys wait
    rpm: Limit = 0  # requests per minute
    tpm: Limit = 0  # tokens per minute, prompt and output
    concurrent: Limit = 0  # requests at once
    created_s: int = 0  # Unix time; 0: a key of the settings

    def may(self, scope: Scope) -> bool:
        """Return True if the key has the scope; one that may write to /admin may also read there."""
        return scope in self.scopes or (scope == "admin-read" and "admin-write" in self.scopes)


class _Contents(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[ApiKey]


class KeysFileError(ValueError):
    """A file of keys cannot be read or written. The text names the file and what to do."""


ANONYMOUS: Final = ApiKey(id="", scopes=SCOPES)


def digest_of(key: bytes) -> str:
    """Return the digest by which a key is known."""
    return hashlib.sha256(key).hexdigest()


def plain_key(key: str, *scopes: Scope) -> ApiKey:
    """Return a key of the settings, without limits."""
    digest = digest_of(key.encode())
    return ApiKey(id=digest[:16], digest=digest, name="settings", scopes=scopes)


def new_key(name: str, **options: object) -> tuple[str, ApiKey]:
    """Return a new key as text, which is kept nowhere, and what is kept of it.

    `options` are fields of `ApiKey`. Raises KeysFileError for one beyond its limit.
    """
    text = f"sk-instar-{secrets.token_urlsafe(SECRET_BYTES)}"
    digest = digest_of(text.encode())
    fields = {"id": digest[:16], "digest": digest, "name": name, "created_s": int(time.time())} | options
    try:
        return text, msgspec.convert(fields, ApiKey)
    except msgspec.ValidationError as error:
        raise KeysFileError(f"the key {name!r} cannot be made: {error}") from error


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file. Raises KeysFileError; also for a file that is not there."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        hint = "; `instar keys add NAME` makes it" if isinstance(error, FileNotFoundError) else ""
        raise KeysFileError(f"{path} cannot be read: {error.strerror or error}{hint}") from error
    if len(data) > MOST_BYTES:
        raise KeysFileError(f"{path} has more than {MOST_BYTES} bytes; `instar keys revoke` shortens it")
    try:
        keys = msgspec.json.decode(data, type=_Contents).keys
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KeysFileError(
            f"{path} is not a file of keys: {error}; `instar keys` alone should write it"
        ) from error
    for key in keys:
        if len(key.digest) != 64 or key.id != key.digest[:16] or not key.scopes:
            raise KeysFileError(f"{path}: the key {key.name!r} has no digest, another's id, or no scope")
    if len({key.digest for key in keys}) < len(keys):
        raise KeysFileError(f"{path} has a key twice; remove one of them")
    return keys


def change_keys(path: Path, change: Callable[[list[ApiKey]], Iterable[ApiKey]]) -> None:
    """Replace the keys of a file, which is made if it is not there, with what `change` returns of them.

    One change at a time, and readers see the file before or after it. Raises KeysFileError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeysFileError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(change(read_keys(path) if path.exists() else []))
        _replace(path, msgspec.json.format(msgspec.json.encode(_Contents(keys)), indent=1) + b"\n")
    except OSError as error:
        raise KeysFileError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        os.close(lock)


def _replace(path: Path, data: bytes) -> None:
    """Write a file in one go, with the permissions of the one before; a new one is its owner's alone."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
