"""The keys of `gateway.keys_file` as last read, and what has changed in it since."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bus.api_keys import ApiKey, read_keys


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key that the file has got, has lost, or has with other limits."""

    kind: Literal["key_added", "key_revoked", "key_changed"]
    key: ApiKey

    @property
    def reason(self) -> str:
        """Scopes and limits of the key, for the log and the event."""
        key = self.key
        limits = {"rpm": key.rpm, "tpm": key.tpm, "concurrent": key.concurrent}
        set_ones = [f"{name} {value}" for name, value in limits.items() if value]
        return f"{key.name}: {', '.join([*key.scopes, f'weight {key.weight:g}', *set_ones])}"


class StoredKeys:
    """The file, or none for "". A file that has become unreadable leaves the keys as they were."""

    def __init__(self, file: str) -> None:
        self._path = Path(file).expanduser() if file else None
        self._seen: tuple[int, int, int] | None = None
        self.keys: list[ApiKey] = []

    def read(self) -> list[KeyChange]:
        """Read the file if it is another than the last time. Raises KeysFileError once for each such file."""
        if self._path is None or (seen := self._mark(self._path)) == self._seen:
            return []
        self._seen = seen
        before, now = ({key.id: key for key in keys} for keys in (self.keys, read_keys(self._path)))
        self.keys = list(now.values())
        return [
            *(KeyChange("key_added", key) for id_, key in now.items() if id_ not in before),
            *(KeyChange("key_revoked", key) for id_, key in before.items() if id_ not in now),
            *(KeyChange("key_changed", key) for id_, key in now.items() if before.get(id_, key) != key),
        ]

    @staticmethod
    def _mark(path: Path) -> tuple[int, int, int]:
        """Return what tells one content of the file from the next; zeros if it is not there."""
        try:
            found = path.stat()
        except OSError:
            return 0, 0, 0
        return found.st_mtime_ns, found.st_ino, found.st_size
