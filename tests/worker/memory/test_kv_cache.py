"""The KV cache over the pool, and its block allocator."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from bus.precisions import KV_PRECISIONS
from kernels import kv_codes
from tests.support.memory_backends import BACKENDS, checked_pool, cpu
from worker.engine.build import cache_text
from worker.engine.sequence import Limits
from worker.memory import (
    BlockAllocator,
    BlocksInUse,
    BrokenInvariant,
    CpuBackend,
    KVCache,
    OutOfBlocks,
    OutOfPages,
    PagePool,
)
from worker.memory.backend import AddressSpace
from worker.memory.kv_cache import rewrite_blocks

LAYERS = 3
PAGES = 30


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest) -> Iterator[PagePool]:
    with checked_pool(request.param, PAGES) as made:
        yield made


def cache(pool: PagePool, *, block_share: float = 0.3, max_blocks: int = 100) -> KVCache:
    """A cache whose block takes about `block_share` of a page: it straddles pages."""
    block_tokens = int(pool.page_bytes * block_share) // (2 * 2 * 8 * 4)
    return KVCache(
        pool,
        num_layers=LAYERS,
        num_kv_heads=2,
        head_dim=8,
        block_tokens=block_tokens,
        dtype=torch.float32,
        max_blocks=max_blocks,
        owner="demo",
    )


def test_it_grows_and_shrinks_by_pages_in_every_layer(pool: PagePool) -> None:
    kv = cache(pool)
    assert (kv.num_blocks, kv.pages_per_layer, kv.layers) == (0, 0, [])
    kv.grow(4)
    assert pool.counts().kv == 4 * LAYERS
    assert kv.num_blocks == 4 * pool.page_bytes // kv.block_bytes == kv.allocator.num_free
    kv.shrink(3)
    assert pool.counts().kv == LAYERS and kv.num_blocks == pool.page_bytes // kv.block_bytes
    kv.grow(kv.growable_pages)
    assert pool.num_free == 0 and kv.pages_per_layer == PAGES // LAYERS
    kv.check_integrity()
    kv.release()
    assert pool.num_free == PAGES


def test_views_keep_their_address_and_live_blocks_their_data(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(2)
    assert [tuple(layer.shape) for layer in kv.layers] == [(100, 2, 2, kv.block_tokens, 8)] * LAYERS
    addresses = [layer.data_ptr() for layer in kv.layers]
    for i, layer in enumerate(kv.layers):
        for block in range(kv.num_blocks):
            layer[block] = 100 * i + block
    had = kv.num_blocks
    kv.grow(5)
    kv.shrink(5)
    kv.grow(1)
    assert [layer.data_ptr() for layer in kv.layers] == addresses
    for i, layer in enumerate(kv.layers):
        assert all(layer[block].eq(100 * i + block).all() for block in range(had))
        assert not layer[had + 1 : kv.num_blocks].any()  # block `had` straddles the page that was kept


def test_a_block_larger_than_a_page_needs_several(pool: PagePool) -> None:
    kv = cache(pool, block_share=2.5)
    kv.grow(2)
    assert kv.num_blocks == 0
    kv.grow(3)
    assert kv.num_blocks == 5 * pool.page_bytes // kv.block_bytes == 2
    kv.layers[1][1] = 5
    assert kv.layers[1][1].eq(5).all()


def test_a_block_of_heads_is_two_blocks_of_half_the_heads_in_place(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(2)
    whole = kv.layers[0]
    whole[1, 0], whole[1, 1] = 10, 11
    halves = whole.view(2 * kv.max_blocks, 1, 2, kv.block_tokens, 8)
    assert halves[2].eq(10).all() and halves[3].eq(11).all()
    assert halves.data_ptr() == whole.data_ptr()


def test_growing_past_the_free_pages_changes_nothing(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(5)
    with pytest.raises(OutOfPages, match="demo KV cache needs 18 pages; 15 of the device's 30 are free"):
        kv.grow(6)
    assert kv.pages_per_layer == 5 and pool.counts().kv == 15


def test_growing_past_the_reserved_blocks_changes_nothing(pool: PagePool) -> None:
    kv = cache(pool, max_blocks=6)  # two pages
    kv.grow(1)
    assert kv.growable_pages == 1
    with pytest.raises(ValueError, match="of a range of 2"):
        kv.grow(2)
    kv.grow(1)
    assert kv.num_blocks == 6 and kv.growable_pages == 0


@pytest.mark.parametrize("broken_layer", range(LAYERS))
def test_a_half_done_growth_rolls_back(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch, broken_layer: int
) -> None:
    kv = cache(pool)
    kv.grow(1)
    kv.layers[0][0] = 3

    def refuse(first_page: int, num_pages: int, *, zeroed: bool) -> None:
        raise OutOfPages(num_pages, 0, PAGES, "somebody was quicker")

    with monkeypatch.context() as patch:
        patch.setattr(kv._ranges[broken_layer], "map", refuse)
        with pytest.raises(OutOfPages, match="somebody was quicker"):
            kv.grow(4)
    assert pool.counts().kv == LAYERS and kv.num_blocks == pool.page_bytes // kv.block_bytes
    kv.check_integrity()
    pool.check_integrity()
    kv.grow(4)
    assert kv.layers[0][0].eq(3).all()


def test_a_half_done_shrink_rolls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_pool(cpu, PAGES) as pool:
        kv = cache(pool)
        kv.grow(3)
        blocks, unmap = kv.num_blocks, pool.backend.unmap

        def refuse(space: AddressSpace, first_page: int, num_pages: int) -> None:
            if space is kv._ranges[2].space:
                raise RuntimeError("driver says no")
            unmap(space, first_page, num_pages)

        with monkeypatch.context() as patch:
            patch.setattr(pool.backend, "unmap", refuse)
            with pytest.raises(RuntimeError, match="driver says no"):
                kv.shrink(1)
        assert kv.num_blocks == blocks and pool.counts().kv == 3 * LAYERS
        kv.check_integrity()


def test_shrinking_never_takes_a_live_block(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(3)
    taken = kv.allocator.allocate(kv.num_blocks)
    kv.allocator.free(taken[:-1])
    with pytest.raises(BlocksInUse) as caught:
        kv.shrink(2)
    assert caught.value.blocks == [taken[-1]] and caught.value.capacity == pool.page_bytes // kv.block_bytes
    assert kv.pages_per_layer == 3
    [target] = kv.allocator.allocate(1)  # what a resizer does: move the live block below, then shrink
    for layer in kv.layers:
        layer[target].copy_(layer[taken[-1]])
    kv.allocator.free([taken[-1]])
    kv.shrink(2)
    with pytest.raises(ValueError, match="has 1 pages per layer"):
        kv.shrink(2)


def test_uneven_layers_are_noticed(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(2)
    kv._ranges[1].unmap(1, 1)
    with pytest.raises(BrokenInvariant, match=r"layers have \[1, 2\] pages"):
        kv.check_integrity()


def test_blocks_without_pages_and_layers_that_are_not_what_they_count_as_are_noticed(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(2)
    kv.allocator.extend(kv.num_blocks + 1)
    with pytest.raises(BrokenInvariant, match="its blocks take"):
        kv.check_integrity()
    kv.allocator.truncate(kv.num_blocks - 1)
    kv.check_integrity()
    kv.convert(1, "int8")
    kv.check_integrity()
    kv.count_as("int8")
    with pytest.raises(BrokenInvariant, match=r"count as int8, but not in layers \[0, 2\]"):
        kv.check_integrity()
    kv.count_as("full")
    kv._precisions[1] = "full"
    with pytest.raises(BrokenInvariant, match=r"layer 1 is torch\.int8, not full"):
        kv.check_integrity()


def test_the_lowest_free_block_goes_first_so_that_the_tail_empties() -> None:
    blocks = BlockAllocator(8)
    assert blocks.allocate(5) == [0, 1, 2, 3, 4]
    blocks.free([3, 0])
    assert blocks.allocate(3) == [0, 3, 5]
    blocks.free([4, 5])
    assert blocks.used == [0, 1, 2, 3]
    blocks.truncate(4)
    assert (blocks.capacity, blocks.num_free, blocks.num_used) == (4, 0, 4)
    blocks.extend(6)
    assert blocks.allocate(2) == [4, 5]


def test_wrong_requests_to_the_allocator_change_nothing() -> None:
    blocks = BlockAllocator(4)
    taken = blocks.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks needed; 1 of 4 are free"):
        blocks.allocate(2)
    for wrong in ([3], [0, 0], [4], [-1], [1, 3]):
        with pytest.raises(ValueError, match="not in use, or freed twice"):
            blocks.free(wrong)
    with pytest.raises(BlocksInUse):
        blocks.truncate(2)
    with pytest.raises(ValueError, match="cannot extend"):
        blocks.extend(3)
    assert blocks.num_free == 1 and blocks.allocate(1) == [3]
    blocks.free(taken)
    blocks.check_integrity()


def test_integrity_notices_a_block_that_is_free_and_in_use() -> None:
    blocks = BlockAllocator(4)
    blocks.allocate(3)
    blocks._free.add([2])
    with pytest.raises(BrokenInvariant):
        blocks.check_integrity()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "free", "extend", "truncate"]), st.integers(0, 12))))
def test_any_sequence_of_calls_keeps_blocks_apart(calls: list[tuple[str, int]]) -> None:
    blocks, live = BlockAllocator(10), list[int]()
    for verb, n in calls:
        if verb == "allocate" and n <= blocks.num_free:
            taken = blocks.allocate(n)
            assert not set(taken) & set(live)
            live += taken
        elif verb == "free":
            blocks.free(live[:n])
            live = live[n:]
        elif verb == "extend":
            blocks.extend(blocks.capacity + n)
        elif verb == "truncate" and all(block < n for block in live) and n <= blocks.capacity:
            blocks.truncate(n)
        blocks.check_integrity()
        assert blocks.num_used == len(live)


def test_heads_are_outermost_so_a_block_is_several_of_fewer_heads(pool: PagePool) -> None:
    kv = cache(pool)
    assert kv.layers_at(2) == []
    kv.grow(2)
    for layer, halves in zip(kv.layers, kv.layers_at(2), strict=True):
        assert halves.shape == (200, 1, 2, kv.block_tokens, 8) and halves.data_ptr() == layer.data_ptr()
        for block in range(kv.num_blocks):
            halves[2 * block], halves[2 * block + 1] = block, -block
            assert bool((layer[block, 0] == block).all()) and bool((layer[block, 1] == -block).all())
    for degree in (0, 3):
        with pytest.raises(ValueError, match=f"2 KV heads cannot be split over {degree} ranks"):
            kv.layers_at(degree)


def test_a_group_with_fewer_kv_heads_than_ranks_has_no_more_blocks_than_heads(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(4)
    assert kv.parts_at(8) == 2
    for at_two, at_eight in zip(kv.layers_at(2), kv.layers_at(8), strict=True):
        assert at_two.shape == at_eight.shape and at_two.data_ptr() == at_eight.data_ptr()
    assert kv.blocks_in(4, 8) == kv.blocks_in(4, 2) == 2 * kv.num_blocks
    assert kv.pages_for(5, 8) == kv.pages_for(5, 2)
    assert kv.most_blocks(8) == kv.most_blocks(2)


def test_the_memory_of_a_burst_goes_back_when_no_block_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_pool(CpuBackend, PAGES) as pool:
        kv = cache(pool)
        kv.grow(8)
        monkeypatch.setattr("worker.memory.kv_cache.RETAINED_BYTES", 2 * pool.page_bytes * LAYERS)

        def held() -> int:
            return os.fstat(pool.backend._fd).st_blocks * 512  # type: ignore[attr-defined]

        def serve(num_blocks: int) -> None:
            blocks = kv.allocator.allocate(num_blocks)
            for layer in kv.layers:
                layer[blocks] = 1.0
            kv.allocator.free(blocks[1:])
            assert held() >= num_blocks * kv.block_bytes * LAYERS  # one block is still in use
            kv.allocator.free(blocks[:1])

        before = held()
        serve(kv.num_blocks)
        assert held() - before == 2 * pool.page_bytes * LAYERS
        serve(kv.num_blocks)  # the pages can be used again
        assert held() - before == 2 * pool.page_bytes * LAYERS

        monkeypatch.setattr("worker.memory.kv_cache.DISCARDED_BYTES", 3 * pool.page_bytes * LAYERS)
        serve(kv.num_blocks)  # in parts, so that a request that comes meanwhile does not wait for all
        assert before < held() - 2 * pool.page_bytes * LAYERS < before + 6 * pool.page_bytes * LAYERS
        for _ in range(2):
            serve(1)
        assert held() - before == 2 * pool.page_bytes * LAYERS

        replaced, kv.allocator = kv.allocator, BlockAllocator(kv.num_blocks)
        assert replaced.on_empty is None  # it does not know the blocks in use any more
        kv.release()


def test_memory_of_cached_blocks_stays_even_where_no_whole_page_can_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.memory.kv_cache.RETAINED_BYTES", 0)
    with checked_pool(CpuBackend, PAGES) as pool:
        kv = cache(pool)
        kv.grow(4)
        for indexed in range(kv.num_blocks):  # above this block nothing can be found again
            blocks = kv.allocator.allocate(kv.num_blocks)
            for layer in kv.layers:
                layer[blocks] = 1.0
            kv.allocator.index.add(indexed, bytes([indexed]), "full")
            kv.allocator.free(blocks)
            assert all(bool((layer[: indexed + 1] == 1.0).all()) for layer in kv.layers)
            kv.check_integrity()
        kv.release()


def test_the_limit_of_a_cache_that_leaves_pages_free_is_announced() -> None:
    with checked_pool(CpuBackend, PAGES) as pool:
        kv = cache(pool)
        limits = Limits(
            max_num_seqs=2,
            max_num_batched_tokens=64,
            max_model_len=3 * kv.block_tokens,
            block_tokens=kv.block_tokens,
        )
        kv.grow(1)
        assert cache_text(kv, limits) == f"{kv.num_blocks} KV blocks of {kv.block_tokens} tokens"
        kv.grow(1)
        assert cache_text(kv, limits).endswith(
            f": 2 sequences (max_num_seqs) of {limits.max_model_len} tokens (max_model_len) use no more; "
            f"{kv.blocks_in(PAGES // LAYERS)} blocks would fit"
        )
        kv.grow(kv.growable_pages)
        assert "would fit" not in cache_text(kv, limits)
        kv.release()


def test_to_truncate_to_more_than_there_is_changes_nothing() -> None:
    blocks = BlockAllocator(8)
    blocks.truncate(12)
    assert (blocks.capacity, blocks.num_free) == (8, 8)
    blocks.check_integrity()


def test_what_a_move_empties_is_free_in_a_whole_cache_and_in_no_share() -> None:
    whole, share = BlockAllocator(8, used=[6]), BlockAllocator(8, range(0, 8, 2), [6])
    for blocks in (whole, share):
        blocks.relocate({6: 0})
        blocks.check_integrity()
        assert blocks.used == [0]
    assert whole.num_free == 7
    assert sorted(share.allocate(share.num_free)) == [2, 4]  # not 6: the group has fewer blocks soon


@pytest.mark.parametrize(
    ("dtype", "head_dim", "ratio"),
    [
        (torch.float32, 64, 256 / 66),  # 3.88
        (torch.bfloat16, 64, 128 / 66),  # 1.94
        (torch.bfloat16, 128, 256 / 130),  # 1.97
    ],
)
def test_pages_hold_twice_as_many_blocks_in_8_bits_but_for_the_scales(
    dtype: torch.dtype, head_dim: int, ratio: float
) -> None:
    with checked_pool(CpuBackend, 400) as pool:
        counts = []
        for precision in KV_PRECISIONS:
            kv = KVCache(
                pool,
                num_layers=2,
                num_kv_heads=4,
                head_dim=head_dim,
                block_tokens=2,
                dtype=dtype,
                max_blocks=20_000,
                owner="demo",
                precision=precision,
            )
            kv.grow(100)
            counts.append(kv.num_blocks)
            assert kv.pages_for(kv.num_blocks) <= 100 < kv.pages_for(kv.num_blocks + 1)
            kv.check_integrity()
            kv.release()
        full, codes = counts
        assert full * ratio - 1 <= codes <= (full + 1) * ratio


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_is_converted_in_place_block_by_block(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.memory.kv_cache.CONVERTED_BYTES", 3000)  # in parts of a few blocks
    with checked_pool(CpuBackend, PAGES) as pool:
        kv = KVCache(
            pool,
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            block_tokens=4,
            dtype=dtype,
            max_blocks=2000,
            owner="demo",
        )
        kv.grow(10)
        full = kv.num_blocks
        kv.allocator.allocate(full)
        exact = [torch.randn_like(layer[:full]) for layer in kv.layers]
        for layer, numbers in zip(kv.layers, exact, strict=True):
            layer[:full] = numbers
        kv.allocator.free(range(1, full, 3))  # what is free may be anything afterwards
        used = kv.allocator.used
        for i in range(2):
            assert kv.precision == ("int8" if i else "full") and kv.num_blocks == full
            kv.convert(i, "int8")
        kv.count_as("int8")
        assert kv.num_blocks == kv.blocks_in(10) > full * 1.7 and kv.allocator.used == used
        kv.check_integrity()
        rounded = [kv_codes.dequantize(*kv_codes.quantize(numbers[used])) for numbers in exact]
        for layer, numbers in zip(kv.layers, rounded, strict=True):
            assert torch.equal(kv_codes.dequantize(*kv_codes.parts_of(layer[used])), numbers)
        kv.shrink(4)
        kv.grow(4)
        beyond = kv.allocator.allocate(kv.num_blocks - len(used))[-1:]
        with pytest.raises(BlocksInUse):
            kv.count_as("full")
        assert kv.num_blocks == kv.blocks_in(10) and kv.allocator.used[-1:] == beyond
        kv.allocator.free(sorted({*kv.allocator.used} - {*used}))
        kv.count_as("full")
        for i in range(2):
            kv.convert(i, "full")
        assert (kv.num_blocks, kv.precision, kv.max_blocks) == (full, "full", 2000)
        for layer, numbers in zip(kv.layers, rounded, strict=True):
            assert torch.equal(layer[used], numbers.to(dtype))
        kv.check_integrity()
        kv.release()


@pytest.mark.parametrize("degree", [1, 2])
def test_blocks_of_a_gpu_hold_zeros_until_they_are_written_in_either_precision(
    pool: PagePool, degree: int
) -> None:
    used = pool.reserve(pool.num_pages * pool.page_bytes, kind="weights", owner="before")
    used.map(0, pool.num_pages)
    used.tensor(torch.uint8, [used.nbytes]).fill_(255)  # NaN in every dtype
    used.release()
    kv = cache(pool)
    assert kv._is_zeroed is (pool.backend.device.type == "cuda")
    kv._is_zeroed = True

    def assert_zeros_beside(held: list[int]) -> None:
        for layer, owned in zip(kv.layers, kv._ranges, strict=True):
            kv._at(layer, degree)[held] = 0
            assert not owned.tensor(torch.uint8, [owned.num_mapped * pool.page_bytes]).any()

    kv.grow(3)
    assert_zeros_beside([])
    held = [0, 3, 4]
    for precision in KV_PRECISIONS[::-1]:  # there and back
        for layer in kv.layers:
            layer.view(torch.uint8)[: kv.blocks_in(3, precision=kv.precision)].random_(1, 255)
        for i in range(LAYERS):
            kv.convert(i, precision, held, degree)
            assert bool(kv._at(kv.layers[i], degree)[held].view(torch.uint8).any())
        assert_zeros_beside(held)
        kv.grow(1)
        assert_zeros_beside(held)


def test_a_conversion_that_fails_half_way_ends_the_worker_and_one_before_changes_nothing(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = cache(pool)
    kv.grow(4)
    kv.allocator.allocate(6)
    monkeypatch.setattr("worker.memory.kv_cache.CONVERTED_BYTES", 2 * kv.block_bytes)
    calls: list[int] = []

    def failing(*args: torch.Tensor) -> None:
        calls.append(len(calls))
        if len(calls) in (1, 4):
            raise RuntimeError("no memory left")
        rewrite_blocks(*args)

    monkeypatch.setattr("worker.memory.kv_cache.rewrite_blocks", failing)
    before = kv.layers[1][:6].clone()
    with pytest.raises(RuntimeError, match="no memory left"):
        kv.convert(1, "int8")
    assert kv.precision == "full" and kv.layers[1][:6].equal(before)
    with pytest.raises(BrokenInvariant, match="4 of 6 blocks are in int8"):
        kv.convert(1, "int8")


def test_there_and_back_the_limit_of_blocks_stays(pool: PagePool) -> None:
    kv = cache(pool)
    kv.grow(9)
    kv.limit(23)
    pages = kv.pages_per_layer
    for _ in range(5):
        kv.count_as("int8")
        assert kv.blocks_in(kv.pages_per_layer) > 23
        kv.count_as("full")
    assert kv.blocks_in(100) == kv.num_blocks == 23 and kv.pages_per_layer == pages


def test_several_blocks_move_by_one_call_whose_ids_are_contiguous(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = cache(pool)
    kv.grow(2)
    assert kv.num_blocks >= 6
    for layer in kv.layers:
        layer[:3] = torch.randn(layer[:3].shape)
    stored = [layer[:3].clone() for layer in kv.layers]
    made = list[object]()

    def copy(layer: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
        assert sources.is_contiguous() and targets.is_contiguous()  # what kernels.copy_blocks takes
        made.append(kernels.copy_blocks(layer, sources, targets))

    monkeypatch.setattr("worker.memory.kv_cache.copy_blocks", copy)
    kv.copy_blocks({0: 5, 1: 3, 2: 4})
    assert len(made) == len(kv.layers)
    for layer, before in zip(kv.layers, stored, strict=True):
        assert torch.equal(layer[[5, 3, 4]], before)
    kv.release()


def test_blocks_in_8_bits_move_with_their_scales_and_halve_by_heads() -> None:
    with checked_pool(CpuBackend, PAGES) as pool:
        kv = KVCache(
            pool,
            num_layers=1,
            num_kv_heads=4,
            head_dim=16,
            block_tokens=2,
            dtype=torch.float32,
            max_blocks=100,
            owner="demo",
            precision="int8",
        )
        kv.grow(1)
        keys, values = torch.randn(2, 6, 4, 16)
        kernels.store_kv(keys, values, kv.layers[0], torch.arange(6))  # blocks 0 to 2
        stored = kv_codes.dequantize(*kv_codes.parts_of(kv.layers[0][:3]))
        kv.copy_blocks({0: 5, 2: 0})
        moved = kv_codes.dequantize(*kv_codes.parts_of(kv.layers[0][[5, 1, 0]]))
        assert torch.equal(moved, stored)
        halves = kv_codes.dequantize(*kv_codes.parts_of(kv.layers_at(2)[0][2:4]))  # those of block 1
        assert torch.equal(halves.flatten(0, 1), stored[1])
        kv.release()
