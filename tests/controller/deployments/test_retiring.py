"""Deployments that lose their workers, and those that are retired: nothing is left behind."""

from __future__ import annotations

from dataclasses import replace

from bus.deployments import Answer
from bus.messages import PageCounts, WorkerTelemetry
from bus.morphs import Deploy, MorphKind, MorphReport, Retire, Transform
from controller.deployments.loading import STABLE_MS
from controller.deployments.observation import kept_of
from controller.deployments.retries import STUCK_MS
from controller.deployments.transitions import MAX_ATTEMPTS
from tests.support.deployment_world import World, instance, measured


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


def stuck(world: World, answer: Answer) -> list[Retire]:
    """The worker reports again and again that it gives the model back."""
    world.turn()
    orders = [order for _, order in world.commands(Retire)]
    world.workers["w0"].instances.clear()
    world.workers["w0"].inbox.clear()
    for order in orders[:1]:
        report = world.report(order, "running", "retire", world.workers["w0"])
        world.reports.setdefault(order.id, replace(report, reason="pages 3 of 8"))
    for order in orders[1:]:
        world.reports[order.id] = world.report(order, "conflict", "retire", world.workers["w0"])
    return orders


def test_what_is_never_given_back_is_asked_for_again_told_counted_and_in_the_end_failed() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.settle(3)
    world.retire(world.deployment(answer).id)
    assert len(stuck(world, answer)) == 1
    assert world.turn() == []
    world.turn(STUCK_MS)
    assert len(stuck(world, answer)) == 2
    found = world.deployment(answer)
    assert (found.state, found.stages != []) == ("retiring", True)
    assert found.reason == "w0 has not given m back in 3 minutes, asked 2 times (running: pages 3 of 8)"
    for _ in range(20):
        world.turn(60_000)
        stuck(world, answer)
    found = world.deployment(answer)
    assert found.state == "failed" and found.attempts >= MAX_ATTEMPTS
    assert f"asked {found.attempts} times" in found.reason
    assert "is lost until w0 gives it back or starts anew" in found.reason
    world.join("w0")
    world.turn()
    assert (world.deployment(answer).state, world.deployment(answer).stages) == ("failed", [])


def test_pages_that_come_back_late_end_the_retirement() -> None:
    world = measured("w0")
    answer = world.deploy()
    world.settle(3)
    world.retire(world.deployment(answer).id)
    (first,) = stuck(world, answer)
    world.turn(STUCK_MS + 60_000)
    stuck(world, answer)
    world.reports[first.id] = world.report(first, "applied", "retire", world.workers["w0"])
    world.settle(2)
    assert world.deployment(answer).state == "retired"


def test_every_morph_says_for_which_deployment_it_is_and_why() -> None:
    world = measured("w0", "w1")
    answer = world.deploy()
    (transition,) = world.turn()
    (morph,) = transition.morphs
    assert (type(morph), transition.cause) == (Deploy, "deployment")
    assert transition.why == f"deployment {answer.id} of m (least cost): to be loaded"
    world.settle(3)
    world.die("w0")
    world.turn()
    (again,) = (one for _ in range(2) for one in world.turn(2_000) if one.commands)
    assert again.why.endswith("(least cost): to be loaded again: w0 died; it is tried again")
    world.settle(3)
    world.retire(answer.id)
    (away,) = world.turn()
    assert [type(one) for one in away.morphs] == [Retire]
    assert (away.cause, away.why) == ("retirement", f"deployment {answer.id} of m (least cost): ordered")


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


def test_of_reports_only_those_of_deployments_are_kept_and_without_telemetry() -> None:
    """A storm of swaps made the controller grow by 24 MiB a minute."""
    pages = PageCounts(budget=1, weights=0, kv=0, free=1)
    told = WorkerTelemetry(worker="w0", epoch=1, at_ms=5, busy=0.0, pages=pages, instances=[], steps=0)
    report = MorphReport(
        id="m1", kind="retire", target="m@w0", worker="w0", epoch=1, state="applied", reason="", started_ms=5
    )
    assert kept_of(replace(report, telemetry=told)) == report
    others: tuple[MorphKind, ...] = ("swap", "resize", "transform")
    for kind in others:
        assert kept_of(replace(report, kind=kind)) is None
