"""FFN rows of a group that parts: from the peers, or from the host where that is sooner done."""

from __future__ import annotations

import math

import pytest
import torch

from tests.test_exchange import Member, together
from worker.morph.host_copy import Span
from worker.morph.rate import Rate
from worker.morph.sums import ROW_BYTES
from worker.parallel.all_gather import all_gather
from worker.parallel.communicator import PeerLost
from worker.parallel.exchange import Moved
from worker.parallel.rows import RowCosts, choose, row_costs

# ---------------------------------------------------------------------------- which way

FAST = RowCosts(
    rows_missing_bytes=300, rows_host_bytes=300, rows_host_bytes_per_s=100.0, rows_peer_bytes_per_s=200.0
)


def costs(**other: float) -> RowCosts:
    return row_costs({**FAST.numbers(), **other})


def test_rows_come_from_peers_where_that_is_sooner_done() -> None:
    chosen = choose([FAST, FAST], num_steps=10, step_s=0.1)
    assert (chosen.steps_s, chosen.host_s, chosen.peers_s) == (1.0, 3.0, 1.5)
    assert chosen.is_from_peers  # 2.5 s against 3: steps and rows take turns, the host's come beside them
    assert chosen.numbers() == {
        "rows_host_predicted_seconds": 3.0,
        "rows_peers_predicted_seconds": 1.5,
        "rows_from_peers": 1,
    }


@pytest.mark.parametrize(
    ("step_s", "is_from_peers"), [(0.0, True), (0.14, True), (0.16, False), (9.0, False)]
)
def test_rows_that_the_host_brings_beside_the_steps_cost_nothing_while_steps_take_longer(
    step_s: float, is_from_peers: bool
) -> None:
    assert choose([FAST, FAST], num_steps=10, step_s=step_s).is_from_peers == is_from_peers


def test_the_slowest_member_decides() -> None:
    slow_host, slow_way = costs(rows_host_bytes_per_s=10.0), costs(rows_peer_bytes_per_s=20.0)
    assert choose([FAST, slow_host], 10, 1.0).is_from_peers
    assert not choose([FAST, slow_way], 10, 0.1).is_from_peers
    assert choose([slow_host, slow_way], 0, 0.0) == choose([slow_way, slow_host], 0, 0.0)


def test_a_host_that_must_read_more_than_is_missing_takes_longer() -> None:
    assert choose([costs(rows_host_bytes=600)] * 2, 10, 0.3).is_from_peers
    assert not choose([FAST] * 2, 10, 0.3).is_from_peers


def test_what_was_never_measured_is_not_compared() -> None:
    unknown_host = choose([FAST, costs(rows_host_bytes_per_s=0)], 0, 0.0)
    unknown_way = choose([costs(rows_peer_bytes_per_s=0)] * 2, 0, 0.0)
    assert not unknown_host.is_from_peers and unknown_host.host_s is None
    assert not unknown_way.is_from_peers and unknown_way.peers_s is None
    assert unknown_way.numbers() == {"rows_host_predicted_seconds": 3.0, "rows_from_peers": 0}
    # One of them was in an exchange: that is a measure for all.
    assert choose([FAST, costs(rows_peer_bytes_per_s=0)], 0, 0.0).peers_s == 1.5


def test_a_rate_follows_what_was_done_lately() -> None:
    rate = Rate()
    rate.add(0, 1.0)
    assert rate.bytes_per_s == 0.0
    rate.add(100, 1.0)
    assert rate.bytes_per_s == 100.0
    for _ in range(20):
        rate.add(1000, 1.0)
    assert math.isclose(rate.bytes_per_s, 1000.0, rel_tol=0.01)


# ---------------------------------------------------------------------------- all for each

PAGE = 2 * ROW_BYTES
WHOLE = 3 * 4 * 2 * PAGE - 100  # three matrices, two pages of each a rank; it ends within a page


def spans(rank: int, size: int) -> list[Span]:
    """A rank's pages of each of three matrices."""
    each = 8 // size * PAGE
    return [
        (begin, min(begin + each, WHOLE))
        for begin in (matrix * 8 * PAGE + rank * each for matrix in range(3))
    ]


class Bytes:
    def __init__(self, own: list[Span]) -> None:
        self.held = torch.zeros(WHOLE, dtype=torch.uint8)
        for begin, end in own:
            self.held[begin:end] = truth()[begin:end]

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.held[begin:end]

    def put(self, begin: int, source: torch.Tensor) -> None:
        assert begin % ROW_BYTES == 0
        self.held[begin : begin + len(source)] = source


def truth() -> torch.Tensor:
    return torch.randint(256, (WHOLE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", ["outboxes", "messages"])
@pytest.mark.parametrize("stage_bytes", [1, 40_000, 1 << 20])
@pytest.mark.parametrize(("size", "low"), [(2, 1), (4, 1), (4, 2)])
def test_every_rank_gets_what_its_peers_have(
    size: int, low: int, stage_bytes: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "messages":
        monkeypatch.setattr("worker.parallel.all_gather.outboxes_of", lambda group, nbytes: None)

    def work(member: Member) -> Moved:
        memory = Bytes(spans(member.group.rank, size))
        parts = [spans(peer, size) for peer in member.peers]
        moved = all_gather(memory, parts, member.group, member.peers, stage_bytes)
        for begin, end in spans(member.low_shard.rank, low):
            assert memory.held[begin:end].equal(truth()[begin:end])
        others = set(range(WHOLE)) - {i for span in spans(member.low_shard.rank, low) for i in range(*span)}
        assert not memory.held[sorted(others)].any()
        return moved

    for moved in together(size, low, work):
        assert isinstance(moved, Moved)
        assert moved.bytes >= WHOLE // low - WHOLE // size - 2 * PAGE
        assert moved.peak_bytes <= max(stage_bytes, 2 * (size // low - 1) * ROW_BYTES)
        assert moved.stages > 1 if stage_bytes < 1 << 20 else moved.stages == 1


def test_a_peer_that_is_gone_ends_it_for_all() -> None:
    def work(member: Member) -> None:
        if member.group.rank == 1:
            member.group.close()
            return
        with pytest.raises(PeerLost):
            all_gather(Bytes(spans(0, 2)), [spans(0, 2), spans(1, 2)], member.group, [0, 1], 1 << 14)

    together(2, 1, work)
