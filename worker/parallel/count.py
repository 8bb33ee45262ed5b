"""Which blocks are in use in a group, told so that nobody takes one before it was decided about them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from worker.distributed.messages import Census
from worker.parallel.party import Party


@contextmanager
def counting(party: Party) -> Iterator[Callable[[], Generator[bool, None, list[list[int]]]]]:
    """Within it no step is called after the count until an action was added; `yield from` what it gives for
    the numbers in use, by rank."""
    chair = party.chair
    assert chair
    chair.add(Census())
    counted_in = chair.step + 1

    def count() -> Generator[bool, None, list[list[int]]]:
        while chair.step != counted_in or not chair.is_everyone_ready:
            party.raise_fallen()
            yield False
        return [chair.ready_of(rank).used for rank in range(chair.size)]

    try:
        yield count
    finally:
        chair.give_up_census()
