"""Whichever call the system refuses: the records say what is mapped, and what was there goes on."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from tests.support.memory_backends import SMALL_PAGE
from tests.support.memory_faults import Faults, FaultyDriver, FaultyLinux, assert_the_records_are_true
from worker.memory import CpuBackend, KVCache, MappingFailed, PagePool, VirtualRange

T = TypeVar("T")

PAGES = 24
LAYERS = 2


@pytest.fixture(params=[FaultyLinux, FaultyDriver], ids=["linux", "cuda"])
def faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Faults:
    made: Faults = request.param(monkeypatch)
    return made


def make_pool(faults: Faults) -> PagePool:
    backend = faults.backend()
    return PagePool(backend, PAGES * backend.page_bytes)


def make_cache(pool: PagePool) -> KVCache:
    return KVCache(
        pool,
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=8,
        block_tokens=pool.page_bytes // 256,  # a quarter of a page
        dtype=torch.float32,
        max_blocks=40,
        owner="demo",
    )


def scattered(pool: PagePool) -> VirtualRange:
    """A range with pages 0-2 and 4-7 mapped, none the neighbour of another in physical memory."""
    owned, other = (pool.reserve(8 * pool.page_bytes, kind="weights", owner=o) for o in ("it", "other"))
    for i in (0, 1, 2, 4, 5, 6, 7):
        owned.map(i, 1)
        other.map(i, 1)
    other.release()
    return owned


each_refusal = pytest.mark.parametrize("refused", [1, 2, 1000], ids=["one", "two", "all"])


@each_refusal
@pytest.mark.parametrize("is_mapping", [True, False], ids=["map", "unmap"])
def test_a_range_knows_what_is_mapped_whichever_call_is_refused(
    faults: Faults, is_mapping: bool, refused: int
) -> None:
    for first in itertools.count(1):
        pool = make_pool(faults)
        owned = scattered(pool)
        faults.arm(first, refused)
        try:
            if is_mapping:
                owned = pool.reserve(12 * pool.page_bytes, kind="kv", owner="target")
                owned.map(2, 9)
            else:
                owned.unmap(4, 4)
        except RuntimeError:
            faults.disarm()
            assert_the_records_are_true(faults, pool)
            if is_mapping and refused == 1:
                assert owned.num_mapped == 0
            owned.resize(5)  # goes on from whatever is left
        faults.disarm()
        assert_the_records_are_true(faults, pool)
        pool.close()
        if not faults.has_struck:
            assert first > 1
            return


@each_refusal
@pytest.mark.parametrize("is_growing", [True, False], ids=["grow", "shrink"])
def test_a_cache_keeps_its_blocks_whichever_call_is_refused(
    faults: Faults, is_growing: bool, refused: int
) -> None:
    for first in itertools.count(1):
        pool = make_pool(faults)
        cache = make_cache(pool)
        cache.grow(4)
        blocks = cache.num_blocks
        faults.arm(first, refused)
        has_changed = False
        try:
            cache.grow(3) if is_growing else cache.shrink(3)
            has_changed = True
            pool.reclaim(PAGES)
        except RuntimeError:
            faults.disarm()
            assert_the_records_are_true(faults, pool)
            assert all(layer.pages[: cache.pages_for(cache.num_blocks)].min() >= 0 for layer in cache._ranges)
            if refused == 1:
                cache.check_integrity()
                assert (cache.num_blocks == blocks) is not has_changed
        faults.disarm()
        cache.allocator.check_integrity()
        pool.close()
        assert pool.num_free == PAGES
        if not faults.has_struck:
            assert first > 2
            return


def test_an_error_tells_of_the_layers_that_could_not_be_brought_back(faults: Faults) -> None:
    pool = make_pool(faults)
    cache = make_cache(pool)
    cache.grow(2)
    calls_of_a_layer = faults.calls // LAYERS
    faults.arm(calls_of_a_layer + 1, 1000)
    with pytest.raises(RuntimeError) as caught:
        cache.grow(2)
    assert any("demo KV of layer 0 keeps 4 pages, not 2" in note for note in caught.value.__notes__)
    faults.disarm()
    assert_the_records_are_true(faults, pool)
    pool.close()


def test_a_start_on_a_gpu_makes_no_page_and_mapping_makes_only_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FaultyDriver(monkeypatch)
    pool = PagePool(driver.backend(), 65536 * driver.PAGE)
    assert driver.calls == 0
    owned = pool.reserve(8 * driver.PAGE, kind="kv", owner="someone")
    for first, pages in [(0, 5), (5, 2)]:
        owned.map(first, pages)
        owned.unmap(first, pages)
    assert len(driver.handles) == 5
    pool.close()
    assert not driver.handles


def test_a_budget_beyond_the_free_memory_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FaultyDriver(monkeypatch, memory_pages=10)
    with pytest.raises(MappingFailed, match="11 pages take 22 MiB; cuda:0 has 20 MiB free; lower memory_mb"):
        PagePool(driver.backend(), 11 * driver.PAGE)


def test_a_gpu_whose_memory_somebody_else_took_says_so_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FaultyDriver(monkeypatch, memory_pages=PAGES)
    pool = make_pool(driver)
    cache = make_cache(pool)
    cache.grow(2)
    driver.memory_pages = 9
    with pytest.raises(MappingFailed, match="cuda:0 gave 1 of 4 more pages of 2048 KiB, and holds 8: free"):
        cache.grow(4)  # the first layer got its four
    assert cache.pages_per_layer == 2 and len(driver.handles) == 8
    assert_the_records_are_true(driver, pool)
    cache.grow(2)
    cache.check_integrity()
    pool.close()


def test_a_gpu_pool_that_is_dropped_gives_back_memory_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FaultyDriver(monkeypatch)
    pool = make_pool(driver)
    cache = make_cache(pool)
    cache.grow(3)
    assert driver.handles and driver.at and driver.spaces
    del pool, cache
    gc.collect()
    assert not driver.handles and not driver.at and not driver.spaces
    assert not driver.num_contexts


def test_threads_without_a_context_of_their_own_map_write_unmap_and_drop_a_gpus_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FaultyDriver(monkeypatch)
    held = [in_a_thread(make_pool, driver)]
    owned = in_a_thread(held[0].reserve, 4 * driver.PAGE, kind="kv", owner="someone")
    in_a_thread(owned.map, 0, 4)
    in_a_thread(owned.unmap, 1, 2)
    in_a_thread(owned.map, 1, 1)
    assert_the_records_are_true(driver, held[0])
    del owned
    in_a_thread(held.clear)
    in_a_thread(gc.collect)
    assert not driver.handles and not driver.at and not driver.spaces and not driver.num_contexts


def test_a_cpu_pool_that_is_dropped_gives_back_memory_and_addresses() -> None:
    backend = CpuBackend(SMALL_PAGE)
    pool, descriptor = PagePool(backend, PAGES * SMALL_PAGE), backend._fd
    owned = pool.reserve(4 * SMALL_PAGE, kind="kv", owner="someone")
    owned.map(0, 4)
    inode = os.fstat(descriptor).st_ino
    assert _mappings_of(inode)
    del backend, pool, owned
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert not _mappings_of(inode)


def in_a_thread(call: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Return what the call returns, or raise what it raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *args, **kwargs).result(timeout=30)


def _mappings_of(inode: int) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if line.split()[4] == str(inode) and "instar-pages" in line]
