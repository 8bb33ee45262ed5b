"""run.json, from which alone the card, the numbers and the pictures come."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from instar.errors import InputError
from instar.output.tables import MIB
from instar.replay.outcomes import RequestOutcome
from instar.replay.statistics import Slo, summary

NAME: Final = "run.json"
VERSION: Final = 1
ROW_BYTES: Final = 600  # bytes of a request with its precisions
SAMPLE_BYTES: Final = 2000  # one each second, of some instances
PICTURE_BYTES: Final = 4 * MIB


class RunFile(msgspec.Struct):
    """A run: `about` has settings, trace and server; `observed` samples, morphs and counters.

    `observed` is {} if the server is not Instar. `events_per_s` counts the events of all streams in each
    second. `said` maps each kind of error to the server's first message. `folder` is where the run is kept.
    """

    about: dict[str, Any]
    slo: Slo
    outcomes: list[RequestOutcome] = msgspec.field(name="requests")
    observed: dict[str, Any] = {}
    events_per_s: list[int] = []
    said: dict[str, str] = {}
    folder: str = ""

    @property
    def name(self) -> str:
        return str(self.about.get("name") or "run")

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.outcomes, self.slo, has_queue_times=bool(self.observed))

    def as_json(self) -> dict[str, Any]:
        kept: dict[str, Any] = msgspec.to_builtins(self)
        del kept["folder"]
        return {"version": VERSION, "summary": self.summary} | kept


def prepare(folder: Path, num_requests: int, seconds: float, *, draws: bool) -> None:
    """Make the folder. Raises InputError if it holds a run, cannot be written, or has too little room."""
    needed = num_requests * ROW_BYTES + int(seconds + 1) * SAMPLE_BYTES + draws * PICTURE_BYTES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            raise InputError(f"--out {folder}: holds a run already; name another folder, or remove {NAME}")
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except FileExistsError as error:
        raise InputError(f"--out {folder}: is a file; name a folder") from error
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written: {error.strerror}") from error
    if free < needed:
        sizes = f"{free / MIB:.3g} MiB are free on its disk, the run may need {needed / MIB:.3g}"
        raise InputError(f"--out {folder}: {sizes}")


def write(folder: Path, run: RunFile) -> Path:
    """Write the whole file or none. Raises InputError."""
    path, parts = folder / NAME, folder / f".{NAME}.part"
    try:
        with parts.open("wb") as file:
            file.write(msgspec.json.encode(run.as_json()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        parts.replace(path)
    except OSError as error:
        parts.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}; the run is not kept") from error
    return path


def read(folder: Path) -> RunFile:
    """Read the run of a folder, or the file itself. Raises InputError."""
    path = folder / NAME if folder.is_dir() else folder
    try:
        found = msgspec.json.decode(path.read_bytes())
        if not isinstance(found, dict) or "version" not in found:
            raise InputError(f"{path}: is not a run of `instar bench replay`: it has no version")
        if found["version"] != VERSION:
            raise InputError(f"{path}: has version {found['version']}; this program reads {VERSION}")
        run = msgspec.convert(found | {"folder": str(folder)}, RunFile)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: there is no run in it ({NAME} of `bench replay --out`)") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: is not a run of `instar bench replay`: {error}") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: is not JSON: {error}") from error
    if not run.outcomes:
        raise InputError(f"{path}: has no request")
    return run


def with_unique_names(runs: Sequence[RunFile]) -> list[RunFile]:
    """Return the runs. Those of one name get the paths of their folders, or numbers."""
    by_path = _renamed(runs, lambda run, _: run.folder or run.name)
    return _renamed(by_path, lambda run, nth: f"{run.name} ({nth})")


def _renamed(runs: Sequence[RunFile], rename: Callable[[RunFile, int], str]) -> list[RunFile]:
    """Rename runs that share a name, by the run and its number among them, from 1."""
    names = [run.name for run in runs]
    return [
        msgspec.structs.replace(run, about=run.about | {"name": rename(run, names[: i + 1].count(run.name))})
        if names.count(run.name) > 1
        else run
        for i, run in enumerate(runs)
    ]
