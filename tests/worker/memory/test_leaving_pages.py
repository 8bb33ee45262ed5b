"""Pages that steps in flight may still use: mapped till these have ended, without a wait."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.support.memory_backends import checked_pool, cuda, needs_cuda
from tests.support.memory_faults import FaultyDriver, assert_the_records_are_true
from worker.memory import BrokenInvariant, KVCache, MappingFailed, OutOfPages, PagePool, VirtualRange
from worker.memory.pool import PageSpan

PAGES = 12


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FaultyDriver:
    return FaultyDriver(monkeypatch)


@pytest.fixture
def pool(driver: FaultyDriver) -> Iterator[PagePool]:
    made = PagePool(driver.backend(), PAGES * driver.PAGE)
    yield made
    assert_the_records_are_true(driver, made)
    made.close()
    assert not driver.at and not driver.handles


def weights(pool: PagePool, num_pages: int) -> VirtualRange:
    owned = pool.reserve(8 * pool.page_bytes, kind="weights", owner="someone")
    owned.map(0, num_pages)
    return owned


def test_what_a_step_uses_stays_mapped_and_belongs_to_nobody_until_it_has_ended(
    driver: FaultyDriver, pool: PagePool
) -> None:
    one, two = weights(pool, 4), weights(pool, 2)
    driver.launch(pool)
    calls = driver.calls
    pool.unmap([PageSpan(one, 0, 1), PageSpan(one, 2, 2), PageSpan(two, 0, 2)])
    assert driver.fences == 1 and driver.calls == calls + 1, "one fence, and no other call of the driver"
    assert (one.num_mapped, two.num_mapped, pool.num_leaving, pool.num_free) == (1, 0, 5, 11)
    assert pool.counts().weights == 1 and pool.counts().free == 11
    assert_the_records_are_true(driver, pool)
    with pytest.raises(ValueError, match="not mapped"):
        one.unmap(0, 1)
    with pytest.raises(ValueError, match="must be mapped"):
        one.write(0, torch.ones(1, dtype=torch.uint8))
    pool.reclaim()
    assert len(driver.at) == 6 and not driver.waits
    driver.end()
    calls = driver.calls
    pool.reclaim()
    assert driver.calls == calls + 3, "one call for each run of pages"
    assert (len(driver.at), pool.num_leaving, pool.num_free) == (1, 0, 11) and not driver.waits


def test_other_pages_are_mapped_without_a_wait_and_those_of_a_step_after_it(
    driver: FaultyDriver, pool: PagePool
) -> None:
    one = weights(pool, 4)
    driver.launch(pool)
    one.unmap(0, 2)
    driver.launch(pool)
    one.unmap(2, 2)
    two = weights(pool, 8)  # all that no step uses
    assert (driver.waits, pool.num_leaving) == (0, 4)
    three = weights(pool, 1)
    assert (driver.waits, driver.ended) == (1, 1), "not for the second step"
    assert pool.num_leaving == 2 and set(three.pages[:1]) <= {0, 1}
    two.release()
    one.release()


def test_addresses_are_mapped_again_when_the_step_that_used_them_has_ended(
    driver: FaultyDriver, pool: PagePool
) -> None:
    one = weights(pool, 4)
    driver.launch(pool)
    one.resize(2)
    one.resize(3)
    assert driver.waits == 1 and one.num_mapped == 3 and pool.num_free == PAGES - 3


def test_a_range_that_is_released_leaves_with_its_last_page(driver: FaultyDriver, pool: PagePool) -> None:
    one = weights(pool, 4)
    driver.launch(pool)
    one.release()
    one.release()
    assert pool._ranges == [one] and pool.num_free == PAGES
    driver.end()
    pool.reclaim()
    assert pool._ranges == [] and not driver.at


def toy_cache(pool: PagePool, driver: FaultyDriver) -> KVCache:
    """Return a cache of three layers, a block of which fills a page."""
    return KVCache(
        pool,
        num_layers=3,
        num_kv_heads=1,
        head_dim=8,
        block_tokens=driver.PAGE // 64,
        dtype=torch.float32,
        max_blocks=8,
        owner="demo",
    )


def test_a_cache_shrinks_behind_one_fence_for_all_layers(driver: FaultyDriver, pool: PagePool) -> None:
    cache = toy_cache(pool, driver)
    cache.grow(4)
    driver.launch(pool)
    cache.shrink(3)
    assert driver.fences == 1 and not driver.waits
    assert cache.pages_per_layer == 1 and pool.num_free == 9
    cache.check_integrity()
    cache.release()


def test_pages_that_the_driver_keeps_are_tried_again(driver: FaultyDriver, pool: PagePool) -> None:
    one = weights(pool, 4)
    driver.launch(pool)
    one.unmap(0, 4)
    driver.end()
    driver.arm(1, 1)
    pool.reclaim()
    assert driver.has_struck and not driver.at, "a run that is refused is unmapped page by page"
    one.map(0, 4)
    driver.launch(pool)
    one.unmap(0, 4)
    driver.end()
    driver.arm(1, 1000)
    with pytest.raises(MappingFailed):
        pool.reclaim()
    assert pool.num_leaving == 4 and len(driver.at) == 4
    driver.disarm()
    assert_the_records_are_true(driver, pool)
    pool.reclaim()
    assert pool.num_leaving == 0 and not driver.at


def test_a_dropped_pool_waits_for_the_step_that_uses_its_pages(driver: FaultyDriver) -> None:
    made = PagePool(driver.backend(), PAGES * driver.PAGE)
    weights(made, 3)
    driver.launch(made)
    del made
    gc.collect()
    assert driver.waits == 1 and not driver.at and not driver.spaces and not driver.handles


class Later(Executor):
    """Calls for another thread, each made when `run` is called or its result is asked for."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def submit(self, call: Any, /, *args: Any, **more: Any) -> Future[Any]:
        later = self

        class Waited(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                while not self.done():
                    later.run()
                return super().result(timeout)

        made = Waited()

        def run() -> None:
            try:
                made.set_result(call(*args, **more))
            except MappingFailed as error:
                made.set_exception(error)

        self.calls.append(run)
        return made

    def run(self) -> None:
        if self.calls:
            self.calls.popleft()()


class LeavingMachine(RuleBasedStateMachine):
    """Steps begin and end between any calls: no page that one uses is unmapped, and no record is false."""

    ranges: Bundle[VirtualRange] = Bundle("ranges")
    beside: Later | None = None

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.driver = FaultyDriver(self.patch)
        self.pool = PagePool(self.driver.backend(), PAGES * self.driver.PAGE, self.beside)

    @rule(target=ranges)
    def reserve(self) -> VirtualRange:
        return self.pool.reserve(6 * self.driver.PAGE, kind="kv", owner="it")

    @rule(owned=ranges, wanted=st.lists(st.booleans(), min_size=6, max_size=6))
    def have(self, owned: VirtualRange, wanted: list[bool]) -> None:
        mask = torch.tensor(wanted).numpy()
        if int(mask.sum()) - owned.num_mapped <= self.pool.num_free:
            owned.have(mask)
            assert (owned.pages >= 0).tolist() == wanted

    @rule(owned=ranges, wanted=st.lists(st.booleans(), min_size=6, max_size=6))
    def claim(self, owned: VirtualRange, wanted: list[bool]) -> None:
        mask = torch.tensor(wanted).numpy()
        owned.settle()
        if int((mask & (owned.pages < 0)).sum()) <= self.pool.num_free:
            owned.claim(mask)

    @rule(owned=ranges, end=st.integers(0, 6))
    def map_claimed(self, owned: VirtualRange, end: int) -> None:
        owned.map_claimed(end * self.driver.PAGE)

    @rule(owned=ranges)
    def settle(self, owned: VirtualRange) -> None:
        owned.settle()

    @rule(owned=consumes(ranges))
    def release(self, owned: VirtualRange) -> None:
        owned.release()

    @rule()
    def launch(self) -> None:
        self.driver.launch(self.pool)

    @rule(steps=st.integers(1, 3))
    def end(self, steps: int) -> None:
        self.driver.end(steps)

    @rule()
    def reclaim(self) -> None:
        waits = self.driver.waits
        self.pool.reclaim()
        assert self.driver.waits == waits

    @invariant()
    def records_are_true(self) -> None:
        assert_the_records_are_true(self.driver, self.pool)
        now = self.pool.counts()
        assert now.kv + now.free == PAGES

    def teardown(self) -> None:
        self.pool.close()
        assert not self.driver.at and not self.driver.handles
        self.patch.undo()


class BesideMachine(LeavingMachine):
    """The same with a thread for the driver's calls, which come at any time."""

    def __init__(self) -> None:
        self.beside = Later()
        super().__init__()

    @rule()
    def run_one(self) -> None:
        assert self.beside
        self.beside.run()


TestAnyHistory = LeavingMachine.TestCase
TestAnyHistory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyHistoryBeside = BesideMachine.TestCase
TestAnyHistoryBeside.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_pages_are_unmapped_in_the_thread_beside_and_free_at_the_next_call(driver: FaultyDriver) -> None:
    beside = Later()
    pool = PagePool(driver.backend(), PAGES * driver.PAGE, beside)
    one, two = weights(pool, 8), weights(pool, 1)
    driver.launch(pool)
    one.unmap(0, 8)
    driver.end()
    calls = driver.calls
    pool.reclaim()
    assert driver.calls == calls and len(driver.at) == 9, "the owner's thread leaves it to the other"
    beside.run()
    assert len(driver.at) == 1 and pool.num_leaving == 8
    pool.check_integrity()
    pool.reclaim()
    assert pool.num_leaving == 0
    driver.launch(pool)
    two.unmap(0, 1)
    two.map(1, 7)
    assert driver.waits == 0
    two.map(0, 1)
    assert driver.waits == 1, "its address was in use"
    pool.close()
    assert not driver.at and not driver.handles


def test_a_claim_takes_pages_at_once_and_frees_what_was_not_mapped(driver: FaultyDriver) -> None:
    pool = PagePool(driver.backend(), 40 * driver.PAGE, Later())
    owned = pool.reserve(30 * driver.PAGE, kind="weights", owner="someone")
    owned.map(3, 2)
    calls = driver.calls
    is_wanted = np.arange(30) < 20
    owned.claim(is_wanted)
    assert driver.calls == calls + 18 and len(driver.at) == 2, "memory is made, and nothing is mapped"
    assert (owned.num_mapped, pool.num_free, pool.counts().weights) == (2, 20, 20)
    pool.check_integrity()
    owned.map_claimed(4 * driver.PAGE)
    assert owned.num_mapped == 2 + 3
    owned.map_claimed(6 * driver.PAGE)
    assert owned.num_mapped == 2 + 3 + 8, "neighbours come along"
    assert_the_records_are_true(driver, pool)
    owned.settle()
    assert (owned.num_mapped, pool.num_free) == (13, 27)
    owned.claim(is_wanted)
    driver.arm(1, 1)
    with pytest.raises(MappingFailed):
        owned.map_claimed(20 * driver.PAGE)
    driver.disarm()
    owned.settle()
    assert (owned.num_mapped, pool.num_free) == (13, 27)
    assert_the_records_are_true(driver, pool)
    pool.close()
    assert not driver.at and not driver.handles


def test_a_cache_grows_in_another_thread_and_counts_its_blocks_at_the_end(driver: FaultyDriver) -> None:
    later = Later()
    pool = PagePool(driver.backend(), PAGES * driver.PAGE, later)
    cache = toy_cache(pool, driver)
    cache.grow(1)
    cache.begin_growth(2)
    cache.check_integrity()
    assert (cache.pages_per_layer, cache.num_blocks, cache.growable_pages) == (1, 1, 1)
    assert pool.num_free == PAGES - 9 and cache.is_growing and not cache.await_growth(0.0)
    later.run()
    assert not cache.is_growing and cache.await_growth(0.0) and cache.num_blocks == 1
    cache.end_growth()
    assert (cache.pages_per_layer, cache.num_blocks) == (3, 3)
    cache.check_integrity()
    assert_the_records_are_true(driver, pool)
    cache.begin_growth(1)
    driver.arm(3, 1)  # the first layer has its page
    with pytest.raises(MappingFailed):
        cache.end_growth()
    driver.disarm()
    assert (cache.pages_per_layer, cache.num_blocks, pool.num_free) == (3, 3, PAGES - 9)
    cache.check_integrity()
    assert_the_records_are_true(driver, pool)
    with pytest.raises(OutOfPages, match="needs 6 pages; 3 of the device's 12 are free"):
        cache.begin_growth(2)
    cache.begin_growth(1)
    later.run()
    cache.release()
    pool.close()
    assert not driver.at and not driver.handles


CHANGES: dict[str, Callable[[KVCache], object]] = {
    "grow": lambda cache: cache.grow(1),
    "begin_growth": lambda cache: cache.begin_growth(1),
    "shrink": lambda cache: cache.shrink(1),
    "count_as": lambda cache: cache.count_as("int8"),
    "convert": lambda cache: cache.convert(0, "int8"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_cache_whose_growth_is_not_counted_refuses_every_other_change(
    driver: FaultyDriver, change: Callable[[KVCache], object]
) -> None:
    later = Later()
    pool = PagePool(driver.backend(), PAGES * driver.PAGE, later)
    cache = toy_cache(pool, driver)
    cache.grow(1)
    cache.begin_growth(1)
    later.run()  # the pages are mapped, but nobody has counted their blocks
    with pytest.raises(BrokenInvariant, match="it grows to 2 pages per layer"):
        change(cache)
    assert (cache.pages_per_layer, cache.num_blocks, cache.form) == (1, 1, "full")
    cache.end_growth()
    assert (cache.pages_per_layer, cache.num_blocks) == (2, 2)
    cache.check_integrity()
    assert_the_records_are_true(driver, pool)
    cache.release()
    pool.close()


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_reads_pages_that_were_given_back_and_the_host_does_not_wait() -> None:
    with checked_pool(cuda, 16) as pool:
        owned = pool.reserve(16 * pool.page_bytes, kind="weights", owner="someone")
        owned.map(0, 8)
        ones = owned.tensor(torch.uint8, [8 * pool.page_bytes])
        ones.fill_(1)
        ones.sum()  # what it needs is loaded
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.cuda._sleep(1_000_000_000)  # of its cycles: half a second and more
        total = ones.sum()
        owned.unmap(0, 8)
        owned.map(8, 8)  # zeroed, beside
        took_s = time.perf_counter() - began
        assert pool.num_leaving == 8 and took_s < 0.2, took_s
        pool.check_integrity()
        assert int(total) == 8 * pool.page_bytes
        assert not owned.tensor(torch.uint8, [8 * pool.page_bytes], offset_bytes=8 * pool.page_bytes).any()
        pool.reclaim()
        assert pool.num_leaving == 0


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_captures_a_graph_while_pages_are_dropped() -> None:
    """A finaliser in the middle of a capture leaves it alone."""
    with checked_pool(cuda, 8) as pool:
        spaces = [pool.backend.reserve(4 * pool.page_bytes)]
        x = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x += 1
            spaces.clear()
        graph.replay()
        assert int(x.sum()) == 8
