"""The page pool and its ranges, on every backend there is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.memory_backends import BACKENDS, SMALL_PAGE, checked_pool, cuda, needs_cuda
from worker.memory import BrokenInvariant, CpuBackend, MappingFailed, OutOfPages, PagePool, VirtualRange
from worker.memory.backend import runs

PAGES = 16


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest) -> Iterator[PagePool]:
    with checked_pool(request.param, PAGES) as made:
        yield made


def reserve(pool: PagePool, pages: int, owner: str = "someone", kind: str = "weights") -> VirtualRange:
    return pool.reserve(pages * pool.page_bytes, kind=kind, owner=owner)  # type: ignore[arg-type]


def page(owned: VirtualRange, i: int, pool: PagePool) -> torch.Tensor:
    return owned.tensor(torch.uint8, [pool.page_bytes], offset_bytes=i * pool.page_bytes)


def counts(pool: PagePool) -> tuple[int, int, int, int]:
    now = pool.counts()
    return now.budget, now.weights, now.kv, now.free


def test_host_memory_is_written_to_pages_wherever_they_are(pool: PagePool) -> None:
    owned, hole = reserve(pool, 6), reserve(pool, 3)
    owned.map(0, 2)
    hole.map(0, 3)
    owned.map(2, 4)  # pages that are no neighbours of the first two
    size = pool.page_bytes
    source = torch.randint(0, 256, (4 * size + 77,), dtype=torch.uint8)
    owned.write(size // 2, source)
    everything = owned.tensor(torch.uint8, [6 * size]).cpu()
    assert everything[size // 2 :][: len(source)].equal(source)
    assert not everything[: size // 2].any() and not everything[size // 2 + len(source) :].any()
    owned.write(0, source[:0])
    owned.unmap(3, 1)
    for offset, count in ((-1, 5), (size * 6 - 4, 5), (size, 3 * size)):
        with pytest.raises(ValueError, match=r"someone: bytes \[.*must be mapped to be written"):
            owned.write(offset, source[:count])


def test_weights_kv_and_free_pages_make_the_budget(pool: PagePool) -> None:
    weights, kv = reserve(pool, 8), reserve(pool, 30, kind="kv")
    assert counts(pool) == (PAGES, 0, 0, PAGES)
    weights.map(0, 5)
    kv.map(20, 3)
    assert counts(pool) == (PAGES, 5, 3, PAGES - 8)
    weights.unmap(1, 2)
    assert counts(pool) == (PAGES, 3, 3, PAGES - 6)
    kv.release()
    assert counts(pool) == (PAGES, 3, 0, PAGES - 3)
    weights.release()
    weights.release()
    assert counts(pool) == (PAGES, 0, 0, PAGES)


def test_a_new_page_reads_as_zeros_whoever_had_it_before(pool: PagePool) -> None:
    first = reserve(pool, PAGES)
    first.map(0, PAGES)
    first.tensor(torch.uint8, [first.nbytes]).fill_(7)
    first.unmap(3, 4)
    second = reserve(pool, 4)
    second.map(0, 4)
    assert not second.tensor(torch.uint8, [second.nbytes]).any()
    assert page(first, 2, pool).eq(7).all() and page(first, 7, pool).eq(7).all()


def test_a_view_stays_valid_while_other_pages_come_and_go(pool: PagePool) -> None:
    owned, other = reserve(pool, 6), reserve(pool, 6)
    owned.map(0, 2)
    view = owned.tensor(torch.int32, [owned.nbytes // 4])
    per_page = pool.page_bytes // 4
    view[: 2 * per_page] = torch.arange(2 * per_page, dtype=torch.int32)
    other.map(0, 1)
    owned.map(3, 3)
    view[5 * per_page] = 42
    owned.unmap(1, 1)
    owned.map(2, 1)
    assert view.data_ptr() == owned.address
    assert view[:per_page].tolist() == list(range(per_page))
    assert view[5 * per_page].item() == 42 and view[2 * per_page].item() == 0


def test_a_range_of_scattered_pages_is_one_tensor(pool: PagePool) -> None:
    blockers = [reserve(pool, 1) for _ in range(PAGES)]
    for blocker in blockers:
        blocker.map(0, 1)
    for blocker in blockers[::2]:
        blocker.release()
    owned = reserve(pool, PAGES // 2)
    owned.map(0, PAGES // 2)
    assert len(runs(owned.pages)) == PAGES // 2
    view = owned.tensor(torch.int64, [owned.nbytes // 8])
    view.copy_(torch.arange(len(view)))
    assert view.cpu().equal(torch.arange(len(view)))
    assert not any(blocker.tensor(torch.uint8, [pool.page_bytes]).any() for blocker in blockers[1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_view_has_the_dtype_the_strides_and_the_place_asked_for(pool: PagePool, dtype: torch.dtype) -> None:
    owned = reserve(pool, 2)
    owned.map(0, 2)
    flat = owned.tensor(dtype, [64])
    flat.copy_(torch.arange(64).to(dtype))
    assert flat.dtype == dtype and flat.device.type == pool.backend.device.type
    assert owned.tensor(dtype, [3, 4], offset_bytes=8 * dtype.itemsize).flatten().tolist() == list(
        range(8, 20)
    )
    assert owned.tensor(dtype, [2, 3], strides=[10, 2]).flatten().tolist() == [0, 2, 4, 10, 12, 14]


def test_too_few_free_pages_name_the_owner_and_the_numbers_and_change_nothing(pool: PagePool) -> None:
    greedy = reserve(pool, PAGES + 5, owner="llama layer 3")
    greedy.map(0, 10)
    with pytest.raises(
        OutOfPages, match="llama layer 3 needs 7 pages; 6 of the device's 16 are free"
    ) as caught:
        greedy.map(10, 7)
    assert (caught.value.needed, caught.value.free, caught.value.budget) == (7, 6, PAGES)
    assert greedy.num_mapped == 10 and pool.num_free == 6


def test_a_page_is_mapped_once_and_unmapped_only_if_mapped(pool: PagePool) -> None:
    owned = reserve(pool, 4)
    owned.map(1, 2)
    with pytest.raises(ValueError, match="mapped already"):
        owned.map(2, 2)
    with pytest.raises(ValueError, match="not mapped"):
        owned.unmap(0, 2)
    for first, n in [(-1, 1), (0, 0), (3, 2)]:
        with pytest.raises(ValueError, match="of a range of 4"):
            owned.map(first, n)
    assert owned.num_mapped == 2


def test_a_view_must_lie_inside_the_range_and_begin_on_a_mapped_page(pool: PagePool) -> None:
    owned = reserve(pool, 2)
    owned.map(0, 1)
    with pytest.raises(ValueError, match="the range has"):
        owned.tensor(torch.float32, [owned.nbytes // 4 + 1])
    with pytest.raises(ValueError, match="the range has"):
        owned.tensor(torch.float32, [1], offset_bytes=2)
    with pytest.raises(ValueError, match="must be mapped"):
        owned.tensor(torch.float32, [1], offset_bytes=pool.page_bytes)
    owned.release()
    with pytest.raises(ValueError, match="released"):
        owned.map(0, 1)


def test_a_mapping_that_the_system_refuses_costs_no_page(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = reserve(pool, 4)

    def refuse(*_: object, zeroed: bool) -> None:
        raise MappingFailed("mmap: no")

    with monkeypatch.context() as patch:
        patch.setattr(pool.backend, "map", refuse)
        with pytest.raises(MappingFailed):
            owned.map(0, 2)
    assert owned.num_mapped == 0 and pool.num_free == PAGES
    owned.map(0, 2)


def test_integrity_notices_a_page_that_is_counted_twice(pool: PagePool) -> None:
    a, b = reserve(pool, 2), reserve(pool, 2)
    a.map(0, 2)
    b.map(0, 1)
    pool.check_integrity()
    kept = b.pages.copy()
    b.mapped[1] = a.pages[0]
    with pytest.raises(BrokenInvariant, match="another owner"):
        pool.check_integrity()
    b.mapped[:] = -1
    with pytest.raises(BrokenInvariant, match="1 pages have another use than recorded"):
        pool.check_integrity()
    b.mapped[:] = kept


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no page"):
        PagePool(CpuBackend(SMALL_PAGE), SMALL_PAGE - 1)
    with pytest.raises(ValueError, match="multiple of"):
        CpuBackend(1000)


def test_neighbouring_pages_are_mapped_in_one_run() -> None:
    assert runs(np.array([4, 5, 6, 9, 1, 2], dtype=np.int64)) == [(0, 4, 3), (3, 9, 1), (4, 1, 2)]


def test_a_page_costs_memory_from_its_first_touch_and_keeps_it_for_its_next_owner() -> None:
    backend = CpuBackend(64 * 1024)
    pool = PagePool(backend, 64 * 64 * 1024)

    def memory() -> int:
        return os.fstat(backend._fd).st_blocks * 512

    owned, other = reserve(pool, 64), reserve(pool, 64)
    owned.map(0, 48)
    assert memory() == 0
    owned.tensor(torch.uint8, [48 * pool.page_bytes]).fill_(1)
    owned.unmap(16, 32)
    assert memory() == 48 * pool.page_bytes
    other.map(0, 8, zeroed=False)
    assert memory() == 48 * pool.page_bytes and page(other, 7, pool).eq(1).all()
    other.map(8, 8)
    assert memory() == 40 * pool.page_bytes and not page(other, 8, pool).any()
    pool.close()


def test_pages_with_memory_and_without_it_are_written_alike() -> None:
    pool = PagePool(CpuBackend(SMALL_PAGE), 16 * SMALL_PAGE)
    owned = reserve(pool, 16)
    owned.map(0, 16)
    for i in (0, 1, 4, 9):
        page(owned, i, pool).fill_(1)
    for offset, count in (
        (100, 5000),
        (SMALL_PAGE, 3 * SMALL_PAGE),
        (8 * SMALL_PAGE - 1, 2 * SMALL_PAGE + 2),
    ):
        source = torch.randint(1, 256, (count,), dtype=torch.uint8)
        owned.write(offset, source)
        assert owned.tensor(torch.uint8, [count], offset_bytes=offset).equal(source)
    assert page(owned, 4, pool).eq(1).all() and not page(owned, 5, pool).any()
    pool.close()


def test_a_half_done_mapping_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PagePool(CpuBackend(SMALL_PAGE), 8 * SMALL_PAGE)
    blockers = [reserve(pool, 1) for _ in range(8)]
    for blocker in blockers:
        blocker.map(0, 1)
    for blocker in blockers[::2]:
        blocker.release()
    owned = reserve(pool, 4)
    import worker.memory.cpu as cpu

    real, calls = cpu._mmap, []

    def third_fails(*args: int) -> int:
        calls.append(args)
        if len(calls) == 3:
            raise MappingFailed("mmap: out of map areas")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cpu, "_mmap", third_fails)
        with pytest.raises(MappingFailed):
            owned.map(0, 4)
    assert pool.num_free == 4 and owned.num_mapped == 0
    assert "---p" in _maps_line(owned.address)  # what was mapped is reserved again
    owned.map(0, 4)
    assert not owned.tensor(torch.uint8, [owned.nbytes]).any()
    pool.check_integrity()
    pool.close()


def test_addresses_live_as_long_as_a_view_and_no_longer() -> None:
    pool = PagePool(CpuBackend(SMALL_PAGE), 4 * SMALL_PAGE)
    owned = reserve(pool, 4)
    owned.map(0, 4)
    view, address = owned.tensor(torch.uint8, [owned.nbytes]), owned.address
    pool.close()
    del owned, pool
    gc.collect()
    assert "---p" in _maps_line(address)  # a stale view faults: it cannot see another owner's memory
    del view
    gc.collect()
    assert not _maps_line(address)


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_makes_pages_as_they_are_mapped_and_frees_those_of_a_dropped_pool() -> None:
    from worker.memory.cuda import CudaBackend

    backend = CudaBackend()
    size, slack = 64 * backend.page_bytes, 8 * backend.page_bytes  # the driver's own, and neighbours'
    at_first = torch.cuda.mem_get_info()[0]
    pool = PagePool(backend, 2 * size)
    assert at_first - torch.cuda.mem_get_info()[0] < slack
    owned = reserve(pool, 128)
    owned.map(0, 64)
    owned.unmap(32, 32)
    pool.reclaim(pool.num_pages)
    owned.map(100, 20)
    assert abs(at_first - torch.cuda.mem_get_info()[0] - size) < slack
    del backend, pool, owned
    gc.collect()
    assert at_first - torch.cuda.mem_get_info()[0] < slack


@pytest.mark.gpu
@needs_cuda
def test_a_thread_that_never_called_cuda_maps_writes_and_releases_pages() -> None:
    def run(pool: PagePool) -> None:
        owned = reserve(pool, 4)
        owned.map(0, 4)
        owned.write(0, torch.ones(owned.nbytes, dtype=torch.uint8))
        owned.unmap(0, 4)
        owned.map(0, 4)
        assert not owned.tensor(torch.uint8, [owned.nbytes]).any()
        owned.release()

    with checked_pool(cuda, 4) as made, ThreadPoolExecutor(1) as thread:
        thread.submit(run, made).result(timeout=60)


def test_a_view_of_released_memory_faults() -> None:
    code = f"""
import torch
from worker.memory import CpuBackend, PagePool
pool = PagePool(CpuBackend({SMALL_PAGE}), {SMALL_PAGE})
owned = pool.reserve({SMALL_PAGE}, kind="kv", owner="x")
owned.map(0, 1)
view = owned.tensor(torch.uint8, [{SMALL_PAGE}])
view.fill_(1)
owned.release()
view[0].item()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True)
    assert done.returncode == -11, done.stderr


def _maps_line(address: int) -> str:
    """The line of /proc/self/maps that covers the address, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line
    return ""
