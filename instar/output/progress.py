"""One line of a terminal that shows progress."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class StatusLine:
    """Each text replaces the one before. Where standard error is not a terminal, `show` writes nothing."""

    def __init__(self) -> None:
        self.is_watched = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""

    def show(self, text: str) -> None:
        if not self.is_watched or text == self._shown:
            return
        width = shutil.get_terminal_size().columns - 1  # a full line would wrap, and could not be replaced
        sys.stderr.write(f"\r\033[K{text[:width]}")
        sys.stderr.flush()
        self._shown = text

    def end(self, text: str = "") -> None:
        """Leave the line as it is, and write `text` as a line of its own."""
        if self._shown:
            sys.stderr.write("\n")
            self._shown = ""
        if text:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def bar(share: float, width: int = 20) -> str:
    """Return `[#####...............]` for a quarter; shares below 0 and above 1 are drawn as these."""
    done = round(width * min(1.0, max(0.0, share)))
    return f"[{'#' * done}{'.' * (width - done)}]"


@contextmanager
def progress_line(hint: str) -> Iterator[StatusLine]:
    """Show the progress of what the block waits for. Ctrl-C ends the wait only, as `hint` says."""
    line = StatusLine()
    try:
        yield line
    except KeyboardInterrupt:
        line.end(hint)
        raise
    finally:
        line.end()
