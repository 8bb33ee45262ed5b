"""Host images: made once, shared, gone with the last of their users, never used half-made."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import pytest
import torch

from tests.support.memory_faults import FaultyDriver
from worker.model import ModelError
from worker.shape import host_store, shared_file
from worker.shape.host_ring import HostRing
from worker.shape.host_store import DiskStore, HostStore, ImageStore, Put
from worker.shape.shared_file import HEADER_BYTES, OnProgress, remove_abandoned

GPU = torch.device("cuda:0")
SIZES = {"a": 5000, "b": 1, "c": 70000}


class Maker:
    """Writes what can be known again, and counts how often it was asked to."""

    def __init__(self, pause: Callable[[], object] = lambda: None) -> None:
        """pause: called after each image."""
        self.times, self._pause = 0, pause

    def __call__(self, put: Put[str], progress: OnProgress) -> None:
        self.times += 1
        for i, name in enumerate(SIZES):
            put(name, expected(name))
            progress(i + 1, len(SIZES))
            self._pause()


def expected(name: str) -> torch.Tensor:
    return torch.arange(SIZES[name]).mul_(ord(name)).remainder_(251).to(torch.uint8)


def opened(folder: Path, maker: Maker | None = None, key: str = "key") -> HostStore[str]:
    return HostStore(folder, key, SIZES, maker or Maker())


def check(store: HostStore[str]) -> None:
    for name in SIZES:
        assert store.image(name).equal(expected(name))


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


FORKED = multiprocessing.get_context("forkserver")  # which imports torch once for all processes
FORKED.set_forkserver_preload([__name__])
Make = Callable[[Callable[[], object], Put[str], OnProgress], None]


class OtherProcess:
    """A process that opens the same store; `make` is what its maker does with `pause`, `put` and `progress`.

    `pause` goes on when the test calls `go_on`, and tells `says` that it waits. A `with` ends the process.
    """

    def __init__(self, folder: Path, make: Make) -> None:
        self._pipe, its = FORKED.Pipe()
        self._process = FORKED.Process(target=_open_store, args=(folder, make, its), daemon=True)
        self._process.start()
        its.close()

    def says(self) -> str:
        """Wait for "pause" or "open"; raises EOFError if it ended instead."""
        said: str = self._pipe.recv()
        return said

    def go_on(self) -> None:
        """End a maker's `pause`."""
        self._pipe.send("go on")

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        """Return its exit status."""
        self._process.join(30)
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self.wait()


def _open_store(folder: Path, make: Make, pipe: Connection) -> None:
    def pause() -> None:
        pipe.send("pause")
        pipe.recv()

    with contextlib.suppress(EOFError, ConnectionError):  # the test is over
        store = HostStore(folder, "key", SIZES, partial(make, pause))
        pipe.send("open")
        pipe.recv()
        store.close()


def makes(pause: Callable[[], object], put: Put[str], progress: OnProgress) -> None:
    Maker()(put, progress)


def makes_slowly(pause: Callable[[], object], put: Put[str], progress: OnProgress) -> None:
    Maker(pause)(put, progress)


def hangs(pause: Callable[[], object], put: Put[str], progress: OnProgress) -> None:
    pause()


def fails(pause: Callable[[], object], put: Put[str], progress: OnProgress) -> None:
    pause()
    raise SystemExit(3)


def is_killed(pause: Callable[[], object], put: Put[str], progress: OnProgress) -> None:
    put("a", torch.full((5000,), 7, dtype=torch.uint8))
    progress(1, 3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_second_user_finds_what_the_first_one_made(tmp_path: Path) -> None:
    first, second = Maker(), Maker()
    a, b = opened(tmp_path, first), opened(tmp_path, second)
    check(a)
    check(b)
    assert (first.times, second.times) == (1, 0) and a.path == b.path
    a.close()
    b.close()


def test_the_last_user_takes_the_file_with_it(tmp_path: Path) -> None:
    a, b = opened(tmp_path), opened(tmp_path)
    a.close()
    assert files(tmp_path) == [b.path]
    kept = b.image("c")
    b.close()
    b.close()
    assert files(tmp_path) == [] and kept.equal(expected("c"))  # views stay readable


def test_a_store_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert files(tmp_path)
    del store
    assert files(tmp_path) == []


def test_images_begin_on_pages_of_their_own(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert all(store.image(name).data_ptr() % 4096 == 0 for name in SIZES)
    assert store.nbytes == HEADER_BYTES + 8192 + 4096 + 18 * 4096 == store.path.stat().st_size
    store.close()


def test_other_contents_have_another_file(tmp_path: Path) -> None:
    a, b = opened(tmp_path, key="one"), opened(tmp_path, key="two")
    assert len(files(tmp_path)) == 2
    a.close()
    b.close()


def test_nobody_can_write_to_an_image(tmp_path: Path) -> None:
    store = opened(tmp_path)
    address = f"{store.image('a').data_ptr() - HEADER_BYTES:x}-"
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(address)]
    assert mapped and mapped[0].split()[1] == "r--s"
    store.close()


def test_of_many_that_come_at_once_one_makes_and_all_have_it(tmp_path: Path) -> None:
    maker, stores = Maker(), list[HostStore[str]]()
    all_came, came = threading.Barrier(6), set[int]()

    def on_progress(done: int, total: int) -> None:
        """Hold the maker, which calls this too, until all others wait for it."""
        if threading.get_ident() not in came:
            came.add(threading.get_ident())
            all_came.wait()

    def open_one() -> None:
        stores.append(HostStore(tmp_path, "key", SIZES, maker, progress=on_progress))

    threads = [threading.Thread(target=open_one, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert maker.times == 1 and len(stores) == 6
    for store in stores:
        check(store)
        store.close()
    assert files(tmp_path) == []


def test_who_waits_is_told_how_far_the_maker_is(tmp_path: Path) -> None:
    seen, unused = list[tuple[int, int]](), Maker()

    def see(done: int, total: int) -> None:
        if (done, total) not in seen:
            seen.append((done, total))
            process.go_on()

    with OtherProcess(tmp_path, makes_slowly) as process:
        assert process.says() == "pause"
        store = HostStore(tmp_path, "key", SIZES, unused, progress=see)
        assert seen[:3] == [(1, 3), (2, 3), (3, 3)] and unused.times == 0
        check(store)
    store.close()
    assert files(tmp_path) == []


def test_a_wait_can_be_given_up(tmp_path: Path) -> None:
    def give_up(done: int, total: int) -> None:
        raise KeyError("enough")

    with OtherProcess(tmp_path, hangs) as process:
        assert process.says() == "pause"
        with pytest.raises(KeyError, match="enough"):
            HostStore(tmp_path, "key", SIZES, Maker(), progress=give_up)
        process.kill()


def test_what_a_killed_maker_left_is_made_anew(tmp_path: Path) -> None:
    with OtherProcess(tmp_path, is_killed) as process:
        assert process.wait() == -signal.SIGKILL
    assert files(tmp_path)[0].stat().st_size > HEADER_BYTES
    maker = Maker()
    store = opened(tmp_path, maker)
    assert maker.times == 1
    check(store)
    store.close()


def test_what_a_killed_user_left_whole_is_used_again(tmp_path: Path) -> None:
    with OtherProcess(tmp_path, makes) as process:
        assert process.says() == "open"
        process.kill()
    maker = Maker()
    store = opened(tmp_path, maker)
    assert maker.times == 0
    check(store)
    store.close()


def test_a_file_with_a_foreign_or_cut_header_is_made_anew(tmp_path: Path) -> None:
    store = opened(tmp_path)
    path = store.path
    whole = path.read_bytes()
    store.close()
    for damaged in (b"", b"x" * 4096, whole[:-1], whole[:100], b"other" + whole[5:]):
        path.write_bytes(damaged)
        path.chmod(0o600)
        maker = Maker()
        store = opened(tmp_path, maker)
        assert maker.times == 1
        check(store)
        store.close()


def test_files_that_nobody_holds_are_removed_at_a_start_and_others_are_not(tmp_path: Path) -> None:
    held = opened(tmp_path, key="held")
    abandoned = tmp_path / f"instar-{os.getuid()}-0123.images"
    abandoned.write_bytes(b"left by a process that was killed")
    (tmp_path / "something else").write_text("not ours")
    store = opened(tmp_path)
    assert set(files(tmp_path)) == {held.path, store.path, tmp_path / "something else"}
    store.close()
    held.close()
    assert remove_abandoned(tmp_path) == []


def test_a_maker_that_fails_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    def fail(put: Put[str], progress: OnProgress) -> None:
        raise ZeroDivisionError("of all things")

    with pytest.raises(ZeroDivisionError, match="of all things"):
        HostStore(tmp_path, "key", SIZES, fail)
    assert files(tmp_path) == []
    opened(tmp_path).close()


def test_who_waited_for_a_maker_that_failed_makes_it(tmp_path: Path) -> None:
    maker, waits = Maker(), list[bool]()

    def see(done: int, total: int) -> None:
        if not waits:
            waits.append(maker.times == 0)
            process.go_on()

    with OtherProcess(tmp_path, fails) as process:
        assert process.says() == "pause"
        store = HostStore(tmp_path, "key", SIZES, maker, progress=see)
        assert maker.times == 1 and waits == [True] and process.wait() == 3
    check(store)
    store.close()


def test_too_little_room_names_both_numbers_and_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "writable_bytes", lambda folder: 3 << 20)
    maker = Maker()
    with pytest.raises(
        ModelError, match=r"take 9\.0 MiB .* 3\.0 MiB are free; .*variants, or .*host_dir.*shm-size"
    ):
        HostStore(tmp_path, "key", {"large": 9 << 20}, maker)
    assert maker.times == 0 and files(tmp_path) == []


def test_a_file_system_that_has_no_room_after_all_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ModelError, match=r"free; keep fewer in worker\.variants"):
        opened(tmp_path)
    assert files(tmp_path) == []


def test_images_are_pinned_as_the_gpu_allows_until_the_store_is_closed_or_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FaultyDriver(monkeypatch)
    for driver.pins_read_only in (True, False):
        store = HostStore(tmp_path, "key", SIZES, Maker(), gpu=GPU)
        assert store.is_pinned and driver.pinned == {store._memory.address: store.nbytes}
        check(store)
        store.close()
        assert not store.is_pinned and not driver.pinned
    dropped = HostStore(tmp_path, "key", SIZES, Maker(), gpu=GPU)
    assert driver.pinned
    del dropped
    gc.collect()
    assert not driver.pinned and not driver.num_contexts and files(tmp_path) == []


def test_images_that_cannot_be_pinned_serve_and_the_log_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FaultyDriver(monkeypatch)
    driver.arm(1, 2)  # read-only, and writable
    store = HostStore(tmp_path, "key", SIZES, Maker(), gpu=GPU)
    assert not store.is_pinned and driver.calls == 2
    assert "0.1 MiB could not be pinned (CUDA_ERROR_INVALID_VALUE" in caplog.text
    assert "keep fewer in worker.variants" in caplog.text
    check(store)
    store.close()
    assert driver.calls == 2 and files(tmp_path) == []


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_images_that_come_in_pieces_are_stored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Images from a GPU come in pieces: here `_pieces` divides bytes of the host."""

    def pieces(data: torch.Tensor, _: object) -> Iterator[tuple[int, torch.Tensor]]:
        for first in range(0, len(data), 999):
            yield first, data[first : first + 999].clone()

    monkeypatch.setattr(host_store, "_pieces", pieces)
    store: ImageStore[str]
    if kind == "memory":
        store = opened(tmp_path)
    else:
        store = DiskStore(tmp_path, "key", SIZES, Maker(), ring=HostRing(1 << 16, slot_bytes=1 << 12))
    for name in SIZES:
        assert store.image(name).equal(expected(name))
    store.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"worker\.host_dir .*nowhere.*No such file"):
        opened(tmp_path / "nowhere")


def test_room_of_memory_is_no_more_than_the_machine_has() -> None:
    found = re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())
    assert found and 0 < shared_file.writable_bytes(Path("/dev/shm")) <= int(found[1]) * 1024
