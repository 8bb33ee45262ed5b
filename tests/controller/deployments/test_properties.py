"""Register, deploy, retire and death in any order, and a Redis that forgets: no orphan is left, no stage that
nobody leads, nothing is ordered twice, no deployment is tried more often than it may be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from bus.deployments import Measure, RemoveModel
from bus.morphs import CancelMorph, Deploy
from controller.deployments.transitions import MAX_ATTEMPTS
from tests.support.deployment_world import World
from tests.support.pipeline_world import PipelineWorld

NAMES = ("w0", "w1", "w2", "w3")
MODELS = ("a", "b")

STEPS = st.one_of(
    st.tuples(st.just("register"), st.sampled_from(MODELS)),
    st.tuples(st.just("remove"), st.sampled_from(MODELS)),
    st.tuples(st.just("deploy"), st.sampled_from(MODELS)),
    st.tuples(st.just("retire"), st.integers(0, 5)),
    st.tuples(
        st.sampled_from(("die", "join", "fence", "drain", "work", "refuse", "lose")), st.sampled_from(NAMES)
    ),
    st.tuples(st.just("turn"), st.sampled_from((500, 5_000, 70_000))),
    st.tuples(st.sampled_from(("all", "turn")), st.sampled_from((500, 5_000))),
    st.tuples(st.sampled_from(("restart", "forget")), st.none()),
)


def act(world: World, step: str, what: object) -> None:
    match step:
        case "register":
            world.register(str(what))
        case "remove":
            world.order(RemoveModel(id=world.next_id(), name=str(what)))
        case "deploy":
            world.deploy(str(what))
        case "retire":
            ids = list(world.contents.deployments)
            if ids and isinstance(what, int):
                world.retire(ids[what % len(ids)])
        case "turn":
            assert isinstance(what, int)
            world.turn(what)
        case "all":
            world.settle(1)
        case "restart":
            world.restart_controller()
        case "forget":
            assert isinstance(world, PipelineWorld)
            world.forget()
        case _:
            act_worker(world, step, str(what))


def act_worker(world: World, step: str, name: str) -> None:
    worker = world.workers.get(name)
    match step:
        case "die":
            world.die(name)
        case "join" if worker is None:
            world.join(name)
        case "fence" if worker is not None:  # it lost its lease, and what it serves it still has
            world.join(name, instances=worker.instances)
        case "drain" if worker is not None:
            worker.state = "draining"
        case "work":
            world.work(name)
        case "refuse":
            world.work(name, refuses=True)
        case "lose" if worker is not None:
            worker.inbox.clear()


def check_always(world: World) -> None:
    """A controller that starts again may repeat, under the same id, what no record tells of and nobody has
    reported on yet: to give up, to part, to become a group. Never to load or to measure."""
    ids = Counter(command.id for _, command in world.ordered)
    twice = [command for _, command in world.ordered if ids[command.id] > 1]
    assert not [one for one in twice if isinstance(one, Deploy | Measure) or not world.num_restarts]
    for deployment in world.contents.deployments.values():
        assert deployment.attempts <= MAX_ATTEMPTS
        assert (deployment.state == "loading") <= bool(deployment.stages)
    inboxes = [command for worker in world.workers.values() for command in worker.inbox]
    cancelled = {command.morph_id for command in inboxes if isinstance(command, CancelMorph)}
    loads = Counter(
        (command.instance, command.epoch)
        for command in inboxes
        if isinstance(command, Deploy) and command.id not in cancelled
    )
    assert all(times == 1 for times in loads.values())


def check_at_rest(world: World) -> None:
    """Instances on the cards are those of deployments that serve, where they do; so are stages."""
    serving = [one for one in world.contents.deployments.values() if one.state == "serving"]
    assert set(world.shown()) == {one.instance_at(worker) for one in serving for worker in one.shown_by}
    if isinstance(world, PipelineWorld):
        assert {part.load for part in world.parts} <= {f"{one.id}-{one.loads}" for one in serving}
        assert not world.leading
    for one in world.contents.deployments.values():
        assert one.state in ("serving", "waiting", "failed", "retired")
        assert one.state == "serving" or (one.stages == [] and one.epochs == {})
    for card in world.contents.models.values():
        assert card.state in ("profiled", "failed", "registered")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.booleans(), st.lists(STEPS, max_size=50))
def test_any_order_of_events_ends_with_no_orphan(
    shape: tuple[int, int], is_warm: bool, steps: list[tuple[str, object]]
) -> None:
    world = PipelineWorld(*NAMES, tp=shape[0], pp=shape[1])
    if is_warm:
        world.register("a")
        world.settle(3)
        world.deploy("a")
        world.turn()
    for step, what in steps:
        act(world, step, what)
        check_always(world)
    for name, worker in list(world.workers.items()):  # who drains leaves at last
        if worker.state == "draining":
            world.die(name)
            world.join(name)
    world.settle(60, after_ms=20_000)
    check_always(world)
    check_at_rest(world)
    assert not [transition for transition in world.turn() if transition.commands]
