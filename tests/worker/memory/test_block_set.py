"""Sets of block numbers, against those of Python."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.memory import BlockAllocator, OutOfBlocks, plan_moves_below
from worker.memory.block_set import FEW, BlockSet
from worker.memory.prefix_index import PrefixIndex

HIGHEST = 300
blocks = st.integers(0, HIGHEST)
spans = st.tuples(blocks, blocks).map(lambda ends: range(min(ends), max(ends)))
calls = st.one_of(
    st.tuples(st.just("update"), st.one_of(st.lists(blocks, max_size=2 * FEW), spans)),
    st.tuples(st.just("difference_update"), st.lists(blocks, max_size=9)),
    st.tuples(st.sampled_from(["pop_lowest", "pop_highest"]), st.integers(0, 9)),
    st.tuples(st.just("drop_from"), blocks),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(calls, max_size=20))
def test_it_holds_what_a_set_holds(made: list[tuple[str, object]]) -> None:
    found, expected = BlockSet(), set[int]()
    for name, argument in made:
        told = getattr(found, name)(argument)
        if name.startswith("pop") and isinstance(argument, int):
            ascending = sorted(expected)
            taken = (
                ascending[:argument]
                if name == "pop_lowest"
                else ascending[max(0, len(expected) - argument) :]
            )
            assert told == taken
            expected -= set(taken)
        elif name == "drop_from" and isinstance(argument, int):
            expected = {block for block in expected if block < argument}
        else:
            getattr(expected, name)(argument)
        assert list(found) == sorted(expected) and len(found) == len(expected)
        assert found.highest == max(expected, default=-1)
        assert all((block in found) == (block in expected) for block in range(-1, HIGHEST + 2))
        assert found.numbers(50).tolist() == [block for block in sorted(expected) if block >= 50]
        assert found.mask(40).tolist() == [block in expected for block in range(40)]


def naive_moves(used: set[int], capacity: int, cached: list[int]) -> dict[int, int]:
    rank = {block: place for place, block in enumerate(cached, 1)}
    free = sorted((rank.get(block, 0), block) for block in range(capacity) if block not in used)
    live = sorted(block for block in used if block >= capacity)
    return {block: target for block, (_, target) in zip(live, free, strict=False)}


@settings(max_examples=150, deadline=None)
@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.lists(st.integers(0, 30), unique=True))
def test_moves_go_to_the_lowest_empty_blocks_and_then_to_the_least_recently_used(
    used: set[int], capacity: int, cached: list[int]
) -> None:
    index = PrefixIndex()
    for block in cached:
        index.add(block, block.to_bytes(2, "big"), "full")
    if len(used) > capacity:
        with pytest.raises(OutOfBlocks):
            plan_moves_below(used, capacity, index)
    else:
        assert plan_moves_below(used, capacity, index) == naive_moves(used, capacity, cached)


def test_a_brief_check_finds_a_block_that_is_lost() -> None:
    blocks = BlockAllocator(100)
    blocks.allocate(3)
    blocks.check_integrity(with_index=False)
    blocks._used.discard(1)
    with pytest.raises(RuntimeError, match=r"neither: \[1\]"):
        blocks.check_integrity(with_index=False)
