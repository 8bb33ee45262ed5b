"""Files of the users of Redis: its access list, and one password for each role."""

from __future__ import annotations

import os
from pathlib import Path

from bus.access import Role, acl_lines, new_passwords


def write_users(folder: Path, prefix: str, *, selectors: bool) -> list[Path]:
    """Write redis/users.acl and ROLE/password in `folder`, and return their paths.

    A password that is there stays. Its file is for its owner alone; the access list has digests alone, and
    Redis, which may be another user, reads it. Raises OSError.
    """
    passwords: dict[Role, str] = {}
    written = []
    for role, password in new_passwords().items():
        path = folder / role / "password"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or not path.read_text("utf-8").strip():
            _replace(path, password + "\n", 0o600)
        passwords[role] = path.read_text("utf-8").strip()
        written.append(path)
    access = folder / "redis" / "users.acl"
    access.parent.mkdir(parents=True, exist_ok=True)
    _replace(access, "\n".join(acl_lines(passwords, prefix, selectors=selectors)) + "\n", 0o644)
    return [*written, access]


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch(mode=0o600)
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    new.replace(path)
