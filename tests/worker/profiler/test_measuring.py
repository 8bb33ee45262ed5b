"""Profiles between the steps of what serves, and what is kept of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from bus.checkpoints import folder_digest
from bus.deployments import Measure, ProbePeer, Profile
from bus.precisions import PRECISIONS
from bus.settings import WorkerSettings
from bus.version import program_version
from tests.support.engine_toys import Client, request, run, toy_engine
from tests.support.model_folders import make_pool
from tests.support.ready_models import Ready
from worker.distributed.transport import Transport
from worker.memory import CpuBackend, PagePool
from worker.profiler.links import ProbeResponder
from worker.profiler.measurer import CannotMeasure, Measurer, profile_path
from worker.profiler.profiler import ProfileSteps
from worker.profiler.runner import ProfileProgress, ProfileRunner


class FakeProfiler:
    """`units` units of work of `unit_s`, of a clock that it moves."""

    def __init__(self, units: int, *, unit_s: float = 0.001, fails_at: int = -1) -> None:
        self.units, self.unit_s, self.fails_at = units, unit_s, fails_at
        self.progress, self.num_done, self.is_closed, self.checks = "", 0, False, 0
        self.on_unit: Callable[[float], None] = lambda seconds: None

    def steps(self) -> ProfileSteps:
        try:
            for number in range(self.units):
                if number == self.fails_at:
                    raise RuntimeError("a kernel failed")
                self.num_done += 1
                self.progress = f"unit {number}"
                self.on_unit(self.unit_s)
                yield True
        finally:
            self.is_closed = True

    def check_integrity(self) -> None:
        self.checks += 1


class Hand:
    """Measuring, with what it told."""

    def __init__(self, share: float = 0.05, clock: Callable[[], float] = time.perf_counter) -> None:
        self.measuring = ProfileRunner(share, clock)
        self.told: list[ProfileProgress] = []

    def begin(self, name: str, profiler: Any) -> None:
        self.measuring.begin(name, profiler, self.told.append)

    def ends(self) -> dict[str, str]:
        return {one.id: one.problem for one in self.told if one.is_over}


def test_profiles_come_one_after_the_other_and_tell_how_far_they_are() -> None:
    hand = Hand(share=1.0)
    first, second = FakeProfiler(3), FakeProfiler(2)
    hand.begin("a", first)
    hand.begin("a", second)  # the same again changes nothing
    hand.begin("b", second)
    while hand.measuring.patience_s is not None:
        hand.measuring.advance(is_busy=False)
        assert first.is_closed or not second.num_done
    assert [(one.id, one.progress) for one in hand.told if not one.is_over] == [
        ("a", "unit 0"),
        ("a", "unit 1"),
        ("a", "unit 2"),
        ("b", "unit 0"),
        ("b", "unit 1"),
    ]
    assert hand.ends() == {"a": "", "b": ""}
    assert first.checks == second.checks == 1


def test_beside_requests_it_takes_its_share_of_the_time_and_no_more() -> None:
    now = 0.0
    hand = Hand(share=0.05, clock=lambda: now)
    profiler = FakeProfiler(1000, unit_s=0.003)

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    profiler.on_unit = spend
    hand.begin("a", profiler)
    for _ in range(1000):
        spend(0.010)  # a step of what serves
        hand.measuring.advance(is_busy=True)
    assert profiler.num_done * 0.003 == pytest.approx(0.05 * now, rel=0.1)


@pytest.mark.parametrize("how", ["cancel", "cancel_all", "failure"])
def test_whatever_ends_it_early_closes_it_and_says_why(how: str) -> None:
    hand = Hand(share=1.0)
    profiler = FakeProfiler(10**9, fails_at=3 if how == "failure" else -1)
    waiting = FakeProfiler(1)
    hand.begin("a", profiler)
    hand.measuring.advance(is_busy=True)
    hand.begin("b", waiting)
    if how == "cancel":
        hand.measuring.cancel("a")
        hand.measuring.cancel("nobody")
    elif how == "cancel_all":
        hand.measuring.cancel_all("the worker leaves")
    while hand.measuring.patience_s is not None:
        hand.measuring.advance(is_busy=False)
    reason = {"cancel": "cancelled", "cancel_all": "the worker leaves", "failure": "a kernel failed"}[how]
    assert hand.ends() == {"a": reason, "b": reason if how == "cancel_all" else ""}
    assert profiler.is_closed


# --------------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    make_oracle("llama", num_hidden_layers=4).save_pretrained(path)
    return path


@pytest.fixture
def pool() -> Iterator[PagePool]:
    made = make_pool()
    yield made
    made.check_integrity()
    assert made.num_free == made.num_pages
    made.close()


def measurer_of(pool: PagePool, **changes: Any) -> Measurer:
    settings = WorkerSettings(**{"block_tokens": 4, "max_num_batched_tokens": 32, **changes}).in_force("cpu")
    return Measurer(pool, settings, max_rounds=2)


def command_of(folder: Path, **changes: Any) -> Measure:
    fields: dict[str, Any] = {
        "id": "m1",
        "epoch": 1,
        "model": "tiny",
        "path": str(folder),
        "digest": folder_digest(folder),
        "precisions": ["full", "int4"],
        "prompt_tokens": [5, 12],
        "batch_sizes": [2],
    }
    return Measure(**{**fields, **changes})


def measured(measurer: Measurer, command: Measure) -> Profile:
    profiler = measurer.prepare(command)
    for _ in profiler.steps():
        pass
    return measurer.keep(command, profiler)


def test_what_was_measured_once_answers_the_next_time(folder: Path, pool: PagePool) -> None:
    measurer, command = measurer_of(pool), command_of(folder)
    assert measurer.find(command) is None
    profile = measured(measurer, command)
    assert profile.device == "cpu"
    assert profile.digest == command.digest
    assert all(len(one.seconds) == 2 for one in profile.latency)
    assert measurer.find(command) == profile
    assert measurer.find(replace(command, model="alias")) == replace(profile, model="alias")
    assert measurer.find(replace(command, prompt_tokens=[5])) == profile
    assert measurer.find(replace(command, prompt_tokens=[5, 1000])) == profile  # beyond its context
    assert measurer.find(replace(command, batch_sizes=[2, 8])) is None
    assert measurer.find(replace(command, precisions=["int8"])) is None


def test_a_quantised_checkpoint_is_measured_in_its_own_precision(tmp_path: Path, pool: PagePool) -> None:
    make_oracle("llama", num_hidden_layers=4, intermediate_size=192).save_pretrained(tmp_path / "full")
    quantised = Ready(tmp_path / "full", is_ordered=True).write(tmp_path / "quantised")
    measurer, command = measurer_of(pool, variants=[]), command_of(quantised, precisions=list(PRECISIONS))
    profile = measured(measurer, command)
    assert {one.configuration.precision for one in profile.latency} == {"int4"}
    assert {one.configuration.precision for one in profile.memory} == {"int4"}
    assert profile.loss == {"int4": 0.0}
    assert measurer.find(command) == profile


def test_of_a_model_larger_than_the_worker_fewer_layers_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor whose caches hold all of it is no reason to load it all."""
    monkeypatch.setattr("worker.profiler.measurer.cache_bytes", lambda device: 1 << 30)
    made = tmp_path / "deep"
    make_oracle("llama", num_hidden_layers=24).save_pretrained(made)
    small = PagePool(CpuBackend(4096), (made / "model.safetensors").stat().st_size // 3)
    command = command_of(made)
    profiler = measurer_of(small).prepare(command)
    assert 2 <= max(profiler.plan.turns.values()) < 24
    assert profiler.num_pages <= small.num_pages
    ranks = measured(measurer_of(small), command).ranks
    assert {(one.tp, one.precision) for one in ranks} == {
        (tp, precision) for tp in (2, 4, 8) for precision in ("full", "int4")
    }
    small.close()


def test_what_had_no_other_worker_is_measured_when_there_is_one(folder: Path, pool: PagePool) -> None:
    measurer, command = measurer_of(pool), command_of(folder)
    assert measured(measurer, command).links == []
    transport = Transport("127.0.0.1", 10.0)
    ProbeResponder(transport, torch.device("cpu"))
    peer = ProbePeer(worker="w1", link=transport.address, link_key=transport.key)
    found = measurer.find(replace(command, peer=replace(peer, shares_host=False)))
    assert found is not None
    assert {one.kind for one in found.links} == {"hop"}
    found = measurer.find(replace(command, peer=peer))
    assert found is not None
    assert {one.kind for one in found.links} == {"hop", "all_reduce"}
    transport.close()
    assert measurer.find(replace(command, peer=peer)) == found  # nobody is asked again
    path = profile_path(folder, "cpu", program_version())
    path.unlink()
    assert measured(measurer, replace(command, peer=peer)).links == []  # nobody is there by now


def test_what_a_precision_loses_is_read_each_time_from_its_profile(
    folder: Path, pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer, command = measurer_of(pool), command_of(folder)
    assert measured(measurer, command).loss == {}
    monkeypatch.setattr("worker.profiler.measurer.losses", lambda *_: {"int4": 0.02})
    found = measurer.find(command)
    assert found is not None
    assert found.loss == {"int4": 0.02}
    random = measurer_of(pool, load_format="dummy").find(command)
    assert random is not None
    assert random.loss == {}


def test_a_profile_of_another_program_or_a_damaged_one_is_measured_again(
    folder: Path, pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer, command = measurer_of(pool), command_of(folder)
    measured(measurer, command)
    path = profile_path(folder, "cpu", program_version())
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert measurer.find(command) is None
    path.write_bytes(content)
    monkeypatch.setattr("worker.profiler.measurer.program_version", lambda: "99")
    assert measurer.find(command) is None


def test_a_profile_with_another_kv_cache_is_measured_again(folder: Path, pool: PagePool) -> None:
    command = command_of(folder)
    full = measured(measurer_of(pool), command)
    in_8_bits = measurer_of(pool, kv_dtype="int8")
    assert in_8_bits.find(command) is None
    profile = measured(in_8_bits, command)
    assert profile.block_bytes_per_layer == full.block_bytes_per_layer * (8 + 2) // (8 * 4)  # heads of 8
    assert (full.kv_dtype, full.kv_gain) == ("full", 8 * 4 / (8 + 2))
    assert (profile.kv_dtype, profile.kv_gain) == ("int8", 1.0)
    assert in_8_bits.find(command) == profile


def test_a_profile_in_pages_of_another_size_is_measured_again(folder: Path, pool: PagePool) -> None:
    command = command_of(folder)
    assert measured(measurer_of(pool), command).page_bytes == pool.page_bytes
    larger = PagePool(CpuBackend(2 * pool.page_bytes), 1 << 20)
    assert measurer_of(larger).find(command) is None
    larger.close()


def test_a_checkpoint_that_changed_is_not_measured_and_not_kept(folder: Path, pool: PagePool) -> None:
    measurer, command = measurer_of(pool), command_of(folder)
    profiler = measurer.prepare(command)
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    with pytest.raises(
        CannotMeasure, match=r"is not the checkpoint that was registered .* register it again"
    ):
        measurer.find(command)
    with pytest.raises(CannotMeasure, match="it has changed"):
        measurer.keep(command, profiler)
    assert not profile_path(folder, "cpu", program_version()).exists()


def test_a_folder_that_cannot_be_written_to_still_gives_a_profile(folder: Path, pool: PagePool) -> None:
    (folder / "instar").write_text("no folder")
    profile = measured(measurer_of(pool), command_of(folder, precisions=["full"], prompt_tokens=[5]))
    assert profile.latency


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_tokens": []}, "nothing to measure"),
        ({"batch_sizes": [0]}, "at least one token and one request"),
        ({"prompt_tokens": [250, 256]}, "longer than the model's context of 256"),
        ({"path": "/nowhere"}, "no such model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    folder: Path, pool: PagePool, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotMeasure, match=reason):
        measurer_of(pool).prepare(command_of(folder, **changes))


def test_a_damaged_set_of_fewer_bits_is_named(folder: Path, pool: PagePool) -> None:
    (folder / "instar").mkdir()
    (folder / "instar" / "int4-rtn.safetensors").write_bytes(b"nothing")
    with pytest.raises(CannotMeasure, match=r"int4-rtn\.safetensors: damaged or truncated"):
        measurer_of(pool).prepare(command_of(folder))


def test_requests_are_answered_alike_while_a_model_is_measured(folder: Path, pool: PagePool) -> None:
    prompts = {str(i): list(range(3, 9 + i)) for i in range(4)}
    engine, instance = toy_engine()
    for name, prompt in prompts.items():
        engine.submit(instance.id, request(name, prompt, 20))
    expected = run(engine, Client()).tokens

    hand, engine_client = Hand(share=1.0), Client()
    profiler = measurer_of(pool).prepare(command_of(folder))
    hand.begin("a", profiler)
    for name, prompt in prompts.items():
        engine.submit(instance.id, request(name, prompt, 20))
    while engine.has_work:
        hand.measuring.advance(is_busy=True)
        engine_client.take(engine.step())
    assert engine_client.tokens == expected
    hand.measuring.cancel_all("enough")
    assert hand.ends() == {"a": "enough"}
