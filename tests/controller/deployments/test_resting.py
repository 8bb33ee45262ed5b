"""The meaning of a deployment's configuration to the policy that morphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Intent, ModelCard
from bus.messages import Stage
from bus.policy import Slowdown
from bus.precisions import Precision
from controller.deployments.profiling import SlowdownsByKind, rests_of
from controller.morphing.resting import Rest
from controller.planning.latency import slowdowns_of
from tests.support.deployment_world import World, profile
from tests.support.known_truths import SPEED, Truth, profile_of

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


def test_of_several_kinds_of_devices_the_slowest_says_how_long_steps_take() -> None:
    of_two = contents(SERVING)
    of_two.profiles["m", "gpu"] = replace(profile(), device="gpu")
    slowdowns: SlowdownsByKind = {
        ("m", "cpu"): {"int8": Slowdown(1.1, 0.7)},
        ("m", "gpu"): {"int8": Slowdown(0.9, 1.2), "int4": Slowdown(2.0, 2.0)},
        ("other", "cpu"): {"int8": Slowdown(9.0, 9.0)},
    }
    rest = rests_of(of_two, slowdowns)["m@w0"]
    assert rest.slowdowns == {"int8": Slowdown(1.1, 1.2), "int4": Slowdown(2.0, 2.0)}


def test_steps_of_a_measured_model_are_as_slow_as_it_is() -> None:
    """Every part of a step takes 0.8 of the time in int8, and 0.6 in int4."""
    configurations = [Configuration(precision=one) for one in SPEED]
    found = slowdowns_of(profile_of(Truth(), configurations=configurations))
    assert list(found) == ["int8", "int4"]
    for precision, one in found.items():
        assert (one.prompt, one.decode) == pytest.approx((SPEED[precision],) * 2)
    assert slowdowns_of(profile()) == {}  # nothing was measured
    assert slowdowns_of(profile_of(Truth(), configurations=configurations[1:])) == {}
