"""A model is divided for good where workers have no room for a group that may part again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.deployments import Configuration, Intent, Profile, RankSize
from controller.planning.fitting import Device
from controller.planning.plan import NOT_CUT, Plan, plan
from tests.support.known_truths import BLOCK_BYTES, Truth, profile_of

TRUTH = Truth(layers=8)
PAGE = 1 << 16
TP4 = Intent(tp=4, pp=1, precision="full")


def rank_size(tp: int) -> RankSize:
    return RankSize(
        tp=tp,
        precision="full",
        layer_bytes=TRUTH.layer_bytes // tp,
        lead_bytes=TRUTH.embedding_bytes // tp,
        block_bytes_per_layer=max(BLOCK_BYTES // tp, BLOCK_BYTES // 2),  # two KV heads
    )


PROFILE: Profile = replace(profile_of(TRUTH), degrees=[1, 2], ranks=[rank_size(tp) for tp in (2, 4, 8)])
NUM_BLOCKS = 20  # of Intent()
WHOLE = TRUTH.weights(8, Configuration()) + 8 * NUM_BLOCKS * BLOCK_BYTES
QUARTER = TRUTH.weights(8, Configuration()) // 4 + 8 * NUM_BLOCKS * BLOCK_BYTES // 2


def asked(
    room: int, count: int = 4, *, intent: Intent = TP4, profile: Profile = PROFILE, **device: Any
) -> Plan:
    there = [
        Device(worker=f"w{i}", host="h", free_bytes=room, page_bytes=PAGE, **device) for i in range(count)
    ]
    degrees = [tp] if (tp := intent.tp) else (1, 2, 4, 8)
    stages = intent.pp or 1
    return plan(profile, intent, there, degrees=degrees, max_stages=stages, groups=profile.degrees)


def test_a_model_larger_than_a_worker_is_divided_for_good() -> None:
    found = asked(QUARTER)
    assert found.chosen and found.chosen.is_fixed
    assert [stage.workers for stage in found.stages] == [["w0", "w1", "w2", "w3"]]
    assert found.chosen.fixed_worker_bytes == QUARTER and found.chosen.group_worker_bytes == 0
    weights = found.chosen.memory_bytes.value - TRUTH.activations(Configuration())
    assert weights == pytest.approx(4 * QUARTER, rel=0.1)
    short = asked(QUARTER - 1)
    assert short.chosen is None and "MiB on each of its ranks for 8 layers" in short.reason


@pytest.mark.parametrize(("room", "is_fixed"), [(WHOLE, False), (WHOLE // 2 + PAGE * 100, True)])
def test_where_the_whole_model_fits_the_group_may_part_again_and_the_plan_tells_the_price(
    room: int, is_fixed: bool
) -> None:
    found = asked(room, 2, intent=Intent(tp=2, pp=1, precision="full"))
    assert found.chosen and found.chosen.is_fixed == is_fixed
    assert found.chosen.group_worker_bytes == WHOLE
    assert found.chosen.fixed_worker_bytes < 0.6 * WHOLE


@pytest.mark.parametrize(("tp", "of_rank", "of_group"), [(4, 2, 0), (2, 2, 3)])
def test_the_kv_of_each_layer_is_counted_in_whole_pages(tp: int, of_rank: int, of_group: int) -> None:
    page_bytes = 8 * BLOCK_BYTES  # 20 blocks take 2.5 pages; those of a rank are half as large
    paged = replace(PROFILE, page_bytes=page_bytes)
    found = asked(2 * WHOLE, intent=Intent(tp=tp, pp=1, precision="full"), profile=paged).chosen
    assert found
    weights = TRUTH.weights(8, Configuration())
    assert found.fixed_worker_bytes == weights // tp + 8 * of_rank * page_bytes
    assert found.group_worker_bytes == (weights + 8 * of_group * page_bytes if of_group else 0)


def test_ranks_that_stay_share_workers_with_other_models_but_not_with_other_ranks() -> None:
    assert asked(WHOLE, instances=frozenset({"m@w0"})).chosen
    refused = asked(WHOLE, ranks=frozenset({"m@w0"}))
    assert refused.chosen is None
    lacking = "needs 1 group of 4 devices of one host that are in no other group; 0 can be formed"
    assert lacking in refused.reason


def test_workers_that_form_no_group_are_ranks_that_stay() -> None:
    there = [Device(worker=f"w{i}", host="h", free_bytes=WHOLE, page_bytes=PAGE) for i in range(2)]
    intent = Intent(tp=2, pp=1, precision="full")
    found = plan(PROFILE, intent, there, degrees=[2], groups=())
    assert found.chosen and found.chosen.is_fixed


def test_stages_of_several_ranks_are_divided_as_the_layout_says() -> None:
    found = asked(QUARTER + (4 << 20), intent=Intent(tp=2, pp=2, precision="full"))
    assert found.chosen and found.chosen.is_fixed
    assert [(len(stage.workers), stage.end - stage.first) for stage in found.stages] == [(2, 4), (2, 4)]
    kv_bytes = 2 * 8 * NUM_BLOCKS * BLOCK_BYTES // 2
    activations = found.chosen.memory_bytes.value - TRUTH.weights(8, Configuration()) - kv_bytes
    assert 0 < activations < 8 * TRUTH.activation_bytes


def test_a_rank_that_repeats_kv_heads_costs_what_it_takes_and_a_limit_of_cost_holds_it() -> None:
    """At 8 ranks, which cannot be a group, each of two KV heads is there four times."""
    intent = Intent(tp=8, pp=1, precision="full", cost="memory")
    found = asked(WHOLE, 8, intent=intent)
    assert found.chosen
    taken = 8 * (found.chosen.fixed_worker_bytes + TRUTH.activation_bytes)
    assert found.chosen.cost.value == pytest.approx(taken)
    limited = asked(WHOLE, 8, intent=replace(intent, max_cost=found.chosen.cost.value - 1))
    assert limited.is_unmet and "above max_cost" in limited.reason


def test_a_limit_of_cost_that_only_a_degree_that_stays_keeps_is_met() -> None:
    """A group of two repeats embedding and attention at both ranks."""
    intent = Intent(tp=2, pp=1, precision="full", cost="memory")
    group, fixed = (asked(room, 2, intent=intent).chosen for room in (WHOLE, WHOLE // 2 + PAGE * 100))
    assert group and fixed and (group.is_fixed, fixed.is_fixed) == (False, True)
    assert fixed.cost.value < group.cost.value
    limited = replace(intent, max_cost=(fixed.cost.value + group.cost.value) / 2)
    found = asked(WHOLE, 2, intent=limited).chosen
    assert found and found.is_fixed and found.cost == fixed.cost
    nothing = asked(WHOLE, 2, intent=replace(intent, max_cost=fixed.cost.value / 2))
    assert nothing.is_unmet and f"costs {fixed.cost.value:.4g} bytes" in nothing.reason
    assert nothing.best in nothing.estimates


def test_a_degree_that_a_precision_cannot_be_cut_for_is_neither_group_nor_fixed() -> None:
    """Llama-2 7B in a prepared int4 is such a model at tp 16: 11008 rows of the FFN are 688 for each rank."""
    both = (Configuration(), Configuration(precision="int4"))
    measured = profile_of(TRUTH, configurations=both, loss={"int4": 0.0})
    profile = replace(measured, degrees=PROFILE.degrees, ranks=PROFILE.ranks)
    found = asked(WHOLE, 8, intent=Intent(tp=8, pp=1), profile=profile)
    assert found.chosen and found.chosen.configuration.precision == "full"
    refused = asked(WHOLE, 8, intent=Intent(tp=8, pp=1, precision="int4"), profile=profile)
    assert refused.is_unmet and not refused.stages
    assert "tp8 pp1 int4: the weights in int4 cannot be cut for this degree" in refused.reason
    other = asked(WHOLE, 3, intent=Intent(tp=3, pp=1), profile=profile)
    assert other.is_unmet and NOT_CUT in other.reason and "at most 16" in NOT_CUT


def test_kv_in_8_bits_is_less_at_each_rank() -> None:
    intent = Intent(tp=4, pp=1, precision="full", kv_dtype="int8")
    found = asked(QUARTER, intent=intent, profile=replace(PROFILE, kv_gain=2.0, kv_loss=0.0)).chosen
    assert found and found.fixed_worker_bytes == QUARTER - 8 * NUM_BLOCKS * BLOCK_BYTES // 4
