"""What `instar bench` says when it cannot go on."""

from __future__ import annotations

from pathlib import Path


class BenchProblem(Exception):
    """Names what was wrong, the value, and what to do."""


class ServerProblem(BenchProblem):
    """No server is there, or it refuses whatever is asked."""


class TraceProblem(BenchProblem):
    """A file that is no trace; `line` counts from 1, 0: the whole file."""

    def __init__(self, path: Path | str, line: int, message: str) -> None:
        super().__init__(f"{path}, line {line}: {message}" if line else f"{path}: {message}")
