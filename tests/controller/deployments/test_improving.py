"""The intent of what serves stays its target: moved where that is better, packed where room is needed, and
the old one serves until the new one does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.catalogue import Contents
from bus.deployments import Answer, Configuration, Deployment, Intent, ModelCard
from bus.messages import Stage
from controller.deployments.free_memory import FreeMemory
from controller.deployments.improving import next_of_improving
from controller.deployments.observation import COOLDOWN_MS, Observation
from controller.deployments.planner import Question, Situation, planned
from controller.deployments.transitions import Transition
from controller.planning.intent import compare
from controller.planning.plan import Plan
from tests.controller.deployments.test_properties import NAMES, STEPS, act, check_always, check_at_rest
from tests.support.deployment_world import Worker, World, estimate, instance
from tests.support.known_truths import Truth, profile_of
from tests.support.pipeline_world import PipelineWorld

FAST = Intent(minimise="latency")


def served(*workers: str, intent: Intent = FAST, **seconds: float) -> tuple[World, Answer]:
    """A world in which "m" serves on the first worker, and since then others are as fast as `seconds` say."""
    world = World(*workers)
    world.register()
    world.intent = intent
    answer = world.deploy()
    world.settle(4)
    assert world.deployment(answer).instance == f"m@{workers[0]}"
    world.seconds, world.may_change = seconds, True
    return world, answer


def later(world: World, times: int = 1) -> list[Transition]:
    """A look when so many cool-downs are over."""
    return world.turn(times * COOLDOWN_MS)


def by_state(world: World) -> dict[str, str]:
    return {one.id: one.state for one in world.contents.deployments.values()}


def heir(world: World) -> Deployment:
    (found,) = [one for one in world.contents.deployments.values() if one.replaces]
    return found


# --------------------------------------------------------------------------- better


def test_what_would_be_faster_elsewhere_moves_there_and_serves_meanwhile() -> None:
    world, answer = served("w0", "w1", w1=0.5)
    (transition,) = later(world)
    assert transition.kind == "deployment_loading"
    assert (transition.numbers["latency_now"], transition.numbers["latency_then"]) == (1.0, 0.5)
    assert transition.record is not None and transition.record.reason == (
        f"in place of {answer.id} on w1: latency is 1 s as tp1 pp1 full and 0.5 as tp1 pp1 full; w1 idle"
    )
    assert by_state(world) == {answer.id: "serving", heir(world).id: "loading"}
    world.work("w1")
    assert world.shown() == ["m@w0", "m@w1"]
    world.settle(5)
    assert by_state(world) == {answer.id: "retired", heir(world).id: "serving"}
    assert world.shown() == ["m@w1"]
    assert world.deployment(answer).heir == heir(world).id
    later(world)
    later(world)
    assert world.shown() == ["m@w1"] and len(by_state(world)) == 2


@pytest.mark.parametrize("why", ["young", "little", "busy", "manual", "unsettled", "needed", "drains"])
def test_it_stays_where_it_is(why: str) -> None:
    world, _ = served("w0", "w1", w1=0.95 if why == "little" else 0.5)
    if why == "busy":
        world.workers["w1"].load = 0.5
    if why == "manual":
        world.may_change = False
    if why == "unsettled":
        world.is_settled = False
    if why == "drains":
        world.workers["w1"].state = "draining"
    if why == "needed":
        world.register("other")
        world.deploy("other")
    world.turn(COOLDOWN_MS // 2 if why == "young" else COOLDOWN_MS)
    assert not [one for one in world.contents.deployments.values() if one.replaces]


def test_an_heir_that_cannot_be_loaded_leaves_everything_as_it_was_and_the_next_comes_later() -> None:
    world, answer = served("w0", "w1", w1=0.5)
    later(world)
    world.work("w1", refuses=True)
    world.settle(3)
    assert by_state(world) == {answer.id: "serving", heir(world).id: "retired"}
    assert heir(world).reason == "" and world.shown() == ["m@w0"]
    later(world)
    assert len(by_state(world)) == 2  # the cool-down has doubled
    later(world)
    assert sorted(by_state(world).values()) == ["loading", "retired", "serving"]


def test_an_heir_is_given_up_when_there_is_nothing_left_to_replace() -> None:
    world, answer = served("w0", "w1", w1=0.5)
    later(world)
    world.die("w0")
    world.settle(6)
    assert by_state(world) == {answer.id: "serving", heir(world).id: "retired"}
    assert world.shown() == ["m@w1"]  # found its own way
    check_at_rest(world)


def test_retiring_what_was_replaced_retires_its_heir() -> None:
    world, answer = served("w0", "w1", w1=0.5)
    later(world)
    world.settle(4)
    assert world.retire(answer.id).deployment == heir(world)
    world.settle(3)
    assert world.shown() == [] and set(by_state(world).values()) == {"retired"}


def test_retiring_it_while_its_heir_loads_retires_both() -> None:
    world, answer = served("w0", "w1", w1=0.5)
    later(world)
    world.retire(answer.id)
    world.settle(6)
    assert world.shown() == [] and set(by_state(world).values()) == {"retired"}


def test_a_controller_that_starts_again_remembers_the_cool_down() -> None:
    world, _ = served("w0", "w1", w1=0.5)
    later(world)
    world.work("w1", refuses=True)
    world.settle(3)
    world.restart_controller()
    later(world)
    assert len(by_state(world)) == 2


# --------------------------------------------------------------------------- packed


def crowded(intent: Intent, **seconds: float) -> tuple[World, Answer, Answer]:
    """Each of two workers has a model, and one waits that wants a worker of its own."""
    world = World("w0", "w1")
    for name in ("a", "b", "c"):
        world.register(name)
    world.settle(6)
    world.intent = intent
    first = world.deploy("a")
    world.settle(2)
    world.lonely, world.intent = {"b", "c"}, FAST
    world.deploy("b")
    world.settle(2)
    assert world.shown() == ["a@w0", "b@w1"]
    world.seconds, world.may_change = seconds, True
    return world, first, world.deploy("c")


def test_what_costs_least_is_packed_when_its_worker_is_needed() -> None:
    world, first, waiting = crowded(Intent())
    world.turn()
    assert world.deployment(waiting).state == "waiting"
    (transition,) = [one for one in later(world) if one.commands]
    assert transition.record is not None
    assert transition.record.reason.endswith(f"{waiting.id} (c) waits for room")
    assert (transition.numbers["cost_now"], transition.numbers["cost_then"]) == (1.0, 1.0)
    world.settle(6)
    assert world.shown() == ["a@w1", "b@w1", "c@w0"]
    assert world.deployment(first).state == "retired"


@pytest.mark.parametrize(
    ("intent", "seconds"),
    [(FAST, {}), (Intent(), {"w1": 1.5})],
)
def test_what_is_to_be_fast_and_what_would_cost_more_keep_their_worker(
    intent: Intent, seconds: dict[str, Any]
) -> None:
    world, _, waiting = crowded(intent, **seconds)
    later(world)
    world.settle(4)
    assert world.shown() == ["a@w0", "b@w1"]
    assert world.deployment(waiting).state == "waiting"


def test_nothing_is_packed_that_would_not_make_room() -> None:
    world, _, _ = crowded(Intent())
    world.workers["w0"].instances.append(world.workers["w1"].instances[0])  # it would not be empty
    later(world)
    assert not [one for one in world.contents.deployments.values() if one.replaces]


# --------------------------------------------------------------------------- costs


@pytest.mark.parametrize(("intent", "moves"), [(FAST, True), (Intent(minimise="gpu_hours"), False)])
def test_of_idle_workers_as_estimates_tell_latency_takes_more_and_device_hours_none(
    intent: Intent, moves: bool
) -> None:
    truth, names = Truth(layers=8), ("w0", "w1", "w2")
    pair = (Configuration(), Configuration(tp=2))
    measured = replace(profile_of(truth, configurations=pair), degrees=[1, 2])
    old = Deployment(
        id="d1",
        model="m",
        intent=intent,
        state="serving",
        configuration=Configuration(),
        stages=[Stage(workers=["w0"], first=0, end=8)],
        epochs={"w0": 1},
    )
    card = ModelCard(name="m", path="/m", digest="d", num_layers=8, state="profiled")
    contents = Contents({"m": card}, {"d1": old}, {("m", "cpu"): measured})
    workers = {name: Worker(name, 1) for name in names}
    workers["w0"].instances.append(instance("m", "w0", deployed="d1-1-w0"))
    seen = Observation(
        now_ms=COOLDOWN_MS,
        workers={name: worker.seen() for name, worker in workers.items()},
        may_change=True,
    )
    room = FreeMemory(dict.fromkeys(names, 2 * truth.memory(Configuration(), intent)), [])

    def plan(question: Question) -> Plan:
        return planned(question, room)

    transition = next_of_improving(old, Situation(contents, seen, plan))
    if not moves:
        assert transition is None
        return
    assert transition is not None and isinstance(transition.record, Deployment)
    assert transition.record.configuration == Configuration(tp=2)
    assert transition.record.stages == [Stage(workers=["w1", "w2"], first=0, end=8)]
    assert [worker for worker, _ in transition.commands] == ["w1", "w2"]
    now, then = transition.numbers["latency_now"], transition.numbers["latency_then"]
    assert then == pytest.approx((truth.serial + (1 - truth.serial) / 2) * float(now))


@pytest.mark.parametrize(("is_fixed", "moves"), [(False, True), (True, False)])
def test_what_serves_is_compared_as_the_degree_that_it_has(is_fixed: bool, moves: bool) -> None:
    """The plan's row is the one of a group, which is not what two ranks of a degree that stays take."""
    world, answer = served("w0", "w1", "w2", "w3", w2=0.95, w3=0.95)
    old = replace(
        world.deployment(answer),
        configuration=Configuration(tp=2),
        stages=[Stage(workers=["w0", "w1"], first=0, end=4)],
        expected=estimate(1.0, tp=2),
        is_fixed=is_fixed,
    )
    plan = Plan(
        chosen=estimate(0.95, tp=2),
        stages=[Stage(workers=["w2", "w3"], first=0, end=4)],
        estimates=[estimate(3.0, tp=2)],
    )
    world.now_ms += COOLDOWN_MS
    found = next_of_improving(old, Situation(world.contents, world.picture, lambda _: plan))
    assert (found is not None) == moves


@pytest.mark.parametrize(
    ("intent", "minimised"),
    [
        (Intent(), "cost"),
        (FAST, "latency"),
        (Intent(max_latency_s=2.0), "cost"),
        (Intent(max_cost=2.0), "latency"),
    ],
)
def test_the_costs_that_are_compared_are_those_of_the_intent(intent: Intent, minimised: str) -> None:
    found = compare(estimate(1.0), estimate(0.8), intent)
    assert found.numbers == {f"{minimised}_now": 1.0, f"{minimised}_then": 0.8}
    assert found.is_better and found.is_no_worse
    near = compare(estimate(1.0), estimate(0.95), intent)
    assert near.is_no_worse and not near.is_better
    assert not compare(estimate(1.0), estimate(1.01), intent).is_no_worse


# --------------------------------------------------------------------------- any order of events

CHANGES = st.one_of(
    STEPS,
    st.tuples(st.just("speed"), st.tuples(st.sampled_from(NAMES), st.sampled_from((0.5, 1.0, 2.0)))),
    st.tuples(st.just("later"), st.just(COOLDOWN_MS)),
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.lists(CHANGES, max_size=40))
def test_while_intents_are_pursued_nothing_is_left_behind(
    shape: tuple[int, int], steps: list[tuple[str, Any]]
) -> None:
    world = PipelineWorld(*NAMES, tp=shape[0], pp=shape[1])
    world.register("a")
    world.settle(3)
    world.intent = FAST
    world.deploy("a")
    world.settle(3)
    world.may_change = True
    for step, what in steps:
        if step == "speed":
            world.seconds[what[0]] = what[1]
        elif step == "later":
            world.turn(what)
        else:
            act(world, step, what)
        check_always(world)
    for name, worker in list(world.workers.items()):
        if worker.state == "draining":
            world.die(name)
            world.join(name)
    world.may_change = False
    world.settle(60, after_ms=20_000)
    check_always(world)
    check_at_rest(world)
    heirs = [one for one in world.contents.deployments.values() if one.replaces and one.state == "serving"]
    for one in heirs:
        old = world.contents.deployments.get(one.replaces)
        assert old is None or old.state in ("retired", "failed")
