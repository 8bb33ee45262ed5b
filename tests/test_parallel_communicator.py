"""Groups of ranks, as threads of one process: sums, exchanges, and a member that does not come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from worker.parallel.communicator import Communicator, PeerLost, connect


def together(size: int, work: Callable[[Communicator], object], timeout_s: float = 20.0) -> list[object]:
    """What each rank's `work` returned."""
    store = HashStore()

    def run(rank: int) -> object:
        group = connect(PrefixStore("group", store), rank, size, timeout_s=timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return [future.result(60) for future in [threads.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_bits_of_a_sum(size: int) -> None:
    def work(group: Communicator) -> torch.Tensor:
        x = torch.randn(7, 33, generator=torch.Generator().manual_seed(group.rank))
        group.all_reduce(x)
        return x

    sums = together(size, work)
    wanted = sum(torch.randn(7, 33, generator=torch.Generator().manual_seed(r)) for r in range(size))
    for each in sums:
        assert isinstance(each, torch.Tensor)
        torch.testing.assert_close(each, wanted)
        assert torch.equal(each, sums[0])


def test_rows_go_to_the_ranks_they_are_meant_for_also_none() -> None:
    def work(group: Communicator) -> list[list[float]]:
        # rank r sends r rows to every rank: rank 0 sends nothing
        sent = torch.full((group.rank * group.size, 2), float(group.rank))
        sizes = list(range(group.size))
        received = torch.empty(sum(sizes), 2)
        group.all_to_all(received, sent, sizes, [group.rank] * group.size)
        rows: list[list[float]] = received.tolist()
        return rows

    for rows in together(3, work):
        assert rows == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]


def test_a_member_that_left_is_told_and_not_waited_for_for_ever() -> None:
    def work(group: Communicator) -> str:
        if group.rank == 1:
            return "gone"
        try:
            group.all_reduce(torch.ones(4))
        except PeerLost as error:
            return str(error)
        return "summed"

    told = together(2, work, timeout_s=1.0)
    assert told[1] == "gone"
    assert "rank 0 of 2" in str(told[0])


def test_whoever_finds_nobody_says_so() -> None:
    store: Store = HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(PeerLost, match="rank 0 of 2 did not meet the others"):
        connect(PrefixStore("lonely", store), 0, 2, timeout_s=0.5)


def test_a_group_that_was_left_cannot_be_used() -> None:
    def work(group: Communicator) -> None:
        group.all_reduce(torch.ones(1))
        group.close()
        group.close()
        with pytest.raises(PeerLost, match="was left"):
            group.all_reduce(torch.ones(1))

    together(2, work)
