"""The meaning of a deployment's configuration to the policy that morphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Intent, ModelCard
from bus.messages import Stage
from bus.precisions import Precision
from controller.deployments.profiling import rests_of
from controller.morphing.resting import Rest
from tests.support.deployment_world import World, profile

SERVING = Deployment(
    id="d1",
    model="m",
    intent=Intent(),
    state="serving",
    configuration=Configuration(precision="int4"),
    stages=[Stage(workers=["w0"], first=0, end=4)],
)


def contents(*deployments: Deployment, loss: dict[Precision, float] | None = None) -> Contents:
    card = ModelCard(name="m", path="/m", digest="d", num_layers=4, state="profiled")
    measured = replace(profile(), loss=loss or {})
    return Contents({"m": card}, {one.id: one for one in deployments}, {("m", "cpu"): measured})


def test_only_what_serves_rests() -> None:
    assert rests_of(contents(SERVING)) == {"m@w0": Rest(precision="int4")}
    assert rests_of(contents(replace(SERVING, state="loading"))) == {}
    assert rests_of(contents(replace(SERVING, state="retiring"))) == {}


def test_every_member_of_a_group_rests_in_its_degree() -> None:
    pair = replace(
        SERVING,
        configuration=Configuration(tp=2),
        stages=[Stage(workers=["w0", "w1"], first=0, end=4)],
    )
    assert rests_of(contents(pair)) == {"m@w0": Rest(tp=2), "m@w1": Rest(tp=2)}


def test_a_limit_of_loss_bounds_what_layers_are_swapped_to() -> None:
    lost: dict[Precision, float] = {"int8": 0.0, "int4": 0.01, "int3": 0.06}
    floor = replace(SERVING, intent=Intent(max_loss=0.02))
    rest = rests_of(contents(floor, loss=lost))["m@w0"]
    assert (rest.coarsest, rest.loss_left) == ("int3", 0.01)  # it rests in int4; some halves may go further
    full = replace(floor, configuration=Configuration())
    rest = rests_of(contents(full, loss=lost))["m@w0"]
    assert (rest.coarsest, rest.loss_left) == ("int3", 0.02)
    world = contents(full, loss=lost)
    in_8_bits = replace(world.profiles["m", "cpu"], kv_dtype="int8", kv_loss=0.005)
    rest = rests_of(world.with_record(in_8_bits))["m@w0"]
    assert rest.loss_left == pytest.approx(0.015), "the KV cache loses its part by the workers' settings"
    assert rests_of(contents(full))["m@w0"].coarsest == "full"  # nobody knows what the others lose


def test_a_world_that_serves_rests_as_it_was_deployed() -> None:
    world = World("w0")
    world.register()
    world.deploy()
    world.settle(5)
    assert list(rests_of(world.contents)) == ["m@w0"]
