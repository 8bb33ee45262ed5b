"""One line of a terminal that tells how far something is."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO


class LiveLine:
    """Each text takes the place of the one before; `end` leaves the last. Where nobody watches (stderr is no
    terminal) nothing is written: the end of what is waited for says enough there."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self.is_watched = self._out.isatty()
        self._told = ""

    def show(self, text: str) -> None:
        if not self.is_watched or text == self._told:
            return
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap, and could not be replaced
        self._out.write(f"\r\033[K{text[:width]}")
        self._out.flush()
        self._told = text

    def end(self) -> None:
        if self._told:
            self._out.write("\n")
            self._told = ""
