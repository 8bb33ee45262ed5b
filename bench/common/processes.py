"""Processes of a benchmark that answer calls over pipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Self

END = ""  # the name of the last call; no method has it
END_S = 20.0


class Children:
    """Child processes; a context that ends them.

    Each runs `target(connection, *arguments)`, sends one message when it is ready, and then answers tuples
    (name, *arguments) until the name is END. An answer that is an exception is raised here.
    """

    def __init__(
        self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]], timeout_s: float
    ) -> None:
        spawn = get_context("spawn")
        self._timeout_s = timeout_s
        self._lines: list[Connection] = []
        self.processes: list[Any] = []
        for own in arguments:
            ours, theirs = spawn.Pipe()
            self.processes.append(spawn.Process(target=target, args=(theirs, *own), daemon=True))
            self.processes[-1].start()
            theirs.close()  # so that the end of a child closes the pipe
            self._lines.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, within_s: float) -> list[Any]:
        """Return the first message of each child. Ends all of them if one fails."""
        try:
            return [self._answer(child, within_s) for child in range(len(self._lines))]
        except BaseException:
            self.close()
            raise

    def ask(self, child: int, name: str, *arguments: Any) -> Any:
        """Call one child and return its answer. Raises TimeoutError, or EOFError if the child has died."""
        self._lines[child].send((name, *arguments))
        return self._answer(child, self._timeout_s)

    def ask_each(self, name: str, arguments: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Call all children at once, each with its own arguments, and return their answers."""
        for child, line in enumerate(self._lines):
            line.send((name, *(arguments[child] if arguments else ())))
        return [self._answer(child, self._timeout_s) for child in range(len(self._lines))]

    def close(self) -> None:
        for line in self._lines:
            with suppress(OSError):
                line.send((END,))
        for process in self.processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
        for line in self._lines:
            line.close()

    def _answer(self, child: int, within_s: float) -> Any:
        line = self._lines[child]
        if not line.poll(within_s):
            raise TimeoutError(f"child process {child} has not answered within {within_s:g} s")
        answer = line.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer
