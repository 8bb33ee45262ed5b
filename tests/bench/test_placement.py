"""The modelled cluster of the placement benchmark: nothing lost or overbooked, and what Figure 10 shows."""

from __future__ import annotations

import pytest

from bench.placement.compare import outcome_of, use_of
from bench.placement.devices import INTENT, MODELS, NUM_DEVICES, PlacedModel, SharedDevices, trace_of
from bench.placement.models import ARCHITECTURES, BLOCK_TOKENS, profile_of
from controller.planning.estimates import estimate_all
from controller.planning.placement import POLICIES, PlacementPolicy, Placing


def test_the_estimate_from_one_and_two_layers_is_what_the_whole_model_takes() -> None:
    assert INTENT.prompt_tokens % BLOCK_TOKENS == 0
    for one in ARCHITECTURES.values():
        for found in estimate_all(profile_of(one, INTENT), INTENT, degrees=(1, 2)):
            whole = one.seconds(one.num_layers, found.configuration.tp, 512, 64)
            assert found.latency_s.value == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once_or_has_waited_to_the_end_and_no_device_is_overbooked(
    policy: PlacementPolicy,
) -> None:
    cluster, trace = use_of(Placing(policy), 1), trace_of(1)
    assert cluster.refused == []
    arrived = sorted((number, at_s) for number, times in enumerate(trace.arrivals) for at_s in times)
    assert sorted((one.model, one.arrived_s) for one in cluster.finished) == arrived
    assert all(free >= 0 for free in cluster.free.values())
    assert len(cluster.served) == len(MODELS)


def test_least_loaded_takes_all_devices_packing_few_and_hybrid_lies_between() -> None:
    least, packing, hybrid = (
        outcome_of(use_of(Placing(policy), 3)) for policy in ("least-loaded", "packing", "hybrid")
    )
    assert least.devices_after_four == NUM_DEVICES
    assert packing.devices <= hybrid.devices < least.devices
    assert least.p95_slowdown < hybrid.p95_slowdown <= packing.p95_slowdown


def test_two_models_on_one_device_take_turns_and_one_alone_takes_its_time() -> None:
    cluster = SharedDevices(Placing())
    for number, worker in enumerate(("gpu0", "gpu0", "gpu1")):
        cluster.served[number] = one = PlacedModel(number, (worker,), 2.0)
        cluster._arrive(one)
    cluster._arrive(cluster.served[2])  # queues behind the first
    cluster._advance(10.0)
    ends = sorted((one.model, round(one.latency_s, 6)) for one in cluster.finished)
    assert ends == [(0, 4.0), (1, 4.0), (2, 2.0), (2, 4.0)]
    assert {worker: round(busy, 6) for worker, busy in cluster.busy_s.items()} == {"gpu0": 4.0, "gpu1": 4.0}


def test_a_seed_gives_one_trace() -> None:
    assert trace_of(5) == trace_of(5) != trace_of(6)
