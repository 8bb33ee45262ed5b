"""Copies of weights beside the steps: the jobs, the thread that does them, the share of time it may take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

import torch

from worker.memory import VirtualRange
from worker.memory.backend import Finish
from worker.model.layout import RangePlan
from worker.model.sources import WeightSource
from worker.model.weights import tensors_in
from worker.shape.checks import CheckedPages, row_sums

STOP_S = 10.0  # a chunk takes milliseconds: a copy that needs longer to stop is stuck


Pause = Callable[[], object]  # called after each chunk of milliseconds; raises GivenUp if no other may follow


class GivenUp(Exception):
    """Raised within a job that is stopped."""


@dataclass(slots=True)
class Reads:
    """The bytes that a copy has had from a disk so far, and their time."""

    is_disk: bool = False  # its bytes may come from one
    disk_bytes: int = 0  # the other bytes were in host memory
    disk_s: float = 0.0  # the time that the disk took for them, beside the copy or before it
    waited_s: float = 0.0  # of the copy, for the disk


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A job that fills the pages of one variant in another thread than the engine's, holding no lock."""

    nbytes: int
    read_bytes: int  # bytes read in order to write `nbytes`: the measure of its time
    copy: Callable[[Pause], None]  # copies in chunks of milliseconds
    reads: Reads = field(default_factory=Reads)

    def __call__(self, pause: Pause) -> None:
        self.copy(pause)


class Copy:
    """One copy: waiting, running or finished."""

    def __init__(self, job: CopyJob) -> None:
        self.nbytes, self.read_bytes, self.reads = job.nbytes, job.read_bytes, job.reads
        self.seconds = 0.0  # spent copying; pauses, and waits for a disk, are not counted
        self.last_s = 0.0  # of these since the last rest
        self._job = job
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_running = False
        self._stopping, self._ended = threading.Event(), threading.Event()

    @property
    def is_done(self) -> bool:
        """True when nothing is written any more: the copy finished, failed, or was stopped."""
        return self._ended.is_set()

    @property
    def has_begun(self) -> bool:
        return self._is_running

    @property
    def is_whole(self) -> bool:
        """True if the copy came to its end."""
        return self.is_done and self._error is None and not self._stopping.is_set()

    @property
    def error_text(self) -> str:
        """The error of the job, for people; empty for nothing."""
        return f"{type(self._error).__name__}: {self._error}" if self._error else ""

    def raise_error(self) -> None:
        """Raise what the job raised, once the copy is done."""
        if self._error:
            raise self._error

    def abandon(self) -> None:
        """Stop without waiting for the end of the chunk: for work that writes nowhere."""
        self._stopping.set()
        with self._lock:
            if not self._is_running:
                self._ended.set()

    def stop(self) -> None:
        """Stop, and return when nothing is written any more. Raises RuntimeError if a chunk does not end."""
        self.abandon()
        if not self._ended.wait(STOP_S):
            raise RuntimeError(f"a copy of {self.nbytes} bytes did not stop within {STOP_S} s")

    def run(self, share: Callable[[], float]) -> None:
        """Run in the copying thread, resting between chunks so that chunks take `share` of the time."""
        with self._lock:
            if self._ended.is_set():
                return
            self._is_running = True
        began, waited_s = time.perf_counter(), self.reads.waited_s

        def worked() -> float:
            took_s = time.perf_counter() - began - (self.reads.waited_s - waited_s)
            self.seconds += took_s
            return took_s

        def pause() -> None:
            nonlocal began, waited_s
            rest(worked(), share, self._stopping)
            began, waited_s = time.perf_counter(), self.reads.waited_s
            if self._stopping.is_set():
                raise GivenUp

        try:
            with suppress(GivenUp):
                self._job(pause)
            self.last_s = worked()
        except BaseException as error:  # noqa: BLE001 the engine's thread raises it
            self._error = error
        finally:
            self._ended.set()


REST_S: Final = 0.005  # after so long a rest the share is asked for again: it may have become urgent


def rest(took_s: float, share: Callable[[], float], stopping: threading.Event) -> None:
    """Rest after `took_s` of work for as long as the share says, or until `stopping`."""
    began = time.perf_counter()
    while True:
        left_s = took_s * (1 / share() - 1) - (time.perf_counter() - began)
        if left_s <= 0 or stopping.wait(min(left_s, REST_S)):
            return


def until_done(copy: Copy, leave: Callable[[], None]) -> Generator[bool, None, None]:
    """Yield False until the copy is done, and raise its error. `leave`: called if this is closed before."""
    try:
        while not copy.is_done:
            yield False
    except GeneratorExit:
        leave()
        raise
    copy.raise_error()


class Copier:
    """A thread that runs copies one after the other, in the order of their start."""

    def __init__(self, on_done: Callable[[], None], share: Callable[[], float] = lambda: 1.0) -> None:
        """Prepare; the thread starts with the first copy.

        on_done: called in the copying thread after each copy. share: called after each chunk; the part of the
        time (0..1] for copies. On a CPU they take cores and memory from the steps.
        """
        self.rate = Rate()  # rate of the bytes that jobs read, without pauses
        self._on_done, self._share = on_done, share
        self._queue: SimpleQueue[Copy | None] = SimpleQueue()
        self._copies: list[Copy] = []  # those that have not ended, and some that have
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._num_started = self._num_ended = 0
        self._end = threading.Condition()

    def start(self, job: CopyJob) -> Copy:
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._run, name="morph-copies", daemon=True)
            self._thread.start()
        copy = Copy(job)
        self._copies = [*(each for each in self._copies if not each.is_done), copy]
        self._num_started += 1
        self._queue.put(copy)
        return copy

    def wait(self, within_s: float) -> bool:
        """Wait for the end of a copy, in the thread that starts them. Return True if one has ended."""
        with self._end:
            before = self._num_ended
            if before == self._num_started:
                return False
            return self._end.wait_for(lambda: self._num_ended > before, within_s)

    def close(self) -> None:
        """Stop the copies that were started, and end the thread as soon as the chunk in hand is done."""
        if self._thread:
            self._closing.set()
            for copy in self._copies:
                copy.abandon()
            self._queue.put(None)
            self._thread.join(STOP_S)
            self._thread = None

    def _run(self) -> None:
        while copy := self._queue.get():
            copy.run(self._share)
            if copy.is_whole:
                self.rate.add(copy.read_bytes, copy.seconds + copy.reads.waited_s)
            with self._end:
                self._num_ended += 1
                self._end.notify_all()
            self._on_done()
            if copy.nbytes:  # else it rests in its pauses alone: a compiler can take a minute
                rest(copy.last_s, self._share, self._closing)  # only now: the engine need not wait for it


# The weight of older work falls by this factor with each piece: after ten of a size a tenth is left.
_KEPT = 0.8


class Rate:
    """The recent speed of one kind of work. One thread adds to it, any thread may read it."""

    def __init__(self) -> None:
        self._done = (0.0, 0.0)  # at once, since another thread reads it

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a piece of work. Pieces without bytes or without time are ignored."""
        if nbytes > 0 and seconds > 0:
            before_bytes, before_s = self._done
            self._done = before_bytes * _KEPT + nbytes, before_s * _KEPT + seconds

    @property
    def bytes_per_s(self) -> float:
        """The mean speed, recent pieces weighing most; 0.0 before the first one."""
        nbytes, seconds = self._done
        return nbytes / seconds if seconds else 0.0


# An idle engine can spend all its time on morphs, but must look for new requests now and then.
IDLE_TURN_S = 0.005
# What runs waits no longer than this at one boundary, however urgent a morph is.
URGENT_TURN_S: Final = 0.05


class Pace:
    """A limit to the share of the engine's time that morphs take at step boundaries.

    A unit of work begins while those before have taken less than `share` of the time that passed; the steps
    after a longer unit pay for it. An urgent morph may run up debts, since the next step may be a long one.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Allow `share` of the time. Raises ValueError unless it is above 0 and at most 1."""
        if not 0 < share <= 1:
            raise ValueError(f"the share is {share}; it must be above 0 and at most 1")
        self._share, self._clock = share, clock
        self._credit_s = self._debt_s = 0.0
        self._began = self._since = clock()

    def begin(self, is_busy: bool, at_least: float = 0.0) -> None:
        """Begin a step boundary. Credit that an idle engine saved or spent is dropped.

        at_least: the share (0..1) since the last boundary, if it is more than that of this pace; so much of
        URGENT_TURN_S may be spent ahead.
        """
        now = self._clock()
        earned = (now - self._began) * max(self._share, at_least)
        self._credit_s = min(self._credit_s + earned, 0.0) if is_busy else IDLE_TURN_S
        self._debt_s = URGENT_TURN_S * at_least if is_busy else 0.0
        self._began = self._since = now

    @property
    def has_time(self) -> bool:
        """True if another unit may begin."""
        return self._credit_s + self._debt_s >= 0

    @property
    def left_s(self) -> float:
        """The seconds that are left before `has_time` is False."""
        return max(0.0, self._credit_s + self._debt_s)

    def spent(self) -> float:
        """End a unit. Return the seconds since the last call of this or of `begin`."""
        now = self._clock()
        took_s = now - self._since
        self._credit_s -= took_s
        self._since = now
        return took_s


# A millisecond on a CPU: a copy can be stopped, and rests, after each chunk. Smaller chunks cost more calls
# (1 MiB on a CPU: half as long again). A GPU maps the next chunk while one is copied, in 0.3 ms, and checked;
# its copy engine waits for the pages of the first.
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24


def chunk_bytes_of(device: torch.device) -> int:
    """Return the bytes that are copied to a device at once."""
    return _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES


_ADVICE = (
    "memory of the device or of the host is damaged (to make the host's copy again, stop all workers of this"
    " model)"
)

ByteSpan = tuple[int, int]  # [begin, end) in bytes of a range


def host_copy(
    what: str,
    image: torch.Tensor,
    sums: torch.Tensor,
    target: VirtualRange,
    device: torch.device,
    spans: Sequence[ByteSpan],
) -> CopyJob:
    """Return a job that copies `spans`, whole mapped pages, of an image, uint8 [n], and checks each chunk.

    sums: `row_sums` of the image. It raises WrongVariant, which names `what`.
    """
    pages = CheckedPages(what, target, image.numel(), sums, _ADVICE)
    chunk_bytes = chunk_bytes_of(device)

    def copy(pause: Pause) -> None:
        chunks = [
            (first, min(first + chunk_bytes, end))
            for begin, end in spans
            for first in range(begin, end, chunk_bytes)
        ]
        finish: Finish | None = None
        try:
            for number, (first, end) in enumerate(chunks):
                if number:
                    pause()
                before, finish = finish, pages.begin_put(first, image[first:end])
                if before:  # while this chunk is copied
                    before()
        finally:
            if finish:
                finish()

    nbytes = sum(end - begin for begin, end in spans)
    return CopyJob(nbytes, nbytes, copy)


def source_copy(
    what: str,
    plan: RangePlan,
    source: WeightSource,
    target: VirtualRange,
    spans: Sequence[ByteSpan],
    device: torch.device,
) -> CopyJob:
    """Return a job that lays out a half from the checkpoint and copies `spans` as `host_copy` does.

    It also raises ModelError.
    """

    def copy(pause: Pause) -> None:
        where = device if source.depends_on_device else torch.device("cpu")
        image = lay_out(plan, source, where, pause).cpu()
        host_copy(what, image, row_sums(image), target, device, spans)(pause)

    return CopyJob(sum(end - begin for begin, end in spans), plan.nbytes, copy)


def lay_out(
    plan: RangePlan, source: WeightSource, device: torch.device, pause: Pause = lambda: None
) -> torch.Tensor:
    """Return uint8 [plan.nbytes] in full precision, as it lies in a model's pages."""
    laid_out = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    tensors = tensors_in(laid_out, plan)
    try:
        for each in plan.sources:
            source.fill(each.targets(tensors), each, pause)
    finally:
        source.close()
    return laid_out
