"""Deployments from waiting to serving: placed, loaded, made one, and tried again after a failure."""

from __future__ import annotations

from dataclasses import replace

from bus.morphs import CancelMorph, Deploy, Retire, Transform
from controller.deployments.loading import LOAD_LIMIT_MS
from controller.deployments.observation import UNHEARD_MS
from controller.deployments.transitions import MAX_ATTEMPTS
from controller.planning.plan import Plan
from tests.support.deployment_world import World, instance, measured


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


def test_the_ranks_of_stages_get_their_shares_at_once_and_nothing_transforms_them() -> None:
    world = measured("w0", "w1", "w2", "w3", tp=2, pp=2)
    answer = world.deploy()
    world.settle(3)
    commands = world.commands(Deploy)
    assert [(name, one.stage) for name, one in commands] == [("w0", 0), ("w1", 0), ("w2", 1), ("w3", 1)]
    stages = world.deployment(answer).stages
    assert [stage.workers for stage in stages] == [["w0", "w1"], ["w2", "w3"]]
    assert all(one.stages == stages and len(one.epochs) == 4 for _, one in commands)
    world.may_change = True
    world.settle(3)
    assert (world.deployment(answer).state, world.deployment(answer).instance) == ("serving", "m@w0")
    assert world.commands(Transform) == []
    world.retire(answer.deployment.id if answer.deployment else "")
    world.settle(6)
    assert (world.deployment(answer).state, world.shown(), world.commands(Transform)) == ("retired", [], [])


def test_ranks_whose_degree_stays_load_their_parts_and_nothing_transforms_them() -> None:
    world = measured("w0", "w1", tp=2)
    world.is_fixed = True
    answer = world.deploy()
    world.settle(3)
    commands = world.commands(Deploy)
    assert [(name, one.stage, one.is_divided) for name, one in commands] == [
        ("w0", 0, True),
        ("w1", 0, True),
    ]
    found = world.deployment(answer)
    assert (found.state, found.is_fixed, found.shown_by) == ("serving", True, ["w0"])
    assert all(one.stages == found.stages and one.epochs == found.epochs for _, one in commands)
    world.may_change = True
    world.settle(3)
    world.retire(found.id)
    world.settle(6)
    assert (world.deployment(answer).state, world.shown(), world.commands(Transform)) == ("retired", [], [])
    assert [name for name, _ in world.commands(Retire)][:1] == ["w0"]


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


def test_what_does_not_fit_waits_with_the_reason_and_loads_when_there_is_room() -> None:
    world = measured("w0")
    world.refusal = Plan(reason="needs 5 bytes")
    answer = world.deploy()
    world.turn()
    found = world.deployment(answer)
    assert (found.state, found.reason.split(",")[0]) == ("waiting", "fits nowhere here: needs 5 bytes")
    assert world.turn() == []
    world.refusal = None
    world.settle(2)
    assert world.deployment(answer).state == "serving"


def test_what_can_never_be_fails_with_the_reason() -> None:
    world = measured("w0")
    world.refusal = Plan(reason="the best there is takes 2 s", is_unmet=True)
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
    assert "does not report its memory" in world.deployment(answer).reason
