"""The results of a benchmark that takes hours: each run is kept when it ends, and a later call goes on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.common.results import MAX_OTHERS_CORES, ROOT
from bench.morph.service import Way
from instar.errors import InputError

Row = dict[str, Any]

MAX_SPEED_CHANGE: Final = 0.1  # of the steps' time, before a run counts as of another machine


def is_of_another_speed(row: Row) -> bool:
    """Return whether the machine was slower or faster than at first, when loads were thinned for it."""
    factor: float = row.get("machine_factor", 1.0)
    return abs(factor - 1) > MAX_SPEED_CHANGE


def is_disturbed(row: Row) -> bool:
    """Return whether other programs took the machine, or it was of another speed."""
    others: float = row["others_cores"]
    return others > MAX_OTHERS_CORES or is_of_another_speed(row)


@dataclass(frozen=True, slots=True)
class Job:
    """A load to one way of serving, once. `rate`: of a rung of the ladder, in requests per second."""

    part: str  # "loads" or "ladder"
    load: str
    way: Way
    repeat: int
    times: list[float] = field(repr=False)
    seconds: float
    drain_s: float
    source: str = ""
    rate: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.part, self.load, self.way.name, self.repeat


def turned(ways: Sequence[Way], turn: int) -> list[Way]:
    """Return the ways beginning with another one."""
    first = turn % len(ways)
    return [*ways[first:], *ways[:first]]


class Kept:
    """A JSON file of runs: `plan` says what was asked for, `found` what was measured before the first run."""

    def __init__(self, path: Path, plan: Mapping[str, Any], *, redo_disturbed: bool = False) -> None:
        """Go on with the runs in the file. Raises InputError if they are of another plan.

        redo_disturbed: forget the runs that `is_disturbed` says were.
        """
        self.path = path
        wanted = json.loads(json.dumps(plan))
        self.found: dict[str, Any] = {"plan": wanted, "sessions": [], "rows": []}
        if path.exists():
            self.found = json.loads(path.read_text())
            _check(path, self.found.get("plan", {}), wanted)
        if redo_disturbed:
            self.found["rows"] = [one for one in self.rows if not is_disturbed(one)]

    @property
    def rows(self) -> list[Row]:
        rows: list[Row] = self.found["rows"]
        return rows

    def of(self, part: str) -> list[Row]:
        return [one for one in self.rows if one["part"] == part]

    def has(self, job: Job) -> bool:
        return any((one["part"], one["load"], one["way"], one["repeat"]) == job.key for one in self.rows)

    def add(self, job: Job, row: Row) -> None:
        """Keep a run on disk at once."""
        named = dict(zip(("part", "load", "way", "repeat"), job.key, strict=True))
        self.rows.append(row | named)
        self.write()

    def write(self) -> None:
        """Write the file whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self.found, separators=(",", ":")) + "\n")
        unfinished.replace(self.path)


def _check(path: Path, plan: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if plan.get(name) != value:
            raise InputError(
                f"{path}: holds runs with {name} {plan.get(name)}, asked for is {value}; move the file away "
                "to begin anew, or name another"
            )


def commit() -> str:
    """Return the short id of the commit that is measured."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
