"""The reason of a deployment that waits: why each worker cannot take it, and what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bus.deployments import Answer, Deployment, DeployModel, Intent
from controller.deployments.planner import Question, Situation
from controller.planning.making_room import Retirement
from controller.planning.plan import Plan
from tests.support.deployment_world import World, instance, measured

HELD = instance("other", "w0")
GONE = Retirement(deployment="o2", freed={"w0": 8 << 20})


class Small(World):
    """Has no room for `large`, or none beside what is deployed for those in `later`."""

    large: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()

    def plan(self, question: Question) -> Plan:
        name, free = question.card.name, dict.fromkeys((one.card.id for one in question.devices), 1 << 20)
        stay = [
            card for one in question.devices for card in one.card.instances if card.id not in question.gone
        ]
        if name in self.large or (name in self.later and stay):
            return Plan(reason="needs 9.0 MiB", retirements=[GONE], free_bytes=free)
        return super().plan(question)


def small(*workers: str, large: str = "", later: str = "") -> tuple[Small, Answer]:
    """A world in which "a" serves on the first worker, and another model waits."""
    world = Small(*workers)
    for name in ("a", "b"):
        world.register(name)
    world.settle(6)
    world.deploy("a")
    world.settle(3)
    world.large, world.later = frozenset(large), frozenset(later)
    waits = world.deploy("b")
    return world, waits


def test_alike_workers_are_told_together_with_what_would_make_room() -> None:
    world, waits = small("w0", "w1", "w2", later="b")
    world.workers["w2"].tells = False
    (transition,) = world.turn()
    assert world.deployment(waits).state == "waiting"
    assert world.deployment(waits).reason == (
        "waits for room: needs 9.0 MiB; w0, w1: 1.0 MiB free; w2: does not report its memory. It stays "
        "queued. To make room: retire deployment o2 (8.0 MiB)"
    )
    assert transition.announced and transition.kind == "deployment_waiting"
    assert world.turn() == []


def test_it_is_told_again_when_it_waits_for_something_else() -> None:
    world, _ = small("w0", "w1", later="b")
    assert [one.announced for one in world.turn()] == [True]
    world.join("w2", state="loading")
    assert [one.announced for one in world.turn()] == [False]  # more of the same
    world.large = frozenset("b")
    assert [one.announced for one in world.turn()] == [True]


def test_what_is_too_large_for_empty_workers_says_so_and_what_to_do() -> None:
    world, waits = small("w0", "w1", large="b")
    world.turn()
    reason = world.deployment(waits).reason
    assert reason.startswith(
        "fits nowhere here: needs 9.0 MiB, even with nothing else deployed; w0, w1: 1.0 MiB"
    )
    assert "worker.memory_mb" in reason and "It stays queued" in reason
    world.large = frozenset()
    world.settle(3)
    assert world.deployment(waits).state == "serving"


def test_workers_that_cannot_take_it_each_say_why() -> None:
    world = measured("w0", "w1", "w2", "w3")
    first = world.deploy()
    world.settle(3)
    world.register("n")
    world.turn()
    world.register("k")
    world.workers["w2"].state, world.workers["w3"].state = "draining", "loading"
    world.settle(1)
    second = world.deploy("m")
    world.turn()
    assert world.deployment(first).instance == "m@w0"
    world.settle(3)
    third = world.deploy("m")
    world.turn()
    assert world.deployment(second).instance == "m@w1"
    assert world.deployment(third).reason.startswith(
        "waits for a worker: w0, w1: has m already; w2: drains; w3: is still starting. It stays queued"
    )


def test_without_any_worker_it_waits_for_one() -> None:
    world = measured("w0")
    waits = world.deploy()
    world.die("w0")
    world.turn()
    assert world.deployment(waits).reason == (
        "waits for a worker: no worker is there. It stays queued until one joins"
    )


@pytest.mark.parametrize(("kind", "moves"), [("large", True), ("later", False)])
def test_what_never_fits_does_not_keep_others_from_what_is_better(kind: str, moves: bool) -> None:
    world = Small("w0", "w1")
    for name in ("a", "b"):
        world.register(name)
    world.settle(6)
    world.intent = Intent(minimise="latency")
    world.deploy("a")
    world.settle(4)
    setattr(world, kind, frozenset("b"))
    world.order(DeployModel(id="waits", name="b", intent=Intent()))
    world.seconds, world.may_change = {"w1": 0.5}, True
    world.turn(world.picture.cooldown_ms)
    world.settle(5)
    assert world.shown() == (["a@w1"] if moves else ["a@w0"])
    assert world.contents.deployments["waits"].state == "waiting"


def test_a_question_is_the_same_until_workers_their_models_or_what_is_wanted_change() -> None:
    world = measured("w0", "w1")
    situation = Situation(world.contents, world.picture, world.plan)
    question = situation.question(Deployment(id="d", model="m", intent=Intent(), state="waiting"), [])
    assert question is not None
    devices = list(world.picture.workers.values())
    asked = replace(question, devices=devices)
    assert asked.key == replace(question, devices=list(devices)).key
    others = [
        replace(asked, devices=devices[:1]),
        replace(asked, devices=[replace(one, card=replace(one.card, epoch=9)) for one in devices]),
        replace(asked, devices=[replace(devices[0], card=replace(devices[0].card, instances=[HELD]))]),
        replace(asked, intent=Intent(tp=2)),
        replace(asked, gone=frozenset({"x@w0"})),
    ]
    assert len({one.key for one in (asked, *others)}) == 1 + len(others)
