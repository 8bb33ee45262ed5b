"""Copies of a deployment: where one can go, and when it must make room."""

from __future__ import annotations

from bus.deployments import Deployment, DeployModel
from controller.deployments.copying import LONGEST_WAIT_MS, copies_of
from controller.morphing.copies import Copies
from tests.support.deployment_world import World, measured


def copied(world: World) -> Copies:
    return copies_of(world.contents, world.picture)["m"]


def copy(world: World) -> Deployment:
    """The deployment of a copy, as the planner orders it."""
    there = copied(world)
    answer = world.order(
        DeployModel(id=world.next_id(), name="m", intent=there.intent, copies=there.original)
    )
    return world.deployment(answer)


def serving(*workers: str) -> World:
    world = measured(*workers)
    world.deploy()
    world.settle(3)
    return world


def test_a_deployment_can_be_copied_in_its_shape_where_nothing_runs() -> None:
    world = serving("w0", "w1", "w2")
    there = copied(world)
    (original,) = world.contents.deployments
    assert (there.original, there.spares, there.refusal) == (original, ("w1", "w2"), "")
    assert (there.intent.tp, there.intent.pp, there.intent.precision) == (1, 1, "full")
    assert copied(serving("w0")).refusal == "no worker is free"
    assert copies_of(measured("w0").contents, world.picture) == {}


def test_a_copy_serves_on_a_free_worker_and_not_beside_another_model() -> None:
    world = serving("w0", "w1", "w2")
    world.register("n")
    world.settle(3)
    world.seconds = {"w1": 0.1}
    world.deploy("n")
    world.settle(3)
    assert world.shown() == ["m@w0", "n@w1"]
    made = copy(world)
    assert copied(world).refusal == f"{made.id} is on its way"
    world.settle(3)
    assert world.shown() == ["m@w0", "m@w2", "n@w1"]
    assert copied(world).made == {"m@w2": made.id} and copied(world).unwanted == {}
    world.may_change = True
    world.seconds = {"w2": 9.0}
    world.settle(3)
    assert world.contents.deployments[made.id].state == "serving"  # it is not improved


def test_a_copy_goes_when_its_original_does() -> None:
    world = serving("w0", "w1")
    made = copy(world)
    world.settle(3)
    original = copied(world).original or next(iter(world.contents.deployments))
    world.retire(original)
    assert copied(world).unwanted == {made.id: f"{original} is deployed no more"}
    world.retire(made.id)
    world.settle(3)
    assert world.shown() == []


def test_a_copy_makes_room_for_what_waits() -> None:
    world = serving("w0", "w1")
    made = copy(world)
    world.settle(3)
    world.register("n")
    world.settle(3)
    world.lonely = {"n"}
    waiting = world.deployment(world.deploy("n"))
    world.settle(2)
    assert copied(world).unwanted == {made.id: f"{waiting.id} waits for a place"}
    assert copied(world).refusal == f"{waiting.id} waits for a place"  # else the next copy is made at once
    world.retire(made.id)
    world.settle(3)
    assert world.shown() == ["m@w0", "n@w1"]


def test_a_copy_that_finds_no_place_is_given_up() -> None:
    world = serving("w0", "w1")
    made = copy(world)
    world.die("w1")
    world.turn(1000)
    assert copied(world).unwanted == {}
    world.now_ms += LONGEST_WAIT_MS
    assert copied(world).unwanted == {made.id: "it finds no place"}


def test_a_deployment_of_several_workers_is_not_copied() -> None:
    world = measured("w0", "w1", "w2", tp=2)
    world.deploy()
    world.settle(6)
    (record,) = world.contents.deployments.values()
    assert record.state == "serving"
    assert copied(world).refusal == f"{record.id} has several workers"
