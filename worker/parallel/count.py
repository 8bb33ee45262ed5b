"""Which blocks are in use in a group, told so that nobody takes one before it was decided about them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

from worker.distributed.messages import Census
from worker.parallel.executor import TensorParallelExecutor


@contextmanager
def counting(party: TensorParallelExecutor) -> Iterator[Callable[[], Generator[bool, None, list[list[int]]]]]:
    """Within it no step is called after the count until an action was added; `yield from` what it gives for
    the numbers in use, by rank."""
    coordinator = party.coordinator
    assert coordinator
    coordinator.add(Census())
    counted_in = coordinator.step + 1

    def count() -> Generator[bool, None, list[list[int]]]:
        while coordinator.step != counted_in or not coordinator.is_everyone_ready:
            party.raise_fallen()
            yield False
        return [coordinator.ready_of(rank).used for rank in range(coordinator.size)]

    try:
        yield count
    finally:
        coordinator.give_up_census()
