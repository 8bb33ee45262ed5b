"""The orders that are accepted, and the words of refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.deployments import DeployModel, Intent, RemoveModel, RetireModel
from controller.planning.plan import Plan
from tests.support.deployment_world import World, measured

UNMET = Plan(reason="the best takes 2 s", is_unmet=True)


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
    assert (world.deploy("n").status, world.deploy("n").error) == (
        404,
        "no model 'n' is registered; there are: m",
    )
    assert World().deploy("n").error == "no model 'n' is registered; `instar model add DIR` registers one"
    assert "did you mean 'm'" in world.order(RemoveModel(id="x", name="mm")).error
    assert world.retire("zz").error == "no deployment 'zz'; there is none"


def test_a_degree_that_the_weights_cannot_be_cut_for_is_refused() -> None:
    world = measured("w0")
    (profile,) = world.contents.profiles.values()
    world.intent = replace(world.intent, tp=8)
    assert world.deploy().status == 202, "it is not told which there are"
    world.contents = world.contents.with_record(replace(profile, degrees=[1, 2, 4]))
    answer = world.deploy()
    told = "intent: tp is 8, and the weights of m can be cut for 1, 2, 4"
    assert (answer.status, answer.error.startswith(told)) == (400, True)
    assert answer.error.endswith("and it is at most 16")


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
    ("facts", "status", "words"),
    [({"bad_intent": "minimise is 'x'"}, 400, "minimise is 'x'"), ({"plan": UNMET}, 409, UNMET.reason)],
)
def test_an_intent_that_cannot_be_is_refused_and_nothing_is_kept(
    facts: dict[str, Any], status: int, words: str
) -> None:
    world = measured("w0")
    answer = world.deploy(**facts)
    assert answer.status == status
    assert words in answer.error
    assert world.contents.deployments == {}


def test_the_same_order_twice_is_one_deployment() -> None:
    world = measured("w0")
    order = DeployModel(id="a1", name="m", intent=Intent())
    first, again = world.order(order), world.order(order)
    assert first == again
    assert list(world.contents.deployments) == ["a1"]
    assert world.order(RetireModel(id="r1", deployment="a1")).status == 200  # nothing was loaded
