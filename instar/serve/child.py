"""One run of one process, tied to the life of its parent and in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import cast

PDEATHSIG = Path(__file__).with_name("pdeathsig.py")
MAX_LINE_BYTES = 64 * 1024  # a longer line is shown in pieces
LAST_LINES_S = 1.0  # wait for the last lines of a dead process, if a grandchild holds the pipe


class Child(asyncio.SubprocessProtocol):
    """A process. `await Child.start(...)`, then `await child.wait()`.

    In a session of its own it gets no Ctrl-C of the terminal: the supervisor decides in which order processes
    end. What it started itself and left behind is killed after it.
    """

    transport: asyncio.SubprocessTransport

    def __init__(self, on_line: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_line = on_line
        self._buffer = b""
        self._exited: asyncio.Future[int] = loop.create_future()
        self._silent: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def start(
        cls, argv: Sequence[str], env: Mapping[str, str], stdin: bytes, on_line: Callable[[str], None]
    ) -> Child:
        transport, child = await asyncio.get_running_loop().subprocess_exec(
            lambda: cls(on_line),
            *(sys.executable, "-I", "-S", str(PDEATHSIG), str(os.getpid()), *argv),
            env=dict(env),
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        if stdin:
            pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
            pipe.write(stdin)
            pipe.write_eof()
        return child

    async def wait(self) -> int:
        """Return the exit status, negative for a signal, after the last line."""
        status = await asyncio.shield(self._exited)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.transport.get_pid(), Signals.SIGKILL)
        await asyncio.wait({self._silent}, timeout=LAST_LINES_S)
        self.transport.close()
        return status

    def signal(self, number: Signals) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.transport.send_signal(number)

    @property
    def is_running(self) -> bool:
        return not self._exited.done()

    # The rest is called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.SubprocessTransport, transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            lines.append(self._buffer)
            self._buffer = b""
        for line in lines:
            self._on_line(line.decode("utf-8", "replace").rstrip())

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1 and not self._silent.done():
            if self._buffer:
                self.pipe_data_received(fd, b"\n")
            self._silent.set_result(None)

    def process_exited(self) -> None:
        status = self.transport.get_returncode()
        self._exited.set_result(-Signals.SIGKILL if status is None else status)
