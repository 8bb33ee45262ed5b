"""Steps from the groups there are to the groups that were asked for, whatever they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.groups import Members, can_change, joined, parted
from gateway.operations.steps import DegreeStep, plan_steps

DEGREES = (1, 2, 4, 8)


def groups(*names: str) -> list[Members]:
    """`groups("w0 w1", "w2")`."""
    return [tuple(name.split()) for name in names]


def steps(there: list[Members], wanted: str, tp: int) -> list[str]:
    return [str(step) for step in plan_steps(there, wanted.split(), tp, DEGREES)]


@pytest.mark.parametrize(
    ("there", "wanted", "tp", "planned"),
    [
        (groups("w0", "w1"), "w1 w0", 2, ["tp 2 on w1, w0"]),
        (groups("w0 w1", "w2", "w3"), "w0 w1 w2 w3", 4, ["tp 2 on w2, w3", "tp 4 on w0, w2, w1, w3"]),
        (groups("w0 w1", "w2"), "w1 w2", 2, ["tp 1 on w0, w1", "tp 2 on w1, w2"]),
        (groups("w2 w0 w3 w1"), "w0 w1", 2, ["tp 2 on w2, w0, w3, w1"]),
        (groups("w2 w0 w3 w1"), "w0 w2", 2, ["tp 1 on w2, w0, w3, w1", "tp 2 on w0, w2"]),
        (groups("w2 w0 w3 w1"), "w1", 1, ["tp 1 on w2, w0, w3, w1"]),
        (groups("w0 w1", "w2 w3"), "w0 w1 w2 w3", 1, ["tp 1 on w0, w1", "tp 1 on w2, w3"]),
        (groups("w0", "w1", "w2", "w3"), "w3 w2 w1 w0", 2, ["tp 2 on w3, w2", "tp 2 on w1, w0"]),
        (groups("w0", "w1", "w2", "w3"), "w0 w1 w2 w3", 4, ["tp 4 on w0, w1, w2, w3"]),
        (groups("w0 w1", "w2 w3"), "w1 w2", 2, ["tp 1 on w0, w1", "tp 1 on w2, w3", "tp 2 on w1, w2"]),
        (groups("w0 w1", "w2", "w3"), "w0 w1 w2 w3", 2, ["tp 2 on w2, w3"]),
        (groups("w0 w1"), "w0 w1", 2, []),
        (groups("w0", "w1"), "w0 w1", 1, []),
    ],
)
def test_what_must_part_parts_first_and_then_the_smallest_join(
    there: list[Members], wanted: str, tp: int, planned: list[str]
) -> None:
    assert steps(there, wanted, tp) == planned


@pytest.mark.parametrize(
    ("there", "tp", "planned"),
    [
        (groups("w0", "w1", "w2", "w3"), 4, ["tp 4 on w0, w1, w2, w3"]),
        (groups("w0 w1", "w2", "w3"), 4, ["tp 1 on w0, w1", "tp 4 on w0, w1, w2, w3"]),
        (groups("w0 w2 w1 w3"), 2, ["tp 1 on w0, w2, w1, w3", "tp 2 on w0, w1", "tp 2 on w2, w3"]),
        (groups("w0 w2 w1 w3"), 4, []),
        (groups("w0 w1", "w2 w3"), 2, []),
    ],
)
def test_single_workers_join_and_leave_a_group_of_more_than_the_kv_heads(
    there: list[Members], tp: int, planned: list[str]
) -> None:
    wanted = ["w0", "w1", "w2", "w3"]
    assert [str(step) for step in plan_steps(there, wanted, tp, DEGREES, kv_heads=2)] == planned
    assert can_change(1, 4, 2) and can_change(2, 4, 4) and can_change(2, 4, 0)
    assert not can_change(2, 4, 2)


def test_a_group_that_was_joined_parts_into_what_it_was() -> None:
    pairs = groups("w0 w1", "w2 w3")
    assert parted(joined(pairs), 2) == pairs


def apply(there: list[Members], step: DegreeStep) -> list[Members]:
    """Carry a step out as workers do: whole groups of one degree become one, or one becomes several."""
    taking_part = [group for group in there if set(group) & set(step.workers)]
    assert sorted(name for group in taking_part for name in group) == sorted(step.workers)
    rest = [group for group in there if group not in taking_part]
    if step.tp > len(taking_part[0]):
        assert len({len(group) for group in taking_part}) == 1 and step.tp == len(step.workers)
        assert step.workers == joined(sorted(taking_part, key=lambda group: step.workers.index(group[0])))
        return [*rest, step.workers]
    assert taking_part == [step.workers]
    return [*rest, *parted(step.workers, step.tp)]


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[Members], list[str], int]:
    names = iter(f"w{number}" for number in range(100))
    sizes = draw(st.lists(st.sampled_from(DEGREES), min_size=1, max_size=6))
    there = [tuple(next(names) for _ in range(size)) for size in sizes]
    every = [name for group in there for name in group]
    tp = draw(st.sampled_from([degree for degree in DEGREES if degree <= len(every)]))
    count = tp * draw(st.integers(1, len(every) // tp))
    return there, draw(st.permutations(every))[:count], tp


@given(orders())
def test_every_order_ends_in_the_groups_it_asks_for(order: tuple[list[Members], list[str], int]) -> None:
    there, wanted, tp = order
    meant = [group for group in there if set(group) & set(wanted)]
    now = list(there)
    for step in plan_steps(meant, wanted, tp, DEGREES):
        now = apply(now, step)
    of_wanted = [group for group in now if set(group) & set(wanted)]
    assert all(len(group) == tp and set(group) <= set(wanted) for group in of_wanted)
    untouched = [group for group in there if not set(group) & set(wanted)]
    assert set(untouched) <= set(now)
