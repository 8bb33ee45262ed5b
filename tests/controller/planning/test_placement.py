"""Which devices get a model: load over a window, and three policies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.deployments import Configuration
from bus.messages import Stage
from controller.planning.fitting import Device, Refusal, fit
from controller.planning.memory import Footprint
from controller.planning.placement import POLICIES, LoadWindow, PlacementPolicy, Placing, place

ONE, TWO = Configuration(), Configuration(pp=2)
NEED = Footprint(layer_bytes=10)


def devices(*loads: float, free: int = 100) -> list[Device]:
    return [Device(worker=f"w{i}", load=load, free_bytes=free) for i, load in enumerate(loads)]


def workers(found: list[Stage] | Refusal) -> set[str]:
    assert not isinstance(found, Refusal), found.reason
    return {worker for stage in found for worker in stage.workers}


# --------------------------------------------------------------------------- load


def test_load_is_busy_seconds_in_the_window_over_the_window() -> None:
    window = LoadWindow(120.0)
    for second in range(301):
        window.see("w0", float(second), 1.0 if 200 < second <= 230 else 0.0)
    assert window.load("w0", 300.0) == pytest.approx(30 / 120)
    assert window.load("w0", 335.0) == pytest.approx(15 / 120)  # half of it has left the window
    assert window.load("w0", 500.0) == 0.0


def test_a_worker_that_was_just_seen_counts_as_idle_before() -> None:
    window = LoadWindow(120.0)
    assert window.load("w0", 5.0) == 0.0
    window.see("w0", 0.0, 1.0)
    window.see("w0", 12.0, 0.5)
    assert window.load("w0", 12.0) == pytest.approx(6 / 120)


def test_samples_that_come_twice_or_late_change_nothing() -> None:
    window = LoadWindow(10.0)
    for at_s, busy in ((0.0, 0.0), (5.0, 1.0), (5.0, 0.0), (3.0, 0.0), (10.0, 0.0)):
        window.see("w0", at_s, busy)
    assert window.load("w0", 10.0) == pytest.approx(0.5)


@given(busy=st.lists(st.floats(0, 1), min_size=1, max_size=50), step_s=st.floats(0.2, 3.0))
def test_load_is_a_share(busy: list[float], step_s: float) -> None:
    window = LoadWindow(20.0)
    for i, one in enumerate(busy):
        window.see("w0", i * step_s, one)
        assert 0.0 <= window.load("w0", i * step_s) <= 1.0


# --------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("least-loaded", {"w2"}), ("packing", {"w1"}), ("hybrid", {"w0"})],
)
def test_each_policy_takes_its_device(policy: PlacementPolicy, chosen: set[str]) -> None:
    there = devices(0.4, 0.9, 0.1)
    assert workers(place(NEED, ONE, 4, there, Placing(policy, 0.5))) == chosen


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("least-loaded", {"w2", "w3"}), ("packing", {"w0", "w1"}), ("hybrid", {"w0", "w3"})],
)
def test_several_stages_go_to_the_first_devices_in_the_policys_order(
    policy: PlacementPolicy, chosen: set[str]
) -> None:
    there = devices(0.4, 0.9, 0.1, 0.3)
    assert workers(place(NEED, TWO, 4, there, Placing(policy, 0.5))) == chosen


def test_a_full_device_is_passed_over() -> None:
    there = [*devices(0.4, 0.3), Device(worker="w9", load=0.45, free_bytes=30)]
    assert workers(place(NEED, ONE, 4, there, Placing("hybrid", 0.5))) == {"w0"}


def test_hybrid_goes_to_the_least_loaded_of_the_others_where_the_packable_have_no_room() -> None:
    there = [Device(worker="w9", load=0.1, free_bytes=30), *devices(0.9, 0.6, 0.7)]
    assert workers(place(NEED, ONE, 4, there, Placing("hybrid", 0.5))) == {"w1"}


def test_packable_is_what_is_below_the_threshold() -> None:
    there = devices(0.5, 0.4)
    assert workers(place(NEED, ONE, 4, there, Placing("hybrid", 0.5))) == {"w1"}
    assert workers(place(NEED, ONE, 4, there, Placing("hybrid", 0.51))) == {"w0"}


def test_packable_and_others_together_hold_what_neither_does_alone() -> None:
    assert workers(place(NEED, TWO, 20, devices(0.1, 0.9), Placing("hybrid", 0.5))) == {"w0", "w1"}


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_devices_are_taken_in_the_order_of_their_names(policy: PlacementPolicy) -> None:
    there = [Device(worker=f"w{i}", free_bytes=100) for i in (10, 9, 2)]
    assert workers(place(NEED, ONE, 4, there, Placing(policy))) == {"w2"}


@given(
    there=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 60)), min_size=1, max_size=6),
    num_layers=st.integers(1, 10),
    stages=st.integers(1, 4),
    policy=st.sampled_from(POLICIES),
)
@settings(max_examples=100, deadline=None)
def test_a_policy_never_refuses_what_the_freest_devices_hold(
    there: list[tuple[float, int]], num_layers: int, stages: int, policy: PlacementPolicy
) -> None:
    all_devices = [Device(worker=f"w{i}", load=load, free_bytes=free) for i, (load, free) in enumerate(there)]
    one = Configuration(pp=stages)
    placed = place(NEED, one, num_layers, all_devices, Placing(policy))
    fits = fit(NEED, one, num_layers, all_devices)
    assert isinstance(placed, Refusal) == isinstance(fits, Refusal)
    assert placed == place(NEED, one, num_layers, all_devices[::-1], Placing(policy))
