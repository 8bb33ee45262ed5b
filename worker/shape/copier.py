"""The thread that copies weights while the engine's thread runs steps, and the share of time it may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

STOP_S = 10.0  # a chunk takes milliseconds; a copy that does not stop at its next one is stuck for good


class CopyJob(Protocol):
    """Fills the pages of one variant, in another thread than the engine's; holds no lock while it copies."""

    @property
    def nbytes(self) -> int: ...

    @property
    def read_bytes(self) -> int:
        """What its time goes by: the bytes that it must go through to write `nbytes`."""

    def __call__(self, may_go_on: Callable[[], bool], /) -> None:
        """Copies in chunks of some milliseconds at most and asks after each; returns at once on False.
        On a device with streams it returns when the device has all of it."""


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


# Of what was known, with each new piece of work: after ten of a size a tenth is left.
_KEPT = 0.8


class Rate:
    """Bytes by seconds, what was done lately weighing most. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._done = (0.0, 0.0)  # at once, since another thread reads it

    def add(self, nbytes: int, seconds: float) -> None:
        """What took no bytes or no time tells nothing."""
        if nbytes > 0 and seconds > 0:
            before_bytes, before_s = self._done
            self._done = before_bytes * _KEPT + nbytes, before_s * _KEPT + seconds

    @property
    def bytes_per_s(self) -> float:
        """0.0: nothing was ever measured."""
        nbytes, seconds = self._done
        return nbytes / seconds if seconds else 0.0


# An idle engine can spend all its time on morphs, but must look for new requests now and then.
IDLE_TURN_S = 0.005


class Pace:
    """Morphs work in small units. A unit begins while the units before have taken less than `share` of the
    time that passed; one that takes longer is paid for by the steps after it. So steps lose `share` of their
    speed at most, on a fast device and on a slow one.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """`share`: of the time, above 0 and at most 1."""
        if not 0 < share <= 1:
            raise ValueError(f"a share of {share}; it must be above 0 and at most 1")
        self._share, self._clock = share, clock
        self._credit_s = 0.0
        self._began = self._since = clock()

    def begin(self, is_busy: bool) -> None:
        """A boundary. What an idle engine spent or saved is forgotten."""
        now = self._clock()
        earned = (now - self._began) * self._share
        self._credit_s = min(self._credit_s + earned, 0.0) if is_busy else IDLE_TURN_S
        self._began = self._since = now

    @property
    def has_time(self) -> bool:
        return self._credit_s >= 0

    def spent(self) -> float:
        """A unit ended. Returns the seconds it took: those since the last call of this or of `begin`."""
        now = self._clock()
        took_s = now - self._since
        self._credit_s -= took_s
        self._since = now
        return took_s
