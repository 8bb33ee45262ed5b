"""The ring between images on a disk and the device: bounded, never overwritten in use, free after any end."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.memory_faults import FaultyDriver
from worker.shape.copier import GivenUp, Reads
from worker.shape.host_ring import READERS, SLOTS, HostRing, ImageLost
from worker.shape.slots import LEAST_SLOTS, Chunk, ChunkDemand, RingSlots

SLOT = 4096
CHUNKS = 40  # of a file


class AnyHistory(RuleBasedStateMachine):
    """Copies that begin and end at any point, reads that end in any order or fail, on `RingSlots` alone.

    `contents`: what the memory of each slot holds; None while something is being read into it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = RingSlots(6)
        self.contents: list[Chunk | None] = [None] * 6
        self.reading: list[int] = []
        self.copies: list[ChunkDemand] = []
        self.copying: dict[int, int] = {}  # slot that a copy reads now, by its place in `copies`

    @rule(first=st.integers(0, 20), length=st.integers(1, 12), file=st.integers(1, 2))
    def begin(self, first: int, length: int, file: int) -> None:
        if len(self.copies) < 4:
            self.copies.append(self.book.open([Chunk(file, n, 1) for n in range(first, first + length)]))

    @rule(first=st.integers(0, 20), length=st.integers(0, 12), key=st.integers(0, 1))
    def expect(self, first: int, length: int, key: int) -> None:
        self.book.expect(key, [Chunk(1, n, 1) for n in range(first, first + length)])

    @rule(times=st.integers(1, 3))
    def read(self, times: int) -> None:
        for _ in range(times):
            if (slot := self.book.next_read()) is not None:
                assert slot not in self.reading and slot not in self.copying.values()
                self.reading.append(slot)
                self.contents[slot] = None

    @rule(which=st.integers(0, 5), fails=st.integers(0, 9))
    def end_read(self, which: int, fails: int) -> None:
        if self.reading:
            slot = self.reading.pop(which % len(self.reading))
            chunk = self.book.slots[slot].chunk
            self.book.read_done(slot, 0.5, OSError(5, "broken") if fails == 0 else None)
            self.contents[slot] = chunk if fails else None

    @rule(which=st.integers(0, 3))
    def take(self, which: int) -> None:
        if which >= len(self.copies) or which in self.copying:
            return
        copy = self.copies[which]
        try:
            slot = self.book.take(copy)
        except OSError:
            self.end(which)
            return
        if slot is not None:
            assert self.contents[slot] == copy.chunks[copy.taken]
            self.copying[which] = slot

    @rule(which=st.integers(0, 3))
    def give(self, which: int) -> None:
        if which in self.copying:
            copy, slot = self.copies[which], self.copying.pop(which)
            assert self.contents[slot] == copy.chunks[copy.taken]
            self.book.give(copy)
            if copy.taken == len(copy.chunks):
                self.end(which)

    @rule(which=st.integers(0, 3))
    def cancel(self, which: int) -> None:
        if which < len(self.copies):
            self.end(which)

    def end(self, which: int) -> None:
        self.book.close(self.copies[which])
        self.book.close(self.copies[which])
        del self.copies[which]
        self.copying = {at - (at > which): slot for at, slot in self.copying.items() if at != which}

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.book.check_integrity()
        for which, slot in self.copying.items():
            assert self.contents[slot] == self.copies[which].chunks[self.copies[which].taken]

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """Some copy can go on, or the disk works."""
        if self.copies and not self.copying and not self.reading:
            slot = self.book.next_read()
            if slot is None:
                fronts = [copy.ahead for copy in self.copies]
                assert any(copy.error for copy in self.copies) or any(fronts)
            else:
                self.reading.append(slot)
                self.contents[slot] = None

    def teardown(self) -> None:
        while self.copies:
            self.end(0)
        while self.reading:
            self.book.read_done(self.reading.pop(), 0.0)
        for key in (0, 1):
            self.book.expect(key, [])
        for file in (1, 2):
            self.book.forget(file)
        assert all(slot.chunk is None for slot in self.book.slots), "a slot is held by nobody"
        self.book.check_integrity()


TestAnyHistory = AnyHistory.TestCase


def test_a_ring_of_too_few_slots_is_refused() -> None:
    with pytest.raises(ValueError, match=f"of {LEAST_SLOTS - 1} slots .* needs {LEAST_SLOTS}"):
        RingSlots(LEAST_SLOTS - 1)
    with pytest.raises(ValueError, match="of 100 bytes is too small: it needs 32768"):
        HostRing(100, slot_bytes=SLOT)


# ------------------------------------------------------------------------------- with a real file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "images").write_bytes(random.Random(0).randbytes(CHUNKS * SLOT))
    return tmp_path / "images"


@contextmanager
def ring_over(
    path: Path, num_slots: int = SLOTS, gpu: torch.device | None = None
) -> Iterator[tuple[HostRing, int]]:
    """A ring with the file attached; afterwards its memory and its thread are gone."""
    ring = HostRing(num_slots * SLOT, slot_bytes=SLOT, gpu=gpu)
    fd = os.open(path, os.O_RDONLY)
    number = ring.attach(path, fd)
    os.close(fd)
    readers = list(ring._readers)
    assert ring.nbytes == num_slots * SLOT and readers
    try:
        yield ring, number
        ring.check_integrity()
    finally:
        ring.detach(number)
    for reader in readers:
        reader.join(10.0)
        assert not reader.is_alive()
    assert ring._memory is None


def test_a_ring_is_pinned_while_a_file_is_attached_and_reads_if_it_cannot_be(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FaultyDriver(monkeypatch)
    for refused in (0, 1):
        driver.arm(1, refused)
        with ring_over(path, gpu=torch.device("cuda:0")) as (ring, number):
            assert bool(driver.pinned) is not bool(refused)
            found, _ = read(ring, chunks_of(number, 0, CHUNKS))
            assert found == path.read_bytes()
        assert not driver.pinned
    assert "could not be pinned (CUDA_ERROR" in caplog.text and "worker.host_memory_mb" in caplog.text


def chunks_of(number: int, first: int, end: int) -> list[Chunk]:
    return [Chunk(number, n * SLOT, SLOT) for n in range(first, end)]


def read(ring: HostRing, chunks: list[Chunk], pause: Any = lambda: None) -> tuple[bytes, Reads]:
    reads, found = Reads(), b""
    with closing(ring.stream(chunks, pause, reads)) as stream:
        for data in stream:
            found += data.numpy().tobytes()
    return found, reads


def test_what_is_streamed_is_what_the_file_holds_and_says_where_it_came_from(path: Path) -> None:
    whole = path.read_bytes()
    with ring_over(path) as (ring, number):
        found, reads = read(ring, chunks_of(number, 0, CHUNKS))
        assert found == whole and reads.disk_bytes == len(whole) and reads.disk_s > 0
        found, reads = read(ring, chunks_of(number, CHUNKS - 3, CHUNKS))
        assert found == whole[-3 * SLOT :] and reads.disk_bytes == 0, "it is still there"
        found, reads = read(ring, [Chunk(number, 0, 100)])  # the end of an image, in a page of its own
        assert found == whole[:100] and reads.disk_bytes == 100


def test_copies_at_once_that_are_cancelled_anywhere_get_right_bytes_and_leave_all_slots(path: Path) -> None:
    whole, errors = path.read_bytes(), list[BaseException]()

    def copy(seed: int, ring: HostRing, number: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(60):
                first = draw.randrange(CHUNKS - 1)
                chunks = chunks_of(number, first, draw.randint(first + 1, CHUNKS))
                stop_at = draw.randint(0, 2 * len(chunks))
                if draw.random() < 0.3:
                    ring.expect(seed, chunks_of(number, 0, draw.randint(0, 9)))
                with closing(ring.stream(chunks, lambda: None, Reads())) as stream:
                    for chunk, data in zip(chunks, stream, strict=False):
                        wanted = whole[chunk.offset : chunk.offset + SLOT]
                        assert data.numpy().tobytes() == wanted
                        time.sleep(draw.choice((0.0, 0.0, 0.0005)))
                        assert data.numpy().tobytes() == wanted, "the slot was used again while it was read"
                        stop_at -= 1
                        if stop_at < 0:
                            break
        except BaseException as error:  # noqa: BLE001 raised again below
            errors.append(error)

    with ring_over(path) as (ring, number):
        threads = [threading.Thread(target=copy, args=(seed, ring, number)) for seed in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            ring.check_integrity()
            time.sleep(0.001)
        assert not errors, errors[0]
        assert ring._slots.num_held == 0


def test_what_is_expected_is_read_while_nothing_is_copied(path: Path) -> None:
    with ring_over(path) as (ring, number):
        ring.expect("swap", chunks_of(number, 5, 30))
        deadline = time.monotonic() + 10
        while len(ring._slots._where) < SLOTS // 2 or ring._slots.is_reading(number):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert len(ring._slots._where) == SLOTS // 2, "copies need the other half"
        ring.expect("swap", [])
        os.truncate(path, 0)  # from here on the disk has nothing
        found, reads = read(ring, chunks_of(number, 5, 5 + SLOTS // 2))
        assert len(found) == reads.disk_bytes == SLOTS // 2 * SLOT, "it came from the disk, though before"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: os.truncate(path, 20 * SLOT), "changed by another program"),
        (lambda path: path.write_bytes(bytes(CHUNKS * SLOT)), "changed by another program"),
    ],
)
def test_a_file_that_was_changed_is_named_and_not_used(path: Path, damage: Any, reason: str) -> None:
    with ring_over(path) as (ring, number):
        read(ring, chunks_of(number, 0, 2))
        time.sleep(0.02)  # the clock of a file system is coarse
        damage(path)
        with pytest.raises(ImageLost, match=rf"images was {reason}"):
            read(ring, chunks_of(number, 0, CHUNKS))
        assert ring._slots.num_held == 0


def test_a_disk_that_fails_is_named_and_may_recover(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, whole = os.preadv, path.read_bytes()

    def fail(fd: int, buffers: Any, offset: int) -> int:
        if offset == 12 * SLOT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    with ring_over(path) as (ring, number):
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(ImageLost, match=r"cannot read bytes \[49152, 53248\): Input/output error"):
            read(ring, chunks_of(number, 0, CHUNKS))
        assert ring._slots.num_held == 0
        monkeypatch.undo()
        assert read(ring, chunks_of(number, 0, CHUNKS))[0] == whole


def test_what_cannot_be_read_ahead_is_not_tried_again_and_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[Any]()

    def fail(*given: Any) -> int:
        tries.append(given)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with ring_over(path) as (ring, number):
        ring.expect("swap", chunks_of(number, 0, CHUNKS))
        time.sleep(0.1)
        assert len(tries) <= READERS


def test_a_copy_that_waits_for_a_disk_that_hangs_can_be_stopped(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, goes_on, pauses = os.preadv, threading.Event(), list[None]()

    def hang(*given: Any) -> int:
        goes_on.wait(10.0)
        return real(*given)

    def pause() -> None:
        pauses.append(None)
        if len(pauses) == 2:
            raise GivenUp

    with ring_over(path) as (ring, number):
        monkeypatch.setattr(os, "preadv", hang)
        with pytest.raises(GivenUp):
            read(ring, chunks_of(number, 0, CHUNKS), pause)
        assert ring._slots.num_held == 0
        goes_on.set()


def test_a_file_system_without_direct_reads_is_read_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, dropped = os.open, list[tuple[int, int]]()

    def refuse(name: Any, flags: int, *mode: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags, *mode, **more)

    def advise(fd: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        dropped.append((offset, length))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    with ring_over(path) as (ring, number):
        assert read(ring, chunks_of(number, 0, CHUNKS))[0] == path.read_bytes()
        assert sorted(dropped) == [(n * SLOT, SLOT) for n in range(CHUNKS)]


def test_a_kernel_without_huge_pages_has_a_ring_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *given: Any) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", Plain)
    with ring_over(path) as (ring, number):
        assert read(ring, chunks_of(number, 0, CHUNKS))[0] == path.read_bytes()


def test_a_ring_that_gets_no_memory_leaves_no_file_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    ring, fd = HostRing(SLOTS * SLOT, slot_bytes=SLOT), os.open(path, os.O_RDONLY)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Cannot allocate memory"):
        patch.setattr(mmap, "mmap", refuse)
        ring.attach(path, fd)
    assert len(list(Path("/proc/self/fd").iterdir())) == before and ring._memory is None
    number = ring.attach(path, fd)
    os.close(fd)
    assert read(ring, chunks_of(number, 0, CHUNKS))[0] == path.read_bytes()
    ring.detach(number)


def test_the_memory_is_there_while_a_file_is_attached_and_comes_again(path: Path) -> None:
    ring = HostRing(SLOTS * SLOT, slot_bytes=SLOT)
    for _ in range(2):
        fd = os.open(path, os.O_RDONLY)
        first, second = ring.attach(path, fd), ring.attach(path, fd)
        os.close(fd)
        read(ring, chunks_of(first, 0, 4))
        ring.detach(first)
        assert read(ring, chunks_of(second, 0, 4))[1].disk_bytes == 4 * SLOT, "of another file"
        ring.detach(second)
        assert ring._memory is None
