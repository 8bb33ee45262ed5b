"""Images on a disk: read through a ring of host memory, into pages whose every chunk is checked."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from bus.messages import PARTS, LayerShape
from bus.precisions import PRECISIONS
from tests.support.variant_models import Morphing
from worker.memory import CpuBackend, PagePool, VirtualRange
from worker.model import ModelError
from worker.shape import shared_file
from worker.shape.checks import WrongVariant, row_sums
from worker.shape.copier import Copier, CopyJob
from worker.shape.host_ring import HostRing, ImageLost
from worker.shape.host_store import DiskStore, HostMemory, HostStore, ImagePart, Put
from worker.shape.shared_file import HEADER_BYTES, OnProgress

PAGE, PAGES = 4096, 24
CPU = torch.device("cpu")
IMAGE = torch.randint(
    0, 256, (PAGES * PAGE - 100,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)
SUMS = row_sums(IMAGE).view(torch.uint8)
SIZES = {"weights": len(IMAGE), "sums": len(SUMS)}


def make(put: Put[str], progress: OnProgress) -> None:
    put("weights", IMAGE)
    put("sums", SUMS)
    progress(1, 1)


@dataclass
class Disk:
    """A store in a folder of its own, and a range of pages to copy to."""

    store: DiskStore[str]
    ring: HostRing
    target: VirtualRange

    def job(self, *spans: tuple[int, int]) -> CopyJob:
        part = ImagePart("weights", spans or [(0, len(IMAGE))])
        return self.store.copy_job("the half", part, SUMS.view(torch.int64), self.target, CPU)

    def copied(self, first: int = 0, end: int = len(IMAGE)) -> torch.Tensor:
        return self.target.tensor(torch.uint8, (end - first,), offset_bytes=first)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with opened(tmp_path) as made:
        yield made
    assert list(tmp_path.glob("*.images")) == [], "the last user takes the file with it"


@contextmanager
def opened(folder: Path) -> Iterator[Disk]:
    ring = HostRing(8 * PAGE, slot_bytes=PAGE)
    pool = PagePool(CpuBackend(PAGE), PAGES * PAGE)
    target = pool.reserve(PAGES * PAGE, kind="weights", owner="half")
    target.map(0, PAGES)
    store = DiskStore(folder, "key", SIZES, make, ring=ring, kept=["sums"])
    try:
        yield Disk(store, ring, target)
        ring.check_integrity()
    finally:
        store.close()
        target.release()
        pool.close()


def test_a_copy_reads_the_disk_and_says_how_much(disk: Disk) -> None:
    copier = Copier(lambda: None)
    try:
        copy = copier.start(disk.job())
        assert copier.wait(10.0) and copy.is_whole, copy.error_text
        assert disk.copied().equal(IMAGE)
        assert copy.reads.is_disk and copy.reads.disk_bytes == copy.nbytes == len(IMAGE)
        assert copy.reads.disk_s > 0
        again = copier.start(disk.job((20 * PAGE, len(IMAGE))))
        assert copier.wait(10.0) and again.is_whole
        assert again.reads.disk_bytes == 0, "it is in the ring"
        assert copier.rate.bytes_per_s > 0
    finally:
        copier.close()
    assert disk.store.image("sums").equal(SUMS) and disk.store.kept_bytes == len(SUMS)
    assert disk.store.image("weights").equal(IMAGE)


def test_only_the_pages_that_a_shard_needs_are_read(disk: Disk) -> None:
    job = disk.job((2 * PAGE, 4 * PAGE), (9 * PAGE, 12 * PAGE))
    job(lambda: None)
    assert job.nbytes == job.reads.disk_bytes == 5 * PAGE
    for first, end in ((2 * PAGE, 4 * PAGE), (9 * PAGE, 12 * PAGE)):
        assert disk.copied(first, end).equal(IMAGE[first:end])
    assert not disk.copied(4 * PAGE, 9 * PAGE).any()


def test_two_users_share_the_file(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        with opened(tmp_path) as second:
            assert first.store.path == second.store.path and len(list(tmp_path.glob("*.images"))) == 1
            second.job()(lambda: None)
            assert second.copied().equal(IMAGE)
        first.job()(lambda: None)
        assert first.copied().equal(IMAGE)


def test_a_changed_byte_is_found_and_a_file_that_was_cut_is_named(disk: Disk) -> None:
    weights_at = HEADER_BYTES + 5 * PAGE
    stat = disk.store.path.stat()
    with disk.store.path.open("r+b") as file:
        file.seek(weights_at)
        changed = file.read(1)[0] ^ 1
        file.seek(weights_at)
        file.write(bytes([changed]))
    os.utime(disk.store.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a disk that forgets does
    with pytest.raises(
        WrongVariant, match=r"the half: 1 of 24 .* the first at byte 20480; .*images or memory"
    ):
        disk.job()(lambda: None)
    os.truncate(disk.store.path, weights_at)
    with pytest.raises(ImageLost, match=r"the half: .*\.images was changed by another program"):
        disk.job()(lambda: None)
    assert disk.ring._slots.num_held == 0


def test_host_memory_that_is_bounded_or_full_puts_the_images_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, slow = tmp_path / "host", tmp_path / "disk"
    host.mkdir()
    slow.mkdir()
    ring = HostRing(8 * PAGE, slot_bytes=PAGE)

    def kind(memory: HostMemory) -> Any:
        store = memory.open("key", SIZES, make, kept=["sums"], gpu=None)
        store.close()
        return type(store)

    assert kind(HostMemory(host, slow, ring)) is HostStore
    assert kind(HostMemory(host, slow, ring, is_bounded=True)) is DiskStore
    monkeypatch.setattr(shared_file, "writable_bytes", lambda folder: (1 << 30) if folder == slow else 100)
    with caplog.at_level(logging.WARNING):
        assert kind(HostMemory(host, slow, ring)) is DiskStore
    assert f"read from worker.disk_dir {slow}" in caplog.text
    with pytest.raises(ModelError, match=r"worker\.host_dir .* are free; .*or worker\.disk_dir"):
        kind(HostMemory(host))
    monkeypatch.setattr(shared_file, "writable_bytes", lambda folder: 100)
    with pytest.raises(ModelError, match=r"worker\.disk_dir .* are free; .*let worker\.disk_dir"):
        kind(HostMemory(host, slow, ring, is_bounded=True))
    with pytest.raises(ModelError, match=r"worker\.disk_dir .*nowhere.*No such file"):
        kind(HostMemory(host, tmp_path / "nowhere", ring, is_bounded=True))
    assert ring._memory is None and list(tmp_path.rglob("*.images")) == []


@pytest.fixture
def morphing(tmp_path: Path) -> Iterator[Morphing]:
    """A small model whose variants are on a disk, with a ring of less than a quarter of them."""
    make_oracle("llama", head_dim=32).save_pretrained(tmp_path / "model")
    ring = HostRing(8 * 8192, slot_bytes=8192)
    made = Morphing(tmp_path / "model", HostMemory(tmp_path, tmp_path, ring, is_bounded=True), max_tp=4)
    store = made.variants.store
    assert isinstance(store, DiskStore) and ring.nbytes < store.nbytes / 4
    yield made
    ring.check_integrity()
    made.close()


def test_a_model_swaps_from_disk_and_computes_what_it_did(morphing: Morphing) -> None:
    prompt = list(range(3, 43))
    before = morphing.runner.step({0: prompt})
    for precision in (*PRECISIONS[1:], "full"):
        morphing.swap_all(precision)
        assert morphing.model.shape() == [LayerShape(attention=precision, ffn=precision)] * 3
        for part in PARTS:
            image = morphing.variants.image(1, part, precision)
            assert morphing.bytes(1, part, precision)[: len(image)].equal(image)
    assert morphing.runner.step({1: prompt}).equal(before)


def test_a_disk_that_fails_leaves_the_old_variant_serving(
    morphing: Morphing, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, pool = list(range(3, 33)), morphing.runner.pool
    before, free = morphing.runner.step({0: prompt}), pool.num_free

    def fail(*given: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    morphing.variants.map(1, "ffn", "int4")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ImageLost, match=r"ffn of layer 1 in int4: .*cannot read bytes .*Input/output error"):
        morphing.variants.copy_job(1, "ffn", "int4")(lambda: None)
    monkeypatch.undo()
    morphing.variants.unmap(1, "ffn", "int4")
    assert pool.num_free == free and morphing.runner.step({1: prompt}).equal(before)
    morphing.swap(1, "ffn", "int4")  # the disk is well again
    pool.check_integrity()


def test_what_is_expected_is_in_the_ring_when_its_copy_begins(morphing: Morphing) -> None:
    variants = morphing.variants
    variants.expect([(2, "attention", "int3")])
    ring: Any = variants.store._ring  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while not ring._slots._where or ring._slots.is_reading(1):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    variants.map(2, "attention", "int3")
    job = variants.copy_job(2, "attention", "int3")
    job(lambda: None)
    assert job.reads.disk_bytes == job.nbytes and job.reads.waited_s < job.reads.disk_s
    variants.unmap(2, "attention", "int3")
