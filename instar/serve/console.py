"""What `instar serve` writes: its own words, and its children's lines with their names before them."""

from __future__ import annotations

import sys
from typing import TextIO

NAME_WIDTH = 10


class Console:
    """Writes whole lines. A terminal that went away is no reason to stop serving."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()

    def say(self, text: str) -> None:
        self._write(f"\033[1m{text}\033[0m" if self._is_terminal else text)

    def child_line(self, name: str, text: str) -> None:
        label = f"{name:<{NAME_WIDTH}}|"
        self._write(f"\033[2m{label}\033[0m {text}" if self._is_terminal else f"{label} {text}")

    def _write(self, line: str) -> None:
        try:
            self._out.write(line + "\n")
            self._out.flush()
        except UnicodeEncodeError:
            self._write(line.encode("ascii", "replace").decode())
        except (OSError, ValueError):  # EPIPE, EIO of a closed terminal, a closed file
            pass
