"""The models of `instar serve`: what an entry of its settings means, and folders made of GGUF files.

Workers read safetensors. A GGUF file becomes a folder once, by `instar convert` in a process of its own, and
is kept under $XDG_CACHE_HOME/instar/gguf, which may be emptied while nothing of it is served.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bus.checkpoints import parse_model
from instar.errors import InputError

SUFFIX: Final = ".gguf"
MAGIC: Final = b"GGUF"
CONVERSION: Final = 1  # another number makes all folders anew, when `instar convert` has changed


@dataclass(frozen=True, slots=True)
class NamedModel:
    """An entry of `worker.models`. `path`: a model folder, or a GGUF file."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix.lower() == SUFFIX and self.path.is_file()


def find_model(entry: str) -> NamedModel:
    """Return what an entry means: a folder, a GGUF file, or a folder that holds one and no config.json.

    Raises InputError: a folder with several GGUF files and no config.json.
    """
    name, path = parse_model(entry)
    with suppress(OSError):  # a name that is too long; the checks of a folder say so
        if path.suffix.lower() == SUFFIX and path.is_file():
            return NamedModel(path.stem if name == path.name else name, path)
        found = [] if (path / "config.json").is_file() else sorted(path.glob(f"*{SUFFIX}"))
        if len(found) > 1:
            raise InputError(
                f"model {entry!r}: {path} has {len(found)} GGUF files; name one of them: "
                f"`instar serve {found[0]}`"
            )
        if found:
            return NamedModel(name, found[0])
    return NamedModel(name, path)


def gguf_problem(path: Path) -> str:
    """Return what keeps a file from being converted, as far as its first bytes show it."""
    try:
        with path.open("rb") as file:
            begins = file.read(len(MAGIC))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return "" if begins == MAGIC else f"{path} is not a GGUF file, whatever its name says; download it again"


def served_entries(entries: list[str], say: Callable[[str], None]) -> list[str]:
    """Return the entries with folders in place of GGUF files, made where need be. Raises InputError."""
    return [_served_entry(entry, say) for entry in entries]


def _served_entry(entry: str, say: Callable[[str], None]) -> str:
    model = find_model(entry)
    if not model.is_gguf:
        return entry
    folder = converted_folder(model.path)
    if not folder.is_dir():
        say(f"Converting {model.path} to {folder} (once)")
        convert(model.path, folder)
    return f"{model.name}={folder}"


def converted_folder(file: Path) -> Path:
    """Return the folder that is made of a GGUF file: another one if the file changes."""
    facts = file.stat()
    identity = f"{CONVERSION} {file.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return users / "instar" / "gguf" / f"{file.stem}-{digest}"


def convert(file: Path, folder: Path) -> None:
    """Run `instar convert`, whose progress goes to standard output. Raises InputError with its reason."""
    command = (sys.executable, "-P", "-m", "worker.offline", "convert", str(file), str(folder))
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"`instar convert` ended with status {done.returncode}"]
        raise InputError(lines[-1].removeprefix("instar convert: "))
