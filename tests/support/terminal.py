"""A program in a pseudo-terminal: what it shows, and keys for it."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>()][A-Z0-9]?)")
_READS = "\x1b[?2004h"  # bracketed paste is switched on for each line
CTRL_C = b"\x03"
CTRL_D = b"\x04"
ENTER = b"\r"


class Terminal:
    """The terminal's end that a user sees."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd
        self.raw = ""  # all that the program wrote

    @property
    def text(self) -> str:
        """All that the program wrote, without sequences that move the cursor or colour."""
        return _ESCAPES.sub("", self.raw)

    def type(self, keys: bytes | str) -> None:
        os.write(self._fd, keys.encode() if isinstance(keys, str) else keys)

    def ask(self, line: str) -> None:
        self.type(line)
        self.type(ENTER)

    def wait_for(self, text: str, count: int = 1, within_s: float = 30.0) -> None:
        """Read until `text` has been shown `count` times. Raises AssertionError with what was shown."""
        deadline = time.monotonic() + within_s
        while self.text.count(text) < count:
            if time.monotonic() > deadline or not self._read(0.1):
                raise AssertionError(
                    f"{text!r} was not shown {count} times within {within_s} s:\n{self.text}"
                )

    def wait_for_prompt(self, count: int, within_s: float = 30.0) -> None:
        """Read until prompt_toolkit begins to read a line for the `count`th time: it loses keys before."""
        deadline = time.monotonic() + within_s
        while self.raw.count(_READS) < count:
            if time.monotonic() > deadline or not self._read(0.1):
                raise AssertionError(f"no line was read {count} times in {within_s} s:\n{self.text}")

    def end(self, within_s: float = 30.0) -> int:
        """Read until the program ends. Returns its exit status."""
        deadline = time.monotonic() + within_s
        while self._read(0.1) and time.monotonic() < deadline:
            pass
        while time.monotonic() < deadline:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise AssertionError(f"the program has not ended within {within_s} s:\n{self.text}")

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def _read(self, within_s: float) -> bool:
        """Take what the program writes within a time. Returns False when it has ended."""
        if not select.select([self._fd], [], [], within_s)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # EIO: no process has the terminal any more
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[Terminal]:
    """Run a program in a terminal of 80 columns within the block."""
    pid, fd = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells let background jobs ignore it
        os.execve(argv[0], list(argv), {**environ, "PROMPT_TOOLKIT_NO_CPR": "1"})
    opened = Terminal(pid, fd)
    try:
        yield opened
    finally:
        opened.close()
