"""Instances without a record, or with an old one: they stay, and are known again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bus.catalogue import Contents
from bus.checkpoints import Checkpoint
from bus.deployments import Configuration, Intent
from bus.messages import Stage
from bus.morphs import Deploy, Retire
from controller.deployments.adopting import adopted, folders_of_unknown
from controller.deployments.transitions import Transition
from tests.support.deployment_world import NUM_LAYERS, World, instance


def served(*workers: str, **shape: int) -> tuple[World, str]:
    """A world in which "m" serves, and its deployment."""
    world = World(*workers, **shape)
    world.register()
    world.settle(3)
    answer = world.deploy()
    world.settle(4)
    assert world.deployment(answer).state == "serving"
    return world, world.deployment(answer).id


def forgotten(world: World) -> World:
    """Redis lost its data, and the controller started again: workers come back as others."""
    world.contents, world.reports, world.sent = Contents(), {}, {}
    world.checkpoints = {"/m": Checkpoint(NUM_LAYERS, "d")}
    for name, worker in list(world.workers.items()):
        world.join(name, instances=worker.instances)
    return world


def found(world: World, path: str = "/m") -> list[Transition]:
    seen = replace(world.picture, checkpoints={path: Checkpoint(NUM_LAYERS, "d", context=512)})
    return list(adopted(world.contents, seen))


# --------------------------------------------------------------------------- another epoch


def test_what_a_worker_still_has_when_it_lost_its_lease_is_not_loaded_again() -> None:
    world, name = served("w0", "w1")
    world.join("w0", instances=world.workers["w0"].instances)
    world.settle(4)
    deployment = world.contents.deployments[name]
    assert (deployment.state, deployment.loads) == ("serving", 1)
    assert deployment.epochs == {"w0": world.workers["w0"].epoch}
    assert len(world.commands(Deploy)) == 1 and not world.commands(Retire)
    world.retire(name)
    world.settle(4)
    assert world.shown() == []


def test_a_group_is_made_anew_when_a_member_lost_its_lease() -> None:
    world, name = served("w0", "w1", tp=2)
    world.join("w1", instances=world.workers["w1"].instances)
    world.may_change = True
    world.settle(4)
    deployment = world.contents.deployments[name]
    assert (deployment.state, deployment.loads) == ("serving", 1)
    assert {card.tp for worker in world.workers.values() for card in worker.instances} == {2}


def test_what_another_load_left_is_not_taken_for_it() -> None:
    world, name = served("w0")
    old = replace(world.workers["w0"].instances[0], deployed=f"{name}-7-w0")
    world.join("w0", instances=[old])
    world.settle(8)
    deployment = world.contents.deployments[name]
    assert (deployment.state, deployment.loads) == ("serving", 2)
    assert world.workers["w0"].instances[0].deployed == f"{name}-2-w0"


# --------------------------------------------------------------------------- no record


def test_what_no_record_tells_of_is_known_by_its_card_and_keeps_its_shape() -> None:
    world, name = served("w0")
    forgotten(world)
    world.workers["w0"].instances = [replace(world.workers["w0"].instances[0], precision="int8")]
    model, deployment = (transition.record for transition in found(world))
    assert (model.name, model.path, model.digest, model.state) == ("m", "/m", "d", "registered")  # type: ignore[union-attr]
    assert model.context == 512  # type: ignore[union-attr]
    assert (deployment.id, deployment.state, deployment.instance) == (name, "serving", "m@w0")  # type: ignore[union-attr]
    assert deployment.configuration == Configuration(precision="int8")  # type: ignore[union-attr]
    assert deployment.intent == Intent(tp=1, pp=1, precision="int8", kv_dtype="full")  # type: ignore[union-attr]
    assert deployment.reason.startswith("w0 serves it; its record was lost")  # type: ignore[union-attr]


def test_it_can_be_retired_and_is_loaded_anew_when_its_worker_dies() -> None:
    world, name = served("w0", "w1")
    forgotten(world)
    world.settle(3)
    assert world.model().state == "profiled"
    world.die("w0")
    world.settle(5)
    assert world.contents.deployments[name].instance == "m@w1"
    world.retire(name)
    world.settle(4)
    assert world.shown() == []


def test_a_group_is_found_whose_members_lost_each_other_and_is_made_anew() -> None:
    world, name = served("w0", "w1", tp=2)
    forgotten(world)
    world.may_change = True
    world.settle(3)
    deployment = world.contents.deployments[name]
    assert deployment.stages == [Stage(workers=["w0", "w1"], first=0, end=NUM_LAYERS)]
    assert deployment.configuration == Configuration(tp=2)
    assert {card.tp for worker in world.workers.values() for card in worker.instances} == {2}
    world.retire(name)
    world.settle(5)
    assert world.shown() == []


def test_a_group_is_found_as_it_is() -> None:
    world, name = served("w0", "w1", tp=2)
    world.contents = Contents()
    _, transition = found(world)
    assert (transition.subject, transition.record.configuration) == (name, Configuration(tp=2))  # type: ignore[union-attr]


def test_of_a_group_that_is_not_whole_one_serves_on() -> None:
    world, name = served("w0", "w1", "w2", "w3", tp=4)
    forgotten(world)
    world.die("w0")
    world.settle(6)
    assert world.contents.deployments[name].epochs.keys() == {"w1"}
    assert world.shown() == ["m@w1"]


def test_a_pipeline_is_found_with_its_stages() -> None:
    world = World("w0", "w1")
    stages = [Stage(workers=["w0"], first=0, end=1), Stage(workers=["w1"], first=1, end=NUM_LAYERS)]
    facts: dict[str, Any] = {"pp": 2, "workers": ["w0", "w1"], "deployed": "d1-3-w0"}
    world.workers["w0"].instances = [replace(instance("m", "w0"), stages=stages, **facts)]
    _, transition = found(world)
    assert transition.record.stages == stages and transition.record.loads == 3  # type: ignore[union-attr]
    world.die("w1")
    assert not found(world), "one of its workers is not there"


def test_before_redis_has_settled_and_of_what_is_not_ours_nothing_is_taken() -> None:
    world, _ = served("w0")
    forgotten(world)
    world.is_settled = False
    assert not found(world)
    world.is_settled = True
    for deployed in ("", "d1", "by-hand"):
        world.workers["w0"].instances = [instance("m", "w0", deployed=deployed)]
        assert not found(world) and not folders_of_unknown(world.contents, world.picture)


def test_a_folder_that_is_no_model_any_more_leaves_a_deployment_without_a_model() -> None:
    world, name = served("w0")
    forgotten(world)
    (transition,) = found(world, path="/other")
    assert transition.subject == name
    assert folders_of_unknown(world.contents, world.picture) == {"/m"}
