"""FFN rows of a group that parts: from the peers, or from the host where that is sooner done."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from bus.precisions import Precision
from tests.support.greedy import assert_greedy
from tests.support.group_workers import GroupWorker, model_fixtures, swap, transform, workers
from tests.worker.tensor_parallel.test_exchange import Member, together
from tests.worker.tensor_parallel.test_workers import prompt
from worker.distributed.all_gather import all_gather
from worker.distributed.communicator import PeerLost
from worker.distributed.kv_exchange import Moved
from worker.model.shard import Shard
from worker.parallel.rows import RowChoice, RowCosts, choose_rows
from worker.shape.checks import ROW_BYTES, CheckedPages
from worker.shape.copier import ByteSpan, Rate

# ---------------------------------------------------------------------------- which way

FAST = RowCosts(
    rows_missing_bytes=300, rows_host_bytes=300, rows_host_bytes_per_s=100.0, rows_peer_bytes_per_s=200.0
)


def costs(**other: float) -> RowCosts:
    return replace(FAST, **other)  # type: ignore[arg-type]


def test_rows_come_from_peers_where_that_is_sooner_done() -> None:
    chosen = choose_rows([FAST, FAST], num_steps=10, step_s=0.1)
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
    assert choose_rows([FAST, FAST], num_steps=10, step_s=step_s).is_from_peers == is_from_peers


def test_the_slowest_member_decides() -> None:
    slow_host, slow_way = costs(rows_host_bytes_per_s=10.0), costs(rows_peer_bytes_per_s=20.0)
    assert choose_rows([FAST, slow_host], 10, 1.0).is_from_peers
    assert not choose_rows([FAST, slow_way], 10, 0.1).is_from_peers
    assert choose_rows([slow_host, slow_way], 0, 0.0) == choose_rows([slow_way, slow_host], 0, 0.0)


def test_a_host_that_must_read_more_than_is_missing_takes_longer() -> None:
    assert choose_rows([costs(rows_host_bytes=600)] * 2, 10, 0.3).is_from_peers
    assert not choose_rows([FAST] * 2, 10, 0.3).is_from_peers


def test_what_was_never_measured_is_not_compared() -> None:
    unknown_host = choose_rows([FAST, costs(rows_host_bytes_per_s=0)], 0, 0.0)
    unknown_way = choose_rows([costs(rows_peer_bytes_per_s=0)] * 2, 0, 0.0)
    assert not unknown_host.is_from_peers and unknown_host.host_s is None
    assert not unknown_way.is_from_peers and unknown_way.peers_s is None
    assert unknown_way.numbers() == {"rows_host_predicted_seconds": 3.0, "rows_from_peers": 0}
    # One of them was in an exchange: that is a measure for all.
    assert choose_rows([FAST, costs(rows_peer_bytes_per_s=0)], 0, 0.0).peers_s == 1.5


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


def spans(rank: int, size: int) -> list[ByteSpan]:
    """A rank's pages of each of three matrices."""
    each = 8 // size * PAGE
    return [
        (begin, min(begin + each, WHOLE))
        for begin in (matrix * 8 * PAGE + rank * each for matrix in range(3))
    ]


class Bytes:
    def __init__(self, own: list[ByteSpan]) -> None:
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
        monkeypatch.setattr("worker.distributed.carriers.outboxes_of", lambda group, nbytes: None)

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


# ---------------------------------------------------------------------------- groups that part


LAYERS = 3
SLOW = [pytest.mark.faults, pytest.mark.slow]


model, folder = model_fixtures(num_hidden_layers=LAYERS, head_dim=32)


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have all go one way, whatever was measured."""

    def choose_it(way: str) -> None:
        chosen = RowChoice(steps_s=0.0, host_s=2.0, peers_s=1.0 if way == "peers" else 3.0)
        monkeypatch.setattr("worker.parallel.transform.choose_rows", lambda *costs: chosen)

    return choose_it


def applied(leader: GroupWorker, members: list[GroupWorker], tp: int, per_step: int = 1) -> dict[str, float]:
    report = leader.end_of(transform(members, tp, layers_per_step=per_step))
    assert report.state == "applied", report
    for worker in members:  # the others are a message behind
        worker.wait_degree(tp)
    return report.numbers


def ffn_bytes(worker: GroupWorker) -> list[torch.Tensor]:
    """Return the bytes of every layer, as it is at its shard."""
    weights, found = worker.grouping.local.weights, list[torch.Tensor]()

    def read() -> None:
        for layer in range(LAYERS):
            ffn = weights.ffn(layer)
            found.extend(ffn.read(*span).clone() for span in weights.spans(layer, weights.shard(layer)))

    worker.call(read)
    return found


@pytest.mark.parametrize("way", ["peers", "host"])
@pytest.mark.parametrize("per_step", [1, pytest.param(2, marks=SLOW)])
def test_two_that_part_have_every_byte_again_and_every_request_its_tokens(
    folder: Path, model: Any, take: Callable[[str], None], way: str, per_step: int
) -> None:
    take(way)
    with workers(folder, 2) as each:
        whole, pages = ffn_bytes(each[0]), [worker.pool.counts() for worker in each]
        for worker in each:
            worker.submit("runs through", prompt(7, 30), 60)
        applied(each[0], each, 2)
        numbers = applied(each[0], each, 1, per_step)
        assert numbers["rows_from_peers"] == (way == "peers") and numbers["rows_seconds"] > 0
        for worker in each:
            for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                assert found.equal(wanted)
            worker.wait_ends("runs through")
            assert_greedy(model, prompt(7, 30), 60, worker.tokens["runs through"])
            assert worker.instance.scheduler.num_recomputed == 0
        assert [worker.pool.counts() for worker in each] == pages


@pytest.mark.parametrize(
    ("family", "way"),
    [
        *((family, "peers") for family in ("phi3", "gemma2", "gemma3", "gpt-j", "falcon, new decoder")),
        ("gpt-j", "host"),
    ],
)
def test_workers_of_other_families_come_together_and_part_as_those_of_a_llama(
    tmp_path: Path, take: Callable[[str], None], family: str, way: str
) -> None:
    """GPT-J has biases in its FFN, in pages that every rank has."""
    take(way)
    other = make_oracle(family, num_hidden_layers=LAYERS)
    other.save_pretrained(tmp_path)
    with workers(tmp_path, 2) as each:
        pages = [worker.pool.counts() for worker in each]
        for worker in each:
            worker.submit("runs through", prompt(7, 30), 60)
        for _ in range(2):
            applied(each[0], each, 2)
            numbers = applied(each[0], each, 1)
            assert numbers["rows_from_peers"] == (way == "peers")
        for worker in each:
            worker.wait_ends("runs through")
            assert_greedy(other, prompt(7, 30), 60, worker.tokens["runs through"])
            assert worker.instance.scheduler.num_recomputed == 0
        assert [worker.pool.counts() for worker in each] == pages


@pytest.mark.parametrize("way", ["peers", "host"])
def test_two_that_part_have_their_quantised_rows_again(
    folder: Path, tmp_path: Path, take: Callable[[str], None], way: str
) -> None:
    take(way)
    with workers(folder, 2, host_dir=tmp_path, megabytes=6) as each:
        for worker in each:
            report = worker.end_of(swap(worker, "int4"))
            assert report.state == "applied", report
        whole = ffn_bytes(each[0])
        applied(each[0], each, 2)
        assert applied(each[0], each, 1)["rows_from_peers"] == (way == "peers")
        for worker in each:
            for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                assert found.equal(wanted)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["full", "int4"])
@pytest.mark.parametrize("way", ["peers", "host"])
def test_four_part_by_twos_and_then_each_alone(
    folder: Path, tmp_path: Path, take: Callable[[str], None], way: str, precision: Precision
) -> None:
    take(way)
    with workers(folder, 4, host_dir=tmp_path, megabytes=6) as each:
        w0, w1, w2, w3 = each
        for worker in each:
            assert worker.end_of(swap(worker, precision)).state == "applied"
            worker.submit("alone", prompt(3, 20), 40)
            worker.wait_ends("alone")
            worker.submit("runs through", prompt(7, 30), 300)
        whole, answer = ffn_bytes(w0), w0.tokens["alone"]

        def check(tp: int) -> None:
            for worker in each:
                worker.submit(f"at {tp}", prompt(3, 20), 40)
                worker.wait_ends(f"at {tp}")
                assert worker.tokens.pop(f"at {tp}") == answer
                del worker.ends[f"at {tp}"]

        for path in ((4, 2, 1), (4, 1)):
            applied(w0, each, 4)
            for tp in path[1:]:
                groups = [(w0, each)] if w0.instance.tp == 4 else [(w0, [w0, w2]), (w1, [w1, w3])]
                for leader, members in groups:
                    numbers = applied(leader, members, tp)
                    assert numbers["rows_from_peers"] == (way == "peers")
                check(tp)
            for worker in each:
                for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                    assert found.equal(wanted)
        for worker in each:
            worker.wait_ends("runs through")
            assert worker.tokens["runs through"] == w0.tokens["runs through"]
            assert worker.instance.scheduler.num_recomputed == 0


def test_what_a_group_measured_decides_and_is_told(folder: Path) -> None:
    """The first group learns both rates from a checkpoint: its copier by a rehearsal, the way to each other
    by a probe, since no KV went over it."""
    with workers(folder, 2) as each:
        applied(each[0], each, 2)
        places = [worker.grouping.local for worker in each]
        for worker, place in zip(each, places, strict=True):
            assert place.exchanges.bytes_per_s > 0
            worker.wait(lambda place=place: place.copier.rate.bytes_per_s > 0, "the rehearsal")  # type: ignore[misc]
        numbers = applied(each[0], each, 1)
        told = {numbers["rows_host_predicted_seconds"], numbers["rows_peers_predicted_seconds"]}
        assert all(seconds > 0 for seconds in told) and numbers["rows_from_peers"] in (0, 1)


@pytest.mark.parametrize("fault", ["lost", "damaged"])
def test_rows_that_do_not_come_leave_each_alone_with_those_of_its_host(
    folder: Path,
    model: Any,
    tmp_path: Path,
    take: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Stop in the middle: one layer has come before."""
    take("peers")
    real, calls = CheckedPages.put, iter(range(10_000))

    def put(pages: CheckedPages, begin: int, source: torch.Tensor) -> None:
        if pages._target._pool is each[1].pool and next(calls) == 4:
            if fault == "lost":
                raise PeerLost("it is gone")
            source = source ^ 1
        real(pages, begin, source)

    with workers(folder, 2, host_dir=tmp_path, megabytes=6) as each:
        whole = ffn_bytes(each[0])
        for worker in each:
            worker.submit("runs through", prompt(7, 30), 100)
        applied(each[0], each, 2)
        monkeypatch.setattr(CheckedPages, "put", put)
        report = each[0].end_of(transform(each, 1))
        assert report.state == "failed", report
        for worker in each:
            worker.wait_degree(1)
            for found, wanted in zip(ffn_bytes(worker), whole, strict=True):
                assert found.equal(wanted)
            worker.wait_ends("runs through")
            assert_greedy(model, prompt(7, 30), 100, worker.tokens["runs through"])


def test_layers_that_take_their_rows_between_the_same_two_steps_are_no_hang(
    folder: Path, take: Callable[[str], None]
) -> None:
    take("peers")
    with workers(folder, 2) as each:
        applied(each[0], each, 2)
        thread, weights = each[0].thread, each[0].grouping.local.weights
        widen, since_progress = weights.widen, list[float]()

        def slow(layer: int, shard: Shard) -> None:
            since_progress.append(thread.step_seconds())
            time.sleep(0.2)
            widen(layer, shard)

        weights.widen = slow  # type: ignore[method-assign]
        applied(each[0], each, 1, per_step=LAYERS)
        assert len(since_progress) == LAYERS and since_progress[-1] < 0.4
