"""From what is wished for and what is seen to what is done: each way a model and a deployment can go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bus.deployments import Deploy, DeployModel, Intent, Measure, RemoveModel, Retire, RetireModel
from bus.messages import CancelMorph, Transform
from controller.deployments.decisions import MAX_ATTEMPTS
from controller.deployments.loading import LOAD_LIMIT_MS, STABLE_MS, Refused
from controller.deployments.picture import UNHEARD_MS
from tests.deployment_world import World, instance, profile


def measured(*workers: str, tp: int = 1, pp: int = 1) -> World:
    """A world in which "m" is profiled."""
    world = World(*workers, tp=tp, pp=pp)
    world.register()
    world.settle(3)
    assert world.model().state == "profiled"
    return world


# --------------------------------------------------------------------------- models


def test_a_registered_model_is_measured_once_on_the_least_busy_worker() -> None:
    world = World("w0", "w1")
    world.register()
    (decision,) = world.turn()
    assert decision.kind == "model_profiling"
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
    world.join("g0", device="cuda:0")
    world.turn()
    assert (world.model().state, world.model().worker) == ("profiling", "g0")
    world.settle(3)
    assert (world.model().state, world.model().reason) == ("profiled", "measured on cpu, cuda")


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


# --------------------------------------------------------------------------- loading


def test_a_deployment_waits_for_its_profile_then_loads_then_serves() -> None:
    world = World("w0", "w1")
    world.register()
    answer = world.deploy()
    assert answer.status == 202
    world.turn()
    assert world.deployment(answer).reason == "m is profiling: on w0"
    world.settle(3)
    found = world.deployment(answer)
    assert (found.state, found.instance, found.attempts) == ("serving", "m@w0", 1)
    ((worker, command),) = world.commands(Deploy)
    assert (worker, command.instance, command.blocks, command.digest) == ("w0", "m@w0", 8, "d")
    assert command.stages == found.stages
    assert found.expected is not None and found.configuration == found.expected.configuration


def test_a_group_loads_whole_models_and_then_becomes_one() -> None:
    world = measured("w0", "w1", tp=2)
    answer = world.deploy()
    world.turn()
    assert [(name, one.stages[0].workers) for name, one in world.commands(Deploy)] == [
        ("w0", ["w0"]),
        ("w1", ["w1"]),
    ]
    world.work("w0")
    world.turn()
    assert world.commands(Transform) == []
    world.work("w1")
    world.turn()
    world.turn()
    ((leader, order),) = world.commands(Transform)
    assert (leader, order.workers, order.tp, order.epochs) == ("w0", ["w0", "w1"], 2, {"w0": 1, "w1": 2})
    assert world.deployment(answer).state == "loading"
    world.settle(2)
    assert world.deployment(answer).state == "serving"


def test_a_group_whose_members_are_alone_again_is_made_anew() -> None:
    world = measured("w0", "w1", tp=2)
    answer = world.deploy()
    world.settle(6)
    assert world.deployment(answer).state == "serving"
    for worker in world.workers.values():
        worker.instances = [replace(one, tp=1, workers=[worker.id]) for one in worker.instances]
    world.turn()
    assert len(world.commands(Transform)) == 1  # an operator morphs by hand
    world.may_change = True
    world.turn()
    first, again = (one for _, one in world.commands(Transform))
    assert (again.workers, again.tp, again.epochs) == (first.workers, 2, first.epochs)
    assert again.id != first.id
    world.turn()
    assert len(world.commands(Transform)) == 2  # on its way
    world.settle(2)
    assert [card.tp for worker in world.workers.values() for card in worker.instances] == [2, 2]
    assert world.deployment(answer).state == "serving"


def test_a_group_that_cannot_be_made_leaves_nothing_behind_and_it_is_served_without() -> None:
    world = measured("w0", "w1", tp=2)
    answer = world.deploy()
    world.turn()
    world.work("w0"), world.work("w1")
    world.turn()
    world.work("w0", refuses=True)
    world.turn()
    assert world.deployment(answer).state == "waiting"
    assert "no group of w0, w1: failed" in world.deployment(answer).reason
    world.settle(10)
    found = world.deployment(answer)
    assert (found.state, found.attempts, found.instance) == ("serving", 2, "m@w0")
    assert world.shown() == ["m@w0"]


def test_workers_that_form_no_group_of_it_serve_it_without() -> None:
    world = measured("w0", "w1", tp=2)
    answer = world.deploy()
    world.turn()
    world.workers["w0"].instances.append(instance("m", "w0", deployed="x", degrees=[1]))
    world.workers["w1"].instances.append(instance("m", "w1", deployed="x", degrees=[1]))
    world.turn()
    reason = world.deployment(answer).reason
    assert reason == "w0 forms no group of degree 2; m can be at 1; it is tried again"
    assert world.commands(Transform) == []


def test_the_stages_of_a_pipeline_are_told_of_each_other() -> None:
    world = measured("w0", "w1", pp=2)
    answer = world.deploy()
    world.settle(2)
    commands = world.commands(Deploy)
    assert [(name, one.stage, one.instance) for name, one in commands] == [
        ("w0", 0, "m@w0"),
        ("w1", 1, "m@w1"),
    ]
    assert all(one.epochs == {"w0": 1, "w1": 2} and len(one.stages) == 2 for _, one in commands)
    assert world.deployment(answer).instance == "m@w0"


def test_a_worker_that_refuses_is_one_attempt_and_others_are_undone() -> None:
    world = measured("w0", "w1", pp=2)
    answer = world.deploy()
    world.turn()
    world.work("w0")
    world.work("w1", refuses=True)
    world.turn()
    found = world.deployment(answer)
    assert (found.state, found.reason) == ("waiting", "w1: failed: the test says failed; it is tried again")
    assert found.stages != []  # not clear yet
    world.turn()
    assert [name for name, _ in world.commands(Retire)] == ["w0"]
    world.settle(6)
    assert (world.deployment(answer).state, world.deployment(answer).attempts) == ("serving", 2)


def test_a_deployment_fails_after_so_many_attempts_and_leaves_nothing() -> None:
    world = measured("w0", "w1", pp=2)
    answer = world.deploy()
    for _ in range(40):
        world.turn(5_000)
        while world.work("w0"):
            pass
        world.work("w1", refuses=True)
    found = world.deployment(answer)
    assert found.state == "failed"
    assert found.reason.startswith(f"given up after {MAX_ATTEMPTS} attempts: w1: failed")
    assert len(world.commands(Deploy)) == 2 * MAX_ATTEMPTS
    assert (found.stages, world.shown()) == ([], [])


def test_a_worker_that_dies_while_it_loads_is_replaced() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    world.turn()
    world.die("w0")
    world.turn()
    assert world.deployment(answer).reason == "w0 died while it loaded m; it is tried again"
    world.settle(5)
    assert world.deployment(answer).instance == "m@w1"


def test_a_worker_that_starts_anew_while_it_loads_lost_the_order() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.turn()
    world.join("w0")
    world.turn()
    assert world.deployment(answer).reason == "w0 started anew while it loaded m; it is tried again"
    world.settle(5)
    assert world.deployment(answer).state == "serving"


def test_an_order_that_nobody_takes_is_cancelled_and_given_again() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.turn()
    world.workers["w0"].inbox.clear()
    world.turn(UNHEARD_MS + 1)
    assert world.deployment(answer).reason == "w0 did not take the order to load m; it is tried again"
    world.settle(10)
    assert world.deployment(answer).state == "serving"


def test_what_loads_late_is_cancelled_before_the_next_attempt() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.turn()
    ((_, command),) = world.commands(Deploy)
    world.reports[command.id] = world.report(command, "running", "deploy", world.workers["w0"])
    world.turn(LOAD_LIMIT_MS + 1)
    assert world.deployment(answer).reason == "not loaded within 15 minutes; it is tried again"
    world.turn()
    ((_, cancel),) = world.commands(CancelMorph)
    assert cancel.morph_id == command.id
    assert len(world.commands(Deploy)) == 1


def test_progress_is_told_while_a_worker_loads() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.turn()
    ((_, command),) = world.commands(Deploy)
    report = world.report(command, "running", "deploy", world.workers["w0"])
    world.reports[command.id] = replace(report, reason="layer 2 of 4")
    world.turn()
    assert world.deployment(answer).reason == "w0: layer 2 of 4"
    assert world.turn() == []  # no news


def test_what_does_not_fit_waits_with_what_would_make_room_and_loads_when_there_is() -> None:
    world = measured("w0")
    world.refusal = Refused(reason="needs 5 bytes; to make room: retire deployment a1")
    answer = world.deploy()
    world.turn()
    found = world.deployment(answer)
    assert (found.state, found.reason) == ("waiting", world.refusal.reason)
    assert world.turn() == []
    world.refusal = None
    world.settle(2)
    assert world.deployment(answer).state == "serving"


def test_what_can_never_be_fails_with_the_reason() -> None:
    world = measured("w0")
    world.refusal = Refused(reason="the best there is takes 2 s", is_final=True)
    answer = world.deploy()
    world.turn()
    assert (world.deployment(answer).state, world.deployment(answer).reason) == (
        "failed",
        "the best there is takes 2 s",
    )


def test_a_worker_takes_one_model_at_a_time_and_none_twice() -> None:
    world = measured("w0")
    first, second = world.deploy(), world.deploy()
    world.settle(6)
    assert sorted(world.deployment(one).state for one in (first, second)) == ["serving", "waiting"]
    world.join("w1")
    world.settle(6)
    assert world.shown() == ["m@w0", "m@w1"]


def test_nothing_is_placed_on_workers_that_do_not_tell_their_memory() -> None:
    world = measured("w0")
    world.workers["w0"].tells = False
    answer = world.deploy()
    world.turn()
    assert "does not tell its memory" in world.deployment(answer).reason


# --------------------------------------------------------------------------- serving and retiring


def test_a_death_later_places_the_deployment_again() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    world.settle(3)
    world.die("w0")
    world.turn()
    assert (world.deployment(answer).state, world.deployment(answer).reason) == (
        "waiting",
        "w0 died; it is tried again",
    )
    world.settle(5)
    assert world.deployment(answer).instance == "m@w1"


def test_what_served_for_long_begins_to_count_attempts_anew() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    world.settle(3)
    for _ in range(MAX_ATTEMPTS + 1):
        world.turn(STABLE_MS + 1)
        world.join("w0"), world.join("w1")
        world.settle(4)
        assert (world.deployment(answer).state, world.deployment(answer).attempts) == ("serving", 1)


def test_a_model_that_kills_its_workers_at_once_is_given_up() -> None:
    world = measured("w0")
    answer = world.deploy()
    for _ in range(10):
        world.settle(3, after_ms=4_000)
        world.join("w0")
    assert world.deployment(answer).state == "failed"
    assert len(world.commands(Deploy)) == MAX_ATTEMPTS


def test_a_worker_that_drains_hands_over() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    world.settle(3)
    world.workers["w0"].state = "draining"
    world.settle(5)
    assert world.deployment(answer).instance == "m@w1"
    assert world.commands(Retire) == []


def test_nobody_counts_as_dead_while_redis_was_away() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    world.settle(3)
    lost = world.workers.pop("w0")
    world.is_settled = False
    assert world.turn() == []
    world.workers["w0"] = lost
    world.is_settled = True
    assert world.turn() == []
    assert world.deployment(answer).instance == "m@w0"


def test_a_retired_deployment_gives_its_worker_back() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.settle(3)
    assert world.retire(world.deployment(answer).id).status == 202
    world.turn()
    ((worker, command),) = world.commands(Retire)
    assert (worker, command.instance, command.epoch) == ("w0", "m@w0", 1)
    assert world.turn() == []
    world.settle(2)
    assert (world.deployment(answer).state, world.shown()) == ("retired", [])
    assert world.retire(world.deployment(answer).id).status == 200


def test_a_retirement_that_fails_is_ordered_again_after_a_pause() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.settle(3)
    world.retire(world.deployment(answer).id)
    world.turn()
    world.work("w0", refuses=True)
    assert world.turn() == []
    world.settle(3)
    assert world.deployment(answer).state == "retired"
    assert len(world.commands(Retire)) == 2


def test_it_is_retired_when_every_page_is_given_back() -> None:
    """Not when the card shows it no more, which is earlier."""
    world = measured("w0")
    answer = world.deploy()
    world.settle(3)
    world.retire(world.deployment(answer).id)
    world.turn()
    ((_, command),) = world.commands(Retire)
    world.workers["w0"].instances.clear()
    world.reports[command.id] = world.report(command, "running", "retire", world.workers["w0"])
    world.turn()
    assert world.deployment(answer).state == "retiring"
    world.reports[command.id] = world.report(command, "applied", "retire", world.workers["w0"])
    world.turn()
    assert world.deployment(answer).state == "retired"


def test_a_group_parts_before_its_members_retire() -> None:
    world = measured("w0", "w1", tp=2)
    answer = world.deploy()
    world.settle(4)
    world.retire(world.deployment(answer).id)
    world.turn()
    assert [one.tp for _, one in world.commands(Transform)] == [2, 1]
    assert world.commands(Retire) == []
    world.settle(4)
    assert (world.deployment(answer).state, world.shown()) == ("retired", [])


def test_a_deployment_can_be_retired_while_it_loads() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.turn()
    world.retire(world.deployment(answer).id)
    world.settle(6)
    assert (world.deployment(answer).state, world.shown()) == ("retired", [])


def test_what_a_fenced_worker_brings_back_is_retired() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    world.settle(3)
    lost = world.workers["w0"]
    world.die("w0")
    world.settle(5)
    assert world.deployment(answer).instance == "m@w1"
    world.join("w0", instances=lost.instances)
    world.settle(3)
    assert world.shown() == ["m@w1"]


def test_models_of_the_settings_and_of_unknown_deployments_are_left_alone() -> None:
    world = measured("w0")
    world.workers["w0"].instances = [instance("own", "w0"), instance("x", "w0", deployed="gone-1-w0")]
    world.settle(5)
    assert world.shown() == ["own@w0", "x@w0"]


def test_a_controller_that_starts_again_orders_nothing_twice() -> None:
    world = measured("w0", "w1", tp=2)
    answer = world.deploy()
    world.turn()
    world.restart_controller()
    world.turn()
    world.work("w0"), world.work("w1")
    world.restart_controller()
    world.settle(4)
    assert world.deployment(answer).state == "serving"
    assert (len(world.commands(Deploy)), len(world.commands(Transform))) == (2, 1)


# --------------------------------------------------------------------------- orders


def test_a_name_is_registered_once() -> None:
    world = World("w0")
    assert world.register().status == 201
    again = world.register()
    assert (again.status, "already (registered, from /m)" in again.error) == (409, True)
    by_settings = world.register("demo", by_settings={"demo": "w0"})
    assert (by_settings.status, "w0 serves a model 'demo' by its settings" in by_settings.error) == (
        409,
        True,
    )


def test_a_folder_that_is_no_model_is_refused() -> None:
    answer = World().register(checkpoint="no config.json in /m")
    assert (answer.status, answer.error) == (400, "path: no config.json in /m")


def test_unknown_names_are_answered_with_what_was_meant() -> None:
    world = measured("w0")
    assert (
        world.deploy("n").error == "no model 'n' is registered; there are: 'm'"
        or world.deploy("n").status == 404
    )
    assert "did you mean 'm'" in world.order(RemoveModel(id="x", name="mm")).error
    assert world.retire("zz").error == "no deployment 'zz'; there are: none"


def test_a_model_that_is_deployed_is_not_removed() -> None:
    world = measured("w0")
    answer = world.deploy()
    refused = world.order(RemoveModel(id="x", name="m"))
    assert (refused.status, world.deployment(answer).id in refused.error) == (409, True)
    world.retire(world.deployment(answer).id)
    world.settle(3)
    assert world.order(RemoveModel(id="y", name="m")).status == 200
    assert (world.contents.models, world.contents.profiles) == ({}, {})


def test_a_checkpoint_that_changed_on_disk_is_not_deployed() -> None:
    world = measured("w0")
    world.contents = world.contents.with_record(replace(world.model(), digest="other"))
    answer = world.deploy()
    assert (answer.status, "is not the one that was registered as m" in answer.error) == (409, True)
    assert world.contents.deployments == {}


@pytest.mark.parametrize(
    ("facts", "status"), [({"bad_intent": "minimise is 'x'"}, 400), ({"unmet": "the best takes 2 s"}, 409)]
)
def test_an_intent_that_cannot_be_is_refused_and_nothing_is_kept(facts: dict[str, str], status: int) -> None:
    world = measured("w0")
    answer = world.deploy(**facts)
    assert answer.status == status
    assert next(iter(facts.values())) in answer.error
    assert world.contents.deployments == {}


def test_the_same_order_twice_is_one_deployment() -> None:
    world = measured("w0")
    order = DeployModel(id="a1", name="m", intent=Intent())
    first, again = world.order(order), world.order(order)
    assert first == again
    assert list(world.contents.deployments) == ["a1"]
    assert world.order(RetireModel(id="r1", deployment="a1")).status == 200  # nothing was loaded
