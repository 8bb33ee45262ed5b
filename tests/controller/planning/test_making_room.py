"""Whole plans, and what is said of a model for which there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bus.deployments import Configuration, Intent
from controller.planning.fitting import Device, Refusal, fit, sized
from controller.planning.intent import IntentError
from controller.planning.making_room import Retirement, Tenant, retirements_to_fit
from controller.planning.memory import Footprint
from controller.planning.plan import plan
from tests.support.known_truths import PAIR, SINGLE, STAGED, Truth, profile_of

NEED = Footprint(layer_bytes=10)
HERE = [Device(worker="w0", free_bytes=25), Device(worker="w1", free_bytes=5)]
IDLE = Tenant(
    instance="idle@w0",
    deployment="d1",
    workers=("w0",),
    weight_bytes=30,
    kv_bytes=40,
)
BUSY = replace(IDLE, instance="busy@w1", deployment="d2", workers=("w1",), load=0.9)

# --------------------------------------------------------------------------- retirements


def test_a_retirement_is_named_with_what_it_frees() -> None:
    assert [str(one) for one in retirements_to_fit(NEED, SINGLE, 3, HERE, [IDLE, BUSY])] == [
        "retire deployment d1 (70 bytes)"
    ]


def test_several_go_where_one_is_not_enough_and_no_more_than_needed() -> None:
    both = retirements_to_fit(NEED, STAGED, 15, HERE, [IDLE, BUSY])
    assert [one.deployment for one in both] == ["d1", "d2"]


def test_who_has_little_to_do_goes_first() -> None:
    for tenants in ([IDLE, BUSY], [replace(IDLE, load=1.0), BUSY]):
        (gone,) = retirements_to_fit(NEED, SINGLE, 7, HERE, tenants)
        assert gone.deployment == min(tenants, key=lambda one: one.load).deployment


def test_a_deployment_of_several_workers_goes_as_one() -> None:
    stages = [IDLE, replace(BUSY, deployment="d1")]
    (gone,) = retirements_to_fit(NEED, STAGED, 15, HERE, stages)
    assert str(gone) == "retire deployment d1 (140 bytes)"


def test_what_came_with_its_worker_is_not_retired() -> None:
    own = replace(IDLE, deployment="")
    assert retirements_to_fit(NEED, SINGLE, 3, HERE, [own]) == []


def test_nothing_is_asked_for_where_it_fits_and_nothing_helps_where_it_never_will() -> None:
    assert retirements_to_fit(NEED, SINGLE, 2, HERE, [IDLE]) == []
    assert retirements_to_fit(NEED, SINGLE, 99, HERE, [IDLE, BUSY]) == []


@pytest.mark.parametrize("num_layers", range(3, 17))
@pytest.mark.parametrize("configuration", [SINGLE, STAGED])
def test_retirements_do_make_room_and_none_of_them_is_needless(
    configuration: Configuration, num_layers: int
) -> None:
    def fits(steps: Sequence[Retirement]) -> bool:
        freed = [sum(step.freed.get(one.worker, 0) for step in steps) for one in HERE]
        after = [
            replace(one, free_bytes=one.free_bytes + more) for one, more in zip(HERE, freed, strict=True)
        ]
        return not isinstance(fit(NEED, configuration, num_layers, after), Refusal)

    if gone := retirements_to_fit(NEED, configuration, num_layers, HERE, [IDLE, BUSY]):
        assert fits(gone)
        assert not any(fits(gone[:i] + gone[i + 1 :]) for i in range(len(gone)))


def test_what_goes_leaves_its_workers_to_a_group() -> None:
    need, pair = replace(NEED, every_rank_leads=True), Configuration(tp=2)
    held = [
        Device(worker=one.workers[0], free_bytes=99, instances=frozenset({one.instance}))
        for one in (IDLE, BUSY)
    ]
    gone = retirements_to_fit(need, pair, 3, held, [IDLE, BUSY])
    assert [one.deployment for one in gone] == ["d1", "d2"]
    assert retirements_to_fit(need, pair, 3, held, [IDLE, replace(BUSY, deployment="")]) == []


def test_ranks_that_go_leave_their_workers_to_other_ranks() -> None:
    need, pair = replace(NEED, every_rank_leads=True, is_fixed=True), Configuration(tp=2)
    ranks = [replace(IDLE, instance=f"idle@w{i}", workers=(f"w{i}",), kv_bytes=0) for i in range(2)]
    held = [Device(worker=one.workers[0], free_bytes=99, ranks=frozenset({one.instance})) for one in ranks]
    assert isinstance(fit(need, pair, 3, held), Refusal)
    (gone,) = retirements_to_fit(need, pair, 3, held, [*ranks, replace(BUSY, load=0.0)])
    assert str(gone) == "retire deployment d1 (60 bytes)"
    kept = [replace(one, ranks=one.ranks | {"own@w1"}) for one in held]
    assert retirements_to_fit(need, pair, 3, kept, ranks) == []


# --------------------------------------------------------------------------- plans

TRUTH = Truth(layers=8)
PROFILE = profile_of(
    TRUTH,
    configurations=(SINGLE, PAIR, STAGED, Configuration(precision="int4")),
    loss={"int4": 0.03},
)
WHOLE = TRUTH.memory(SINGLE, Intent())


def cluster(*free: int) -> list[Device]:
    return [Device(worker=f"w{i}", host="h", free_bytes=one) for i, one in enumerate(free)]


def test_the_best_configuration_that_fits_is_chosen_and_placed() -> None:
    found = plan(PROFILE, Intent(max_loss=0.05), cluster(WHOLE, WHOLE), max_stages=2)
    assert found.chosen is not None and found.chosen.configuration == Configuration(precision="int4")
    assert [(stage.workers, stage.first, stage.end) for stage in found.stages] == [(["w0"], 0, 8)]
    assert found.blocks == 20
    assert len(found.estimates) == 4
    assert found.estimates[0] == found.chosen


def test_what_does_not_fit_is_passed_over_and_says_why() -> None:
    intent = Intent(minimise="latency", max_loss=0.01)
    found = plan(
        PROFILE, intent, cluster(WHOLE * 3 // 5, WHOLE * 3 // 5, WHOLE // 3), degrees=(1, 2), max_stages=2
    )
    assert found.chosen is not None and found.chosen.configuration == STAGED
    reasons = {one.configuration: one.refusal for one in found.estimates}
    assert reasons[STAGED] == ""
    assert "on each of its ranks for 8 layers" in reasons[PAIR]
    assert "MiB for 8 layers" in reasons[SINGLE]
    assert reasons[Configuration(tp=2, pp=2)] == (
        "needs 2 groups of 2 devices of one host that have no other model; 1 can be formed"
    )
    assert "loses 3.00% of perplexity" in reasons[Configuration(precision="int4")]


def test_a_model_that_fits_nowhere_says_what_would_make_room() -> None:
    held = Tenant(instance="old@w0", deployment="d7", workers=("w0",), weight_bytes=WHOLE, kv_bytes=0)
    found = plan(PROFILE, Intent(max_loss=0.0), cluster(1 << 20), tenants=[held])
    assert found.chosen is None and not found.is_unmet
    assert found.best is not None and found.best.configuration == SINGLE
    assert [str(one) for one in found.retirements] == [f"retire deployment d7 ({sized(WHOLE)})"]
    assert "1.0 MiB are free on w0" in found.reason


def test_a_limit_nothing_meets_is_told_with_the_best_there_is_and_nothing_is_placed() -> None:
    found = plan(PROFILE, Intent(max_latency_s=1e-6, max_loss=0.05), cluster(WHOLE))
    assert found.is_unmet and found.chosen is None and found.stages == []
    assert found.best is not None
    assert "above max_latency_s 1e-06" in found.reason
    assert all("above max_latency_s" in one.refusal for one in found.estimates)


def test_no_worker_at_all_is_a_refusal_too() -> None:
    found = plan(PROFILE, Intent(), [])
    assert found.chosen is None
    assert found.reason == "tp1 pp1 full needs 1 devices, there are 0"


def test_a_bad_intent_plans_nothing() -> None:
    with pytest.raises(IntentError, match="batch_size is 0"):
        plan(PROFILE, Intent(batch_size=0), cluster(WHOLE))
