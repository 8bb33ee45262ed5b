"""Errors that end a command. The message is one line: what was wrong, the value, and what to do."""

from __future__ import annotations

from pathlib import Path


class CommandError(Exception):
    """The command cannot go on."""

    exit_status = 1


class InputError(CommandError):
    """A value or a file that the user named cannot be used."""

    exit_status = 2


class ServerError(CommandError):
    """No server answers at the URL, or the server refuses the request."""


class TraceError(InputError):
    """A file is not a trace. `line` counts from 1; 0 means the whole file."""

    def __init__(self, path: Path | str, line: int, message: str) -> None:
        super().__init__(f"{path}, line {line}: {message}" if line else f"{path}: {message}")
