"""run.json, from which alone the card, the numbers and the pictures come."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from instar.errors import InputError
from instar.replay.outcomes import RequestOutcome
from instar.replay.statistics import Slo, summary

NAME: Final = "run.json"
VERSION: Final = 1
ROW_BYTES: Final = 600  # of a request with its precisions
SAMPLE_BYTES: Final = 2000  # one each second, of some instances
PICTURE_BYTES: Final = 4 << 20


@dataclass(slots=True)
class RunFile:
    """A run: `about` has settings, trace and server; `observed` samples, morphs and counters.

    `observed` is {} if the server is not Instar. `events_per_s` counts the events of all streams in each
    second. `said` maps each kind of error to the server's first message. `folder` is where the run is kept.
    """

    about: dict[str, Any]
    slo: Slo
    outcomes: list[RequestOutcome] = field(repr=False)
    observed: dict[str, Any] = field(default_factory=dict, repr=False)
    events_per_s: list[int] = field(default_factory=list, repr=False)
    said: dict[str, str] = field(default_factory=dict, repr=False)
    folder: Path | None = None

    @property
    def name(self) -> str:
        return str(self.about.get("name") or "run")

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.outcomes, self.slo, tells_queue=bool(self.observed))

    def as_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "about": self.about,
            "slo": {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s},
            "summary": self.summary,
            "observed": self.observed,
            "events_per_s": self.events_per_s,
            "said": self.said,
            "requests": [one.as_json() for one in self.outcomes],
        }


def prepare(folder: Path, num_requests: int, seconds: float, *, draws: bool) -> None:
    """Make the folder, so that a run is not lost at its end.

    Raises InputError if it holds a run, cannot be written, or has no room for the file and the picture.
    """
    needed = num_requests * ROW_BYTES + int(seconds + 1) * SAMPLE_BYTES + draws * PICTURE_BYTES
    trial = folder / f".{NAME}.trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            raise InputError(f"--out {folder}: holds a run already; name another folder, or remove {NAME}")
        trial.write_bytes(b"x")
        trial.unlink()
        free = shutil.disk_usage(folder).free
    except FileExistsError as error:
        raise InputError(f"--out {folder}: is a file; name a folder") from error
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written: {error.strerror}") from error
    if free < needed:
        raise InputError(
            f"--out {folder}: {_mib(free)} MiB are free on its disk, the run may need {_mib(needed)}"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.3g}"


def write(folder: Path, run: RunFile) -> Path:
    """Write the whole file or none. Raises InputError."""
    path, parts = folder / NAME, folder / f".{NAME}.part"
    try:
        with parts.open("w", encoding="utf-8") as file:
            json.dump(run.as_json(), file, separators=(",", ":"))
            file.write("\n")
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{folder}: there is no run in it ({NAME} of `instar bench replay --out`)"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(found, dict) or "version" not in found:
        raise InputError(f"{path}: is not a run of `instar bench replay`: it has no version")
    if found["version"] != VERSION:
        raise InputError(f"{path}: has version {found['version']}; this program reads {VERSION}")
    try:
        if not found["requests"]:
            raise InputError(f"{path}: has no request")
        return RunFile(
            found["about"],
            Slo(**found["slo"]),
            [RequestOutcome.of(row) for row in found["requests"]],
            found["observed"],
            found["events_per_s"],
            found.get("said", {}),
            folder,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a run of `instar bench replay`: {error!r}") from error


def with_unique_names(runs: Sequence[RunFile]) -> list[RunFile]:
    """Return the runs. Those of one name get the paths of their folders, or numbers."""
    by_path = _renamed(runs, lambda run, _: str(run.folder or run.name))
    return _renamed(by_path, lambda run, nth: f"{run.name} ({nth})")


def _renamed(runs: Sequence[RunFile], rename: Callable[[RunFile, int], str]) -> list[RunFile]:
    """Rename runs that share a name, by the run and its number among them, from 1."""
    names = [run.name for run in runs]
    return [
        replace(run, about=run.about | {"name": rename(run, names[: i + 1].count(run.name))})
        if names.count(run.name) > 1
        else run
        for i, run in enumerate(runs)
    ]
