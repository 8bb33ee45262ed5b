"""How a registered model gets its profiles."""

from __future__ import annotations

from bus.deployments import Measure, RemoveModel
from bus.morphs import CancelMorph
from controller.deployments.profiling import SILENT_MS
from controller.deployments.transitions import MAX_ATTEMPTS, measure_id
from tests.support.deployment_world import World, measured, profile


def test_a_registered_model_is_measured_once_on_the_least_busy_worker() -> None:
    world = World("w0", "w1")
    world.register()
    (transition,) = world.turn()
    assert transition.kind == "model_profiling"
    ((worker, command),) = world.commands(Measure)
    assert (worker, command.model, command.digest) == ("w0", "m", "d")
    world.settle(5)
    assert world.model().state == "profiled"
    assert len(world.ordered) == 1


def test_a_checkpoint_that_was_measured_before_is_not_measured_again() -> None:
    world = World("w0")
    world.contents = world.contents.with_record(profile())
    world.register()
    world.settle(3)
    assert world.model().state == "profiled"
    assert world.ordered == []


def test_what_was_measured_of_another_checkpoint_does_not_count() -> None:
    world = World("w0")
    world.contents = world.contents.with_record(profile(digest="old"))
    world.register()
    world.turn()
    assert world.model().state == "profiling"


def test_a_new_kind_of_device_is_measured_too() -> None:
    world = measured("w0")
    world.join("g0", device="cuda:0", kind="H100")
    world.turn()
    assert (world.model().state, world.model().worker) == ("profiling", "g0")
    world.settle(3)
    assert (world.model().state, world.model().reason) == ("profiled", "measured on H100, cpu")


def test_two_kinds_of_gpus_are_measured_once_each_and_alike_ones_not_again() -> None:
    world = World()
    world.join("g0", device="cuda:0", kind="H100"), world.join("g1", device="cuda:1", kind="L4")
    world.join("g2", device="cuda:2", kind="L4")
    world.register()
    world.settle(6)
    assert {device for _, device in world.contents.profiles} == {"H100", "L4"}
    assert len(world.commands(Measure)) == 2


def test_a_worker_that_dies_while_it_measures_is_replaced_by_another() -> None:
    world = World("w0", "w1")
    world.register()
    world.turn()
    world.die("w0")
    world.turn()
    assert (world.model().state, world.model().reason) == (
        "registered",
        "w0 died while it measured; it is measured again",
    )
    world.turn()
    assert world.model().worker == "w1"
    world.settle(3)
    assert world.model().state == "profiled"


def test_a_model_that_cannot_be_measured_fails_after_so_many_attempts() -> None:
    world = World("w0")
    world.register()
    for _ in range(2 * MAX_ATTEMPTS + 2):
        world.turn()
        world.work("w0", refuses=True)
    assert world.model().state == "failed"
    assert world.model().reason == f"given up after {MAX_ATTEMPTS} attempts: w0: the test says no"
    assert len(world.commands(Measure)) == MAX_ATTEMPTS
    assert world.deploy().status == 409


def test_two_models_are_not_measured_on_one_worker_at_a_time() -> None:
    world = World("w0")
    world.register("a")
    world.register("b")
    world.turn()
    world.turn()
    assert len(world.commands(Measure)) == 1
    world.settle(6)
    assert {card.state for card in world.contents.models.values()} == {"profiled"}


def test_a_profile_may_take_long_as_long_as_it_is_heard_of() -> None:
    world = World("w0")
    world.register()
    world.turn()
    for _ in range(4):
        world.heard[measure_id(world.model())] = world.now_ms
        world.turn(SILENT_MS - 1_000)
    assert (world.model().state, world.model().attempts) == ("profiling", 1)


def test_a_profile_that_nothing_is_heard_of_is_cancelled_before_the_next_try() -> None:
    world = World("w0")
    world.register()
    world.turn()
    first = measure_id(world.model())
    world.turn(SILENT_MS + 1_000)
    assert world.model().reason == (
        "w0 has reported nothing on its measurement for 15 minutes; it is measured again"
    )
    world.turn()
    kinds = [type(command) for _, command in world.ordered]
    assert kinds == [Measure, CancelMorph, Measure]
    assert [one.morph_id for _, one in world.commands(CancelMorph)] == [first]


def test_a_model_that_is_removed_is_not_measured_on_and_leaves_no_profile() -> None:
    world = World("w0")
    world.register()
    world.turn()
    name = measure_id(world.model())
    assert world.order(RemoveModel(id="x", name="m")).status == 200
    ((worker, cancel),) = world.commands(CancelMorph)
    assert (worker, cancel.morph_id, cancel.epoch) == ("w0", name, world.workers["w0"].epoch)
    world.work("w0")  # it had measured all of it when it was told
    assert world.contents.profiles
    world.turn()
    assert (world.contents.models, world.contents.profiles) == ({}, {})
