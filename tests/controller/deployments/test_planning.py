"""Plans from cards and pages: the controller's own question, answered by the transitions of intents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.deployments import Configuration, Intent, ModelCard
from bus.messages import WorkerCard
from controller.deployments.free_memory import FreeMemory
from controller.deployments.observation import WorkerView
from controller.deployments.planner import Question, kept_by, planned
from controller.planning.making_room import Tenant
from controller.planning.placement import Placing
from controller.planning.plan import NOT_CUT
from tests.support.deployment_world import instance
from tests.support.known_truths import Truth, profile_of

TRUTH = Truth(layers=8)
HELD = instance("other", "w0")
LIMITED = Intent(max_latency_s=2 * TRUTH.latency(Configuration(), Intent()))
WHOLE = TRUTH.memory(profile_of(TRUTH).memory[0].configuration, Intent())


def question(*workers: str, kind: str = "cpu", intent: Intent | None = None) -> Question:
    cards = [
        WorkerCard(id=name, epoch=1, host="h", pid=1, device=kind, page_bytes=1 << 16, state="serving")
        for name in workers
    ]
    return Question(
        card=ModelCard(name="m", path="/m", digest="d", num_layers=8, state="profiled"),
        intent=intent or Intent(),
        profiles={"cpu": profile_of(TRUTH)},
        devices=[WorkerView(card=card) for card in cards],
    )


@pytest.mark.parametrize(
    ("placing", "worker"),
    [
        (Placing("least-loaded"), "w2"),
        (Placing("packing"), "w1"),
        (Placing("hybrid", 0.3), "w2"),
        (Placing("hybrid", 0.5), "w0"),
        (None, "w2"),
    ],
)
def test_the_worker_is_the_one_that_the_placement_chooses(placing: Placing | None, worker: str) -> None:
    room = FreeMemory(dict.fromkeys(("w0", "w1", "w2"), WHOLE), [])
    asked = question("w0", "w1", "w2")
    views = [replace(one, load=load) for one, load in zip(asked.devices, (0.4, 0.9, 0.1), strict=True)]
    found = planned(replace(asked, devices=views), room, placing)
    assert found.chosen is not None
    assert [stage.workers for stage in found.stages] == [[worker]]
    assert found.blocks == 20


def test_a_worker_that_told_nothing_of_its_pages_gets_no_model() -> None:
    found = planned(question("w0"), FreeMemory({}, []))
    assert found.chosen is None and not found.is_unmet
    assert ", 0 bytes are free on w0, which hold 0 layers" in found.reason


def test_an_intent_that_nothing_meets_is_refused_for_good() -> None:
    impossible = question("w0", intent=Intent(max_latency_s=1e-6))
    found = planned(impossible, FreeMemory({"w0": WHOLE}, []))
    assert found.chosen is None and found.is_unmet


def test_a_kind_of_device_that_was_not_measured_gets_no_plan() -> None:
    there = question("w0", kind="cuda:0")
    found = planned(there, FreeMemory({"w0": WHOLE}, []))
    assert (found.chosen, found.estimates) == (None, [])
    assert found.reason == "no worker of a kind that was measured takes orders"


def test_only_precisions_that_every_worker_keeps_are_planned() -> None:
    both = (Configuration(), Configuration(precision="int4"))
    measured = profile_of(TRUTH, configurations=both)
    every, few = question("w0").devices[0], question("w1").devices[0]
    assert kept_by(measured, [every]) == measured
    few = replace(few, card=replace(few.card, variants=["full", "int8"]))
    kept = kept_by(measured, [every, few])
    assert {one.configuration.precision for one in kept.latency} == {"full"}
    assert {one.configuration.precision for one in kept.memory} == {"full"}


def test_a_quantised_checkpoint_needs_no_worker_that_keeps_its_precision() -> None:
    measured = profile_of(TRUTH, configurations=(Configuration(precision="int4"),))
    one = question("w0").devices[0]
    assert kept_by(measured, [replace(one, card=replace(one.card, variants=["full"]))]) == measured


@pytest.mark.parametrize(
    ("fixed", "workers"),
    [
        ({"pp": 3}, [["w0"], ["w1"], ["w2"]]),
        ({"tp": 2, "pp": 1}, [["w0", "w1"]]),
        ({"tp": 2, "pp": 2, "precision": "full"}, [["w0", "w1"], ["w2", "w3"]]),
        ({"tp": 1, "pp": 1, "precision": "full"}, [["w0"]]),
    ],
)
def test_what_the_intent_fixes_is_placed_whatever_else_is_cheaper(
    fixed: dict[str, Any], workers: list[list[str]]
) -> None:
    names = ("w0", "w1", "w2", "w3")
    asked = question(*names, intent=Intent(**fixed))
    room = FreeMemory(dict.fromkeys(names, 2 * WHOLE), [])
    found = planned(asked, room)
    assert found.chosen is not None
    chosen = found.chosen.configuration
    assert all(getattr(chosen, name) == value for name, value in fixed.items())
    assert [stage.workers for stage in found.stages] == workers


def test_a_fixed_number_of_stages_waits_for_workers_that_are_yet_to_come() -> None:
    asked = question("w0", "w1", intent=Intent(pp=3))
    found = planned(asked, FreeMemory(dict.fromkeys(("w0", "w1"), WHOLE), []))
    assert found.chosen is None and not found.is_unmet
    assert "needs 3 devices, there are 2" in found.reason


def able(asked: Question, *degrees: int) -> Question:
    """Return a profile of weights that can be cut to these."""
    profiles = {kind: replace(one, degrees=list(degrees)) for kind, one in asked.profiles.items()}
    return replace(asked, profiles=profiles)


def test_a_group_is_made_of_empty_workers_where_it_was_measured_to_be_faster() -> None:
    room = FreeMemory(dict.fromkeys(("w0", "w1", "w2"), 2 * WHOLE), [])
    measured = profile_of(TRUTH, configurations=(Configuration(), Configuration(tp=2)))
    asked = question("w0", "w1", "w2", intent=Intent(minimise="latency"))
    fast = able(replace(asked, profiles={"cpu": measured}), 1, 2, 4)
    found = planned(fast, room)
    assert found is not None and found.chosen is not None
    assert (found.chosen.configuration, found.stages[0].workers) == (Configuration(tp=2), ["w0", "w1"])
    refused = {one.configuration.tp: one.refusal for one in found.estimates if one.configuration.pp == 1}
    assert refused == {
        1: "",
        2: "",
        4: "needs 1 group of 4 devices of one host that have no other model; 0 can be formed",
        8: NOT_CUT,
    }
    both = {one.refusal for one in found.estimates if min(one.configuration.tp, one.configuration.pp) > 1}
    assert "needs 2 groups of 2 devices of one host that have no other model; 1 can be formed" in both
    held = [replace(one, card=replace(one.card, instances=[HELD])) for one in fast.devices[:2]]
    busy = replace(fast, devices=[*held, fast.devices[2]])
    answer = planned(busy, room)
    assert answer.chosen is not None and answer.chosen.configuration.tp == 1


@pytest.mark.parametrize(
    "asked",
    [
        able(question("w0", "w1"), 1, 2),
        able(question("w0", "w1", intent=Intent(minimise="latency")), 1, 2),  # that is only assumed
        question("w0", "w1", intent=Intent(minimise="latency")),  # measured before degrees were told
        replace(able(question("w0", "w1", intent=LIMITED), 1, 2), may_group=False),
    ],
)
def test_otherwise_it_is_served_by_one_worker(asked: Question) -> None:
    room = FreeMemory(dict.fromkeys(("w0", "w1"), 2 * WHOLE), [])
    found = planned(asked, room)
    assert found is not None and found.chosen is not None
    assert found.chosen.configuration.tp == 1
    assert {one.configuration.tp for one in found.estimates} == {1, 2, 4, 8}  # the map tells of all
    assert all(one.refusal for one in found.estimates if one.configuration.tp >= 4)


def test_memory_of_what_goes_counts_as_free_and_its_worker_as_empty() -> None:
    asked = able(question("w0", "w1", intent=Intent(tp=2)), 1, 2)
    held = [replace(one, card=replace(one.card, instances=[HELD])) for one in asked.devices[:1]]
    asked = replace(asked, devices=[*held, asked.devices[1]])
    tenant = Tenant(instance="other@w0", workers=("w0",), weight_bytes=2 * WHOLE, kv_bytes=0)
    room = FreeMemory({"w0": 0, "w1": 2 * WHOLE}, [tenant])
    assert planned(asked, room).chosen is None
    going = replace(asked, gone=frozenset({"other@w0"}))
    assert planned(going, room).chosen is not None


def test_a_plan_estimates_what_serves_already_too() -> None:
    found = planned(question("w0"), FreeMemory({"w0": WHOLE}, []))
    rows = {one.configuration: one for one in found.estimates}
    assert found.chosen is not None and rows[Configuration()] == found.chosen
    assert Configuration(tp=64) not in rows


def test_a_group_that_nobody_measured_is_taken_where_only_it_may_meet_a_limit() -> None:
    limit_s = 0.9 * TRUTH.latency(Configuration(), Intent())
    room = FreeMemory(dict.fromkeys(("w0", "w1"), 2 * WHOLE), [])
    asked = able(question("w0", "w1", intent=Intent(max_latency_s=limit_s)), 1, 2)
    found = planned(asked, room)
    assert found.chosen is not None and found.chosen.configuration.tp == 2
    assert found.chosen.latency_s.basis == "assumed"
