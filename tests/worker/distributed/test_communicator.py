"""Groups of ranks, as threads of one process: sums, exchanges, and a member that does not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, Store

from tests.support.paths import ROOT
from worker.distributed import communicator
from worker.distributed.carriers import Messages
from worker.distributed.communicator import (
    Communicator,
    LaunchedCommunicator,
    PeerLost,
    Staged,
    connect,
    share_a_gpu,
)


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


class Launched:
    """A group between GPUs: a call returns at once, and ends on the device when its peers come."""

    def __init__(self) -> None:
        self.ended, self.aborts, self.looks = True, 0, 0

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def allreduce(self, _: list[torch.Tensor]) -> Launched:
        self.ended = False
        return self

    def alltoall_base(self, *_: object) -> Launched:
        return self.allreduce([])

    def wait(self) -> None:
        """Order streams."""

    def abort(self) -> None:
        self.aborts += 1

    def query(self) -> bool:
        self.looks += 1
        self.ended |= self.looks == 3
        return self.ended


def test_a_sum_between_gpus_is_waited_for_when_it_is_settled() -> None:
    device = Launched()
    group = LaunchedCommunicator(device, 20.0, lambda: device)
    group.settle()
    group.all_reduce(torch.ones(4))
    assert device.looks == 0
    group.settle()
    group.settle()
    assert device.looks == 3 and device.ended
    device.looks = 0
    group.all_to_all(torch.ones(2), torch.ones(2), [1, 1], [1, 1])
    assert device.looks == 3 and device.ended, "rows that came are read at once"


def test_a_peer_that_is_lost_between_gpus_is_told_and_the_group_aborted() -> None:
    device = Launched()
    group = LaunchedCommunicator(device, 0.05, lambda: device)
    group.all_reduce(torch.ones(4))
    device.looks = 3  # it never ends
    with pytest.raises(PeerLost, match=r"rank 1 of 2: a call did not end within 0\.05 s .*another rank"):
        group.settle()
    group.close()
    assert device.aborts == 1
    with pytest.raises(PeerLost, match="was left"):
        group.all_reduce(torch.ones(4))


def test_a_group_between_gpus_whose_abort_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    device, go_on, ended = Launched(), threading.Event(), threading.Event()

    def abort() -> None:
        go_on.wait(20)
        ended.set()
        raise RuntimeError("the connections are broken")

    monkeypatch.setattr(communicator, "LEAVE_S", 0.05)
    monkeypatch.setattr(device, "abort", abort)
    group = LaunchedCommunicator(device, 0.05, lambda: device)
    group.all_reduce(torch.ones(4))
    device.looks = 3  # it never ends
    began = time.monotonic()
    with pytest.raises(PeerLost, match="did not end within"):
        group.settle()
    group.close()
    assert time.monotonic() - began < 5 and not ended.is_set()
    go_on.set()
    assert ended.wait(20), "the thread that was left goes on"


def test_a_group_over_nccl_is_made_so_that_its_watchdog_neither_ends_the_process_nor_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, str] = {}

    class Group:
        Options = SimpleNamespace

        def __init__(self, store: Store, rank: int, size: int, options: SimpleNamespace) -> None:
            self.made = store, rank, size, options._timeout
            seen.update(os.environ)  # as the constructor of torch reads it

    for name in communicator._WATCHDOG:
        monkeypatch.setenv(name, "7")  # put back at the end
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    store = HashStore()
    made = communicator._nccl(store, 1, 2)
    assert made.made[:3] == (store, 1, 2) and made.made[3] > timedelta(days=1)
    assert {name: seen[name] for name in communicator._WATCHDOG} == dict.fromkeys(communicator._WATCHDOG, "0")
    assert len(communicator._WATCHDOG) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_call_that_does_not_end_on_a_gpu_is_a_lost_peer() -> None:
    # In a process of its own, since an abort that hangs would take the other tests with it. It says on stderr
    # where it is; after 20 s it prints the stacks of its threads and ends.
    code = """
import faulthandler, sys, time
import torch
from torch.distributed import HashStore
from worker.distributed.communicator import LEAVE_S, PeerLost, connect
faulthandler.dump_traceback_later(20, exit=True)
began = time.monotonic()
def say(what):
    print(f"{time.monotonic() - began:.2f} s: {what}", file=sys.stderr, flush=True)
group, x = connect(HashStore(), 0, 1, timeout_s=0.5, device="cuda:0"), torch.ones(8, device="cuda")
say("connected")
group.all_reduce(x)
group.settle()
assert int(x.sum()) == 8
say("summed")
torch.cuda._sleep(4_000_000_000)  # of its cycles: two seconds
group.all_reduce(x)
launched = time.monotonic()
say("launched behind a kernel of two seconds")
for call in (group.settle, lambda: group.all_reduce(x)):
    try:
        call()
    except PeerLost as error:
        print(error, flush=True)
        say("lost")
assert time.monotonic() - launched < 0.5 + LEAVE_S + 1, "the worker goes on"
assert int(torch.ones(8, device="cuda").sum()) == 8, "the device goes on"
say("the device went on")
again = connect(HashStore(), 0, 1, timeout_s=5.0, device="cuda:0")
again.all_reduce(x)
again.settle()
say("another group summed")
again.close()
del again, group
say("at the end")
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert "Timeout (" not in ran.stderr, f"it hangs:\n{ran.stderr[-6000:]}"
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr[-6000:]}"
    assert "did not end within 0.5 s" in ran.stdout and "was left" in ran.stdout, ran.stdout
    assert "at the end" in ran.stderr, ran.stderr[-3000:]


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
