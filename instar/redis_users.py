"""Files of the users of Redis: its access list, and one password for each role."""

from __future__ import annotations

import os
from pathlib import Path

from bus.access import ROLES, SERVERS, acl_lines, new_password, server_lines


def write_users(folder: Path, prefix: str, *, selectors: bool, servers: bool = False) -> list[Path]:
    """Write redis/users.acl and ROLE/password in `folder`, and return their paths.

    servers: the users of replicas and Sentinels, too. A password that is there stays. Its file is for its
    owner alone; the access list has digests alone, and Redis, which may be another user, reads it. Raises
    OSError.
    """
    roles = {role: _password(folder / role / "password") for role in ROLES}
    own = {name: _password(folder / name / "password") for name in (SERVERS if servers else ())}
    lines = [*acl_lines(roles, prefix, selectors=selectors), *server_lines(own)]
    access = folder / "redis" / "users.acl"
    access.parent.mkdir(parents=True, exist_ok=True)
    _replace(access, "\n".join(lines) + "\n", 0o644)
    return [*(folder / name / "password" for name in [*roles, *own]), access]


def _password(path: Path) -> str:
    """Return the password in a file, a new one if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or not path.read_text("utf-8").strip():
        _replace(path, new_password() + "\n", 0o600)
    return path.read_text("utf-8").strip()


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.touch(mode=0o600)
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    new.replace(path)
