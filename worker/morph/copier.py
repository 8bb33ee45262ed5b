"""One thread that copies weights into their pages while the engine's thread runs steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from worker.morph.rate import Rate
from worker.morph.verbs import CopyJob

STOP_S = 10.0  # a chunk takes milliseconds; a copy that does not stop at its next one is stuck for good


class Copy:
    """One copy, waiting, running or over."""

    def __init__(self, job: CopyJob) -> None:
        self.nbytes, self.read_bytes = job.nbytes, job.read_bytes
        self.seconds = 0.0  # spent copying, pauses not counted
        self._job = job
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_running = False
        self._stopping, self._ended = threading.Event(), threading.Event()

    @property
    def is_done(self) -> bool:
        """Nothing writes any more: it came to its end, failed, or was stopped."""
        return self._ended.is_set()

    @property
    def is_whole(self) -> bool:
        """It came to its end."""
        return self.is_done and self._error is None and not self._stopping.is_set()

    def raise_error(self) -> None:
        """Raises what the job raised, once it is done."""
        if self._error:
            raise self._error

    def abandon(self) -> None:
        """As `stop`, for work that writes nowhere: it may go on for a while."""
        self._stopping.set()

    def stop(self) -> None:
        """Returns when nothing writes any more, at the latest after a chunk. RuntimeError if that never
        comes: the memory below it cannot be given to anybody."""
        self._stopping.set()
        with self._lock:
            if not self._is_running:
                self._ended.set()
        if not self._ended.wait(STOP_S):
            raise RuntimeError(f"a copy of {self.nbytes} bytes did not stop within {STOP_S} s")

    def run(self, share: Callable[[], float]) -> None:
        """In the copying thread. After each chunk it rests, so that the chunks take `share` of the time."""
        with self._lock:
            if self._ended.is_set():
                return
            self._is_running = True
        began = time.perf_counter()

        def may_go_on() -> bool:
            nonlocal began
            took = time.perf_counter() - began
            self.seconds += took
            rest_s = took * (1 / share() - 1)
            is_stopping = self._stopping.wait(rest_s) if rest_s > 0 else self._stopping.is_set()
            began = time.perf_counter()
            return not is_stopping

        try:
            self._job(may_go_on)
            self.seconds += time.perf_counter() - began
        except BaseException as error:  # noqa: BLE001 the engine's thread raises it again
            self._error = error
        finally:
            self._ended.set()


class Copier:
    """Copies run one after the other, in the order of their start."""

    def __init__(self, on_done: Callable[[], None], share: Callable[[], float] = lambda: 1.0) -> None:
        """on_done: called in the copying thread after each copy. share: asked after each chunk, which part
        of the time copying may take now (0..1]: on a CPU it takes cores and memory from the steps."""
        self.rate = Rate()  # of what its jobs read, pauses not counted
        self._on_done, self._share = on_done, share
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: CopyJob) -> Copy:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="morph-copies", daemon=True)
            self._thread.start()
        copy = Copy(job)
        self._queue.put(copy)
        return copy

    def close(self) -> None:
        """Stop all copies before this."""
        if self._thread:
            self._queue.put(None)
            self._thread.join(STOP_S)
            self._thread = None

    def _run(self) -> None:
        while copy := self._queue.get():
            copy.run(self._share)
            if copy.is_whole:
                self.rate.add(copy.read_bytes, copy.seconds)
            self._on_done()
