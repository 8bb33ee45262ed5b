"""The view of memory: what each holds on a worker, with stages that no card shows, and what is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Intent, RankSize
from bus.messages import InstanceCard, Metrics, PageCounts, Stage, WorkerCard
from controller.deployments.free_memory import FreeMemory, free_memory
from controller.deployments.observation import WorkerView
from controller.deployments.planner import Question, planned
from tests.controller.deployments.test_planning import question
from tests.support import metrics_samples
from tests.support.deployment_world import instance, profile
from tests.support.known_truths import Truth, profile_of

PAGE = 1024  # as large as a block of a layer in `deployment_world.profile`
LINE = Deployment(
    id="d1",
    model="m",
    intent=Intent(),
    state="serving",
    configuration=Configuration(pp=2),
    stages=[Stage(workers=["w0"], first=0, end=1), Stage(workers=["w1"], first=1, end=4)],
    epochs={"w0": 1, "w1": 1},
)


def device(name: str, *cards: InstanceCard, kv: int = 60, free: int = 10, weights: int = 30) -> WorkerView:
    pages = PageCounts(budget=kv + free + weights, weights=weights, kv=kv, free=free)
    card = WorkerCard(
        id=name,
        epoch=1,
        host="h",
        pid=1,
        device="cpu",
        page_bytes=PAGE,
        state="serving",
        instances=list(cards),
    )
    return WorkerView(card=card, pages=pages)


def seen(*instances: tuple[str, int, int]) -> Metrics:
    """Id, KV blocks, and how many of them are used."""
    told = [
        metrics_samples.metrics_of(name, kv_blocks=blocks, kv_used=used) for name, blocks, used in instances
    ]
    return replace(told[0], instances=[one for each in told for one in each.instances])


def room(devices: list[WorkerView], metrics: Metrics, *deployments: Deployment) -> FreeMemory:
    contents = Contents({}, {one.id: one for one in deployments}, {("m", "cpu"): profile()})
    return free_memory(metrics, devices, contents)


def test_idle_kv_counts_as_free_and_what_is_used_belongs_to_its_instance() -> None:
    found = room([device("w0", instance("m", "w0", deployed="d1-1-w0"))], seen(("m@w0", 20, 5)))
    assert found.free_bytes == {"w0": (10 + 45) * PAGE}
    (tenant,) = found.tenants
    assert (tenant.deployment, tenant.weight_bytes, tenant.kv_bytes) == ("d1", 30 * PAGE, 15 * PAGE)


def test_each_of_several_deployments_of_a_worker_owns_what_it_loaded() -> None:
    cards = [instance("a", "w0", deployed="d1-1-w0"), instance("b", "w0", deployed="d2.5f-1-w0")]
    found = room([device("w0", *cards, instance("c", "w0"))], seen(("a@w0", 10, 10), ("b@w0", 10, 10)))
    assert {one.instance: one.deployment for one in found.tenants} == {
        "a@w0": "d1",
        "b@w0": "d2.5f",
        "c@w0": "",
    }


def test_a_later_stage_that_no_card_shows_holds_its_weights_and_its_kv() -> None:
    """A stage has as many blocks as its leader: 10 blocks are 30 pages in three layers."""
    leader = instance("m", "w0", deployed="d1-1-w0", stages=LINE.stages, pp=2)
    devices = [device("w0", leader), device("w1", instance("other", "w1"))]
    found = room(devices, seen(("m@w0", 10, 0), ("other@w1", 15, 5)), LINE)
    assert found.held == {"w0": frozenset({"m@w0"}), "w1": frozenset({"other@w1", "m@w1"})}
    assert found.free_bytes["w1"] == (10 + 20) * PAGE
    later = next(one for one in found.tenants if one.instance == "m@w1")
    assert (later.deployment, later.weight_bytes, later.kv_bytes) == ("d1", 15 * PAGE, 30 * PAGE)


def test_a_later_stage_whose_kv_is_in_8_bits_holds_so_much_less() -> None:
    leader = instance("m", "w0", deployed="d1-1-w0", stages=LINE.stages, pp=2)
    told = seen(("m@w0", 10, 0))
    (one,) = told.instances
    told = replace(told, instances=[replace(one, last=replace(one.last, kv_precision="int8"))])
    contents = Contents({}, {"d1": LINE}, {("m", "cpu"): replace(profile(), kv_gain=2.0)})
    found = free_memory(told, [device("w0", leader), device("w1")], contents)
    later = next(one for one in found.tenants if one.instance == "m@w1")
    assert later.kv_bytes == 15 * PAGE


def test_a_worker_with_a_later_stage_is_no_empty_one() -> None:
    truth = Truth(layers=8)
    asked = question("w0", "w1", intent=Intent(tp=2, pp=1))
    asked = replace(asked, profiles={"cpu": replace(profile_of(truth), degrees=[1, 2])})
    free = dict.fromkeys(("w0", "w1"), 4 * truth.memory(Configuration(), Intent()))
    assert _is_placed(asked, FreeMemory(free, []))
    stage = FreeMemory(free, [], {"w1": frozenset({"m2@w1"})})
    assert not _is_placed(asked, stage)
    assert _is_placed(replace(asked, gone=frozenset({"m2@w1"})), stage)


def test_ranks_that_would_have_to_go_are_named() -> None:
    pair = replace(
        LINE,
        configuration=Configuration(tp=2),
        stages=[Stage(workers=["w0", "w1"], first=0, end=4)],
        is_fixed=True,
    )
    leader = instance("m", "w0", deployed="d1-1-w0", tp=2, stages=pair.stages)
    devices = [device("w0", leader, free=4000), device("w1", free=4000)]
    memory = room(devices, seen(("m@w0", 10, 0)), pair)
    truth = Truth(layers=1, layer_bytes=1 << 10, embedding_bytes=1 << 10)
    size = RankSize(
        tp=2, precision="full", layer_bytes=1 << 10, lead_bytes=1 << 10, block_bytes_per_layer=1 << 10
    )
    profiles = {"cpu": replace(profile_of(truth), degrees=[1], ranks=[size])}
    asked = Question(card=question("w0").card, intent=Intent(tp=2, pp=1), profiles=profiles, devices=devices)
    found = planned(asked, memory)
    assert found.chosen is None and "in no other group" in found.reason
    assert [one.deployment for one in found.retirements] == ["d1"]
    assert _is_placed(replace(asked, gone=frozenset({"m@w0", "m@w1"})), memory)


def _is_placed(asked: Question, found: FreeMemory) -> bool:
    return planned(asked, found).chosen is not None


@pytest.mark.parametrize("shape", [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}])
def test_devices_of_two_kinds_are_never_in_one_configuration(shape: dict[str, int]) -> None:
    truth = Truth(layers=8)
    asked = question("w0", "w1", "w2", intent=Intent(**shape))  # type: ignore[arg-type]
    kinds = ("H100", "L4", "H100")
    devices = [
        replace(one, card=replace(one.card, device="cuda:0", device_kind=kind))
        for one, kind in zip(asked.devices, kinds, strict=True)
    ]
    measured = {kind: replace(profile_of(truth), device=kind, degrees=[1, 2]) for kind in set(kinds)}
    asked = replace(asked, devices=devices, profiles=measured)
    free = dict.fromkeys(("w0", "w1", "w2"), 4 * truth.memory(Configuration(), Intent()))
    plan = planned(asked, FreeMemory(free, []))
    assert plan.chosen is not None
    assert [worker for stage in plan.stages for worker in stage.workers] == ["w0", "w2"]
    assert not _is_placed(replace(asked, devices=devices[:2]), FreeMemory(free, []))
