"""Groups of ranks, as threads of one process: sums, exchanges, and a member that does not come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from worker.distributed.carriers import Messages
from worker.distributed.communicator import Communicator, PeerLost, Staged, connect, share_a_gpu


def together(size: int, work: Callable[[Communicator], object], timeout_s: float = 20.0) -> list[object]:
    """Return what each rank's `work` returned."""
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


def test_workers_of_one_gpu_talk_by_way_of_host_memory_as_others_do_directly() -> None:
    """Without a GPU both ends of the way lie in host memory; the way is the same."""

    def work(group: Communicator) -> list[torch.Tensor]:
        made = []
        for each in (group, Staged(group, pins=False)):
            for shape, dtype in (((3, 4), torch.float32), ((50, 4), torch.bfloat16), ((2, 4), torch.float32)):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
                each.all_reduce(x)
                # rank r sends r rows to every rank: the first sends nothing
                sent = torch.full((group.rank * group.size, 2), group.rank)
                received = torch.empty(sum(range(group.size)), 2, dtype=sent.dtype)
                each.all_to_all(received, sent, range(group.size), [group.rank] * group.size)
                made += [x, received]
        return made

    for made in together(3, work):
        assert isinstance(made, list)
        direct, staged = made[:6], made[6:]
        assert all(torch.equal(a, b) for a, b in zip(direct, staged, strict=True))


def test_an_exchange_takes_the_same_way() -> None:
    def work(group: Communicator) -> torch.Tensor:
        rows = torch.arange(8).view(4, 2) + 100 * group.rank
        staged, sizes = Staged(group, pins=False), [0, 0]
        sizes[1 - group.rank] = 2 * rows[0].nbytes
        carrier = Messages(rows.device, staged, [0, 1], sizes[1 - group.rank])

        def fill(peer: int, buffer: torch.Tensor) -> None:
            buffer.view(rows.dtype).copy_(rows[1::2].flatten())

        received = carrier.trade(sizes, sizes, fill)[1 - group.rank]
        rows[1::2] = received.view(rows.dtype).view(2, 2)
        return rows

    first, second = together(2, work)
    assert first.tolist() == [[0, 1], [102, 103], [4, 5], [106, 107]]  # type: ignore[attr-defined]
    assert second.tolist() == [[100, 101], [2, 3], [104, 105], [6, 7]]  # type: ignore[attr-defined]


def test_a_member_that_left_is_told_by_way_of_host_memory_too() -> None:
    def work(group: Communicator) -> str:
        if group.rank == 1:
            return "gone"
        try:
            Staged(group, pins=False).all_reduce(torch.ones(4))
        except PeerLost:
            return "lost"
        return "summed"

    assert together(2, work, timeout_s=1.0) == ["lost", "gone"]


@pytest.mark.parametrize(
    ("gpus", "is_shared"),
    [(["a", "b", "c"], False), (["a", "b", "a"], True), (["a", "a", "a"], True)],
)
def test_all_ranks_find_out_alike_whether_two_of_them_share_a_gpu(gpus: list[str], is_shared: bool) -> None:
    store = HashStore()
    with ThreadPoolExecutor(len(gpus)) as threads:
        found = [threads.submit(share_a_gpu, store, rank, len(gpus), gpu) for rank, gpu in enumerate(gpus)]
        assert [each.result(20) for each in found] == [is_shared] * len(gpus)
