"""Which morph, now: windows in, decisions out, without a clock and without Redis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bus.messages import MorphOutcome, Resize, Swap
from bus.policy import Mode, Policy
from bus.precisions import Precision
from controller.morphing.levers import Rules, rules_of
from controller.morphing.view import View
from tests.support.policy_views import BURST, CALM, EASE, Hand

# --------------------------------------------------------------------------- windows and thresholds


def test_pressure_of_several_windows_in_a_row_swaps_a_step_of_layers() -> None:
    hand = Hand(windows=3)
    assert hand.see(BURST, windows=2) is None
    decision = hand.see(BURST)
    assert decision is not None
    assert decision.command("m1") == Swap(
        id="m1", epoch=1, instance="m@w0", precision="int4", count=8, wait_s=1.0
    )
    assert "KV use 0.95 is above 0.85: 8 layers more to int4 (0 of at most 16 below full)" in decision.reason
    assert decision.numbers["windows"] == 3
    assert decision.numbers["kv_usage"] == 0.95
    assert decision.numbers["blocks_after"] == 1000 + 8 * 140 // 2


def test_one_window_without_pressure_begins_the_count_anew() -> None:
    hand = Hand(windows=3)
    for _ in range(10):
        assert hand.see(BURST, windows=2) is None
        assert hand.see(CALM) is None


def test_between_the_thresholds_nothing_moves_either_way() -> None:
    assert Hand().see(replace(CALM, layers_below=8), windows=100) is None


def test_exactly_at_a_threshold_is_not_beyond_it() -> None:
    assert Hand().see(replace(BURST, kv_usage=0.85), windows=10) is None
    assert Hand().see(replace(EASE, kv_usage=0.5), windows=10) is None


def test_requests_that_wait_for_blocks_are_pressure_at_any_kv_use() -> None:
    jammed = replace(CALM, queue_delay_s=0.4, waiting=2, waiting_blocks=500)
    decision = Hand().see(jammed, windows=3)
    assert decision is not None
    assert decision.reason.startswith("requests wait 0.40 s for blocks, above 0.1 s")


def test_a_queue_that_fits_into_the_free_blocks_waits_for_something_else() -> None:
    busy = replace(CALM, queue_delay_s=9.0, waiting=2, waiting_blocks=400)
    assert Hand().see(busy, windows=100) is None


def test_preemptions_are_pressure_while_the_cache_is_not_nearly_empty_again() -> None:
    assert Hand().see(replace(CALM, preemptions_per_s=0.1), windows=3) is not None
    assert Hand().see(replace(EASE, preemptions_per_s=0.1), windows=30) is None


# --------------------------------------------------------------------------- the way back


def test_ease_of_several_windows_brings_a_step_back() -> None:
    hand = Hand()
    assert hand.see(EASE, windows=2) is None
    decision = hand.see(EASE)
    assert decision is not None
    assert decision.command("m1") == Swap(
        id="m1", epoch=1, instance="m@w0", precision="full", count=8, wait_s=1.0
    )


def test_a_cache_made_smaller_by_hand_stays_so_until_there_is_pressure() -> None:
    hand = Hand()
    smaller = replace(EASE, kv_blocks=400, blocks_free=300, kv_usage=0.25, layers_below=0, pages_free=1300)
    assert hand.see(smaller, windows=100) is None
    decision = hand.see(replace(smaller, kv_used=380.0, kv_usage=0.95, blocks_free=20), windows=3)
    assert decision is not None and decision.lever == "resize" and decision.blocks > 900


def test_only_as_many_layers_come_back_as_leave_the_kv_use_below_the_high_threshold() -> None:
    # a layer takes at most 150 pages, 75 blocks; 60 pages are free beyond the reserve of 100
    tight = replace(EASE, kv_used=490.0, kv_usage=0.49, pages_free=160, layers_below=20)
    decision = Hand(cooldown_s=0).see(tight, windows=3)
    assert decision is not None
    assert decision.count == 5
    after = decision.numbers["blocks_after"]
    assert 490 / after < 0.85
    assert decision.numbers["kv_usage_after"] == pytest.approx(490 / after, abs=1e-4)


def test_nothing_comes_back_where_one_layer_would_bring_the_pressure_back() -> None:
    full = replace(EASE, kv_blocks=200, kv_used=98.0, kv_usage=0.49)
    assert Hand().see(full, windows=50) is None


def test_nothing_comes_back_below_the_blocks_of_the_longest_sequence() -> None:
    small = replace(EASE, kv_blocks=150, kv_used=1.0, kv_usage=0.01, min_blocks=140)
    assert Hand().see(small, windows=50) is None


def test_at_full_precision_ease_asks_for_nothing() -> None:
    assert Hand().see(replace(EASE, layers_below=0), windows=50) is None


def test_a_worker_that_does_not_tell_its_pages_is_asked_all_the_same() -> None:
    silent = replace(EASE, layer_pages={}, pages_per_block=0.0)
    decision = Hand().see(silent, windows=3)
    assert decision is not None
    assert decision.count == 8


def test_more_layers_below_than_the_mode_allows_come_back_without_waiting_for_ease() -> None:
    hand = Hand(mode="accuracy")
    assert hand.see(replace(CALM, layers_below=16), windows=3) is not None
    assert hand.see(replace(BURST, layers_below=16), windows=50) is None


# --------------------------------------------------------------------------- levers


def test_free_pages_become_blocks_before_any_layer_loses_bits() -> None:
    decision = Hand().see(replace(BURST, pages_free=100 + 64), windows=3)
    assert decision is not None  # 64 pages beyond the reserve of an int8 layer: two in each of 32 layers
    assert decision.command("m1") == Resize(id="m1", epoch=1, instance="m@w0", blocks=1032, wait_s=1.0)


def test_pages_that_fill_no_row_of_the_cache_are_not_asked_for() -> None:
    decision = Hand().see(replace(BURST, pages_free=100 + 31), windows=3)
    assert decision is not None
    assert decision.lever == "swap_down"


def test_a_resize_that_changed_nothing_does_not_keep_layers_from_being_swapped() -> None:
    hand = Hand(cooldown_s=1)
    spare = replace(BURST, pages_free=1000)
    hand.see(spare, windows=3)
    hand.answer("applied")
    decision = hand.see(spare, windows=3)
    assert decision is not None
    assert decision.lever == "swap_down"


def test_what_was_deployed_in_few_bits_goes_back_to_these_and_no_further() -> None:
    deployed = replace(EASE, resting="int4", pages_free=200)
    assert Hand().see(replace(deployed, layers_below=0), windows=50) is None
    assert Hand().see(replace(BURST, resting="int4"), windows=50) is None  # the policy wishes int4
    bolder = Hand(precision="int3")
    down = bolder.see(replace(BURST, resting="int4"), windows=3)
    assert down is not None
    assert (down.lever, down.precision) == ("swap_down", "int3")
    assert down.numbers["blocks_missing"] == 118  # of which no number of allowed layers would make enough
    assert down.numbers["blocks_after"] == 1000 + 80  # of 160 pages: five in each of 32 layers
    assert "16 layers more to int3 (0 of at most 16 below int4; this reaches the limit)" in down.reason
    up = Hand().see(replace(deployed, layers_below=3), windows=50)
    assert up is not None
    assert up.command("m1") == Swap(id="m1", epoch=1, instance="m@w0", precision="int4", count=3, wait_s=1.0)
    assert "3 layers of 3 back to int4" in up.reason


def test_a_floor_of_quality_holds_while_it_is_pressed_too() -> None:
    assert Hand(precision="int3").see(replace(BURST, resting="int4", coarsest="int4"), windows=50) is None
    kept = Hand(precision="int3").see(replace(BURST, coarsest="int8"), windows=3)
    assert kept is not None and kept.precision == "int8"


def test_never_more_layers_than_the_limit() -> None:
    nearly = Hand().see(replace(BURST, layers_below=13), windows=3)
    assert nearly is not None
    assert nearly.count == 3
    assert nearly.reason.endswith("(13 of at most 16 below full; this reaches the limit)")
    assert Hand().see(replace(BURST, layers_below=16), windows=50) is None


@pytest.mark.parametrize(
    ("wished", "there", "chosen"),
    [
        ("int4", ("full", "int8", "int4"), "int4"),
        ("int4", ("full", "int8"), "int8"),
        ("int8", ("full", "int4", "int3"), None),
        ("int3", ("full", "int8", "int4"), "int4"),
        ("full", ("full", "int8", "int4"), None),
        ("int4", ("full",), None),
    ],
)
def test_a_missing_variant_is_replaced_by_one_with_more_bits_and_never_by_one_with_fewer(
    wished: Precision, there: tuple[Precision, ...], chosen: Precision | None
) -> None:
    decision = Hand(precision=wished).see(replace(BURST, variants=there, pages_free=0), windows=3)
    assert (decision.precision if decision else None) == chosen


# --------------------------------------------------------------------------- holding


def test_manual_decides_nothing() -> None:
    assert Hand(mode="manual").see(BURST, windows=100) is None
    assert Hand(mode="manual").see(EASE, windows=100) is None


def test_stale_metrics_hold_and_the_count_begins_anew_after_them() -> None:
    hand = Hand()
    assert hand.see(replace(BURST, age_s=5.1), windows=100) is None
    assert hand.see(BURST, windows=2) is None
    assert hand.see(replace(BURST, age_s=5.1)) is None
    assert hand.see(BURST, windows=2) is None
    assert hand.see(BURST) is not None


def test_an_instance_without_metrics_holds_and_the_count_begins_anew_after_them() -> None:
    hand = Hand()
    hand.see(EASE, windows=2)
    hand.see(windows=1)
    assert hand.see(EASE, windows=2) is None


def test_windows_with_a_long_silence_between_them_are_not_in_a_row() -> None:
    hand = Hand()
    hand.see(BURST, windows=2)
    hand.pass_s(10)
    assert hand.see(BURST, windows=2) is None
    assert hand.see(BURST) is not None


def test_a_new_policy_counts_its_own_windows() -> None:
    hand = Hand()
    hand.see(BURST, windows=2)
    hand.policy = Policy(revision=1)
    assert hand.see(BURST, windows=2) is None
    decision = hand.see(BURST)
    assert decision is not None
    assert decision.numbers["policy_revision"] == 1


def test_nothing_is_decided_while_a_morph_is_in_flight() -> None:
    hand = Hand(cooldown_s=1)
    hand.see(BURST, windows=3)
    hand.answer("running")
    assert hand.see(BURST, windows=50) is None
    hand.answer("applied")
    assert hand.see(BURST, windows=2) is None, "windows before its end showed another shape"
    assert hand.see(BURST) is not None


def test_a_morph_by_hand_holds_the_policy_too_and_delays_the_way_back_alone() -> None:
    hand = Hand(cooldown_s=5)
    hand.answer("running", "by-hand")
    assert hand.see(BURST, windows=50) is None
    hand.answer("applied", "by-hand")
    assert hand.see(BURST, windows=3) is not None
    back = Hand(cooldown_s=5)
    back.answer("applied", "by-hand")
    back.see(EASE)
    back.answer("applied", "by-hand")
    assert back.see(EASE, windows=9) is None
    assert back.see(EASE) is not None


def test_a_morph_that_nobody_reports_on_any_more_holds_nothing_for_ever() -> None:
    hand = Hand()
    hand.see(BURST, windows=3)
    assert hand.see(BURST, windows=119) is None
    assert hand.see(BURST) is not None


def test_the_cool_down_of_the_way_back_counts_from_the_end_of_a_morph() -> None:
    hand = Hand(cooldown_s=5)
    hand.see(BURST, windows=3)
    hand.see(BURST, windows=6)
    hand.answer("applied")
    assert hand.see(EASE, windows=9) is None
    assert hand.see(EASE) is not None


def test_relief_waits_for_no_cool_down_but_for_windows_of_the_new_shape() -> None:
    hand = Hand(cooldown_s=60)
    hand.see(BURST, windows=3)
    hand.answer("applied")
    again = hand.see(replace(BURST, layers_below=8), windows=3)
    assert again is not None and again.lever == "swap_down"


def test_as_many_layers_are_swapped_as_the_queue_needs_within_the_limit() -> None:
    def layers(waiting_blocks: int) -> tuple[int, object]:
        decision = Hand().see(replace(BURST, waiting=9, waiting_blocks=waiting_blocks), windows=3)
        assert decision is not None
        return decision.count, decision.numbers["blocks_missing"]

    # 950 blocks are in use, and 85 % of the cache may be; a layer makes 70
    assert layers(0) == (8, 118), "a step, if fewer would do"
    assert layers(600) == (12, 824)
    assert layers(2000) == (16, 2471), "no more than the mode allows"


def test_a_new_epoch_owes_nothing_to_the_old_one() -> None:
    hand = Hand()
    hand.see(BURST, windows=3)
    again = replace(BURST, epoch=2)
    assert hand.see(again, windows=2) is None
    assert hand.see(again) is not None
    hand.answer("running", "late", epoch=1)
    assert hand.state.tracks["m@w0"].pending.keys() == {"morph-2"}


def test_metrics_of_an_epoch_that_is_over_are_not_judged() -> None:
    hand = Hand()
    hand.answer("running", "by-hand", epoch=2)
    assert hand.see(BURST, windows=50) is None
    assert hand.state.tracks["m@w0"].epoch == 2


def test_instances_are_judged_each_on_its_own() -> None:
    hand = Hand()
    other = replace(EASE, instance="m@w1", worker="w1")
    hand.see(BURST, windows=1)
    hand.see(BURST, other, windows=2)
    assert [(d.instance, d.lever) for _, d in hand.decisions] == [("m@w0", "swap_down")]
    hand.see(BURST, other)
    assert [d.instance for _, d in hand.decisions] == ["m@w0", "m@w1"]


# --------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("outcome", ["deferred", "failed", "conflict"])
def test_a_refused_lever_rests_longer_each_time(outcome: MorphOutcome) -> None:
    hand = Hand(cooldown_s=2)
    for _ in range(600):
        if hand.see(BURST):
            hand.answer(outcome)
    times = [at_s for at_s, _ in hand.decisions]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert pauses[:5] == [4, 8, 16, 32, 60]


def test_a_refused_way_back_does_not_hold_up_relief() -> None:
    hand = Hand(cooldown_s=2)
    hand.see(EASE, windows=3)
    hand.answer("deferred")
    relieved = hand.see(BURST, windows=4)
    assert relieved is not None
    assert relieved.lever == "swap_down"


def test_an_applied_morph_ends_the_rests() -> None:
    hand = Hand(cooldown_s=1)
    for outcome in ("deferred", "deferred", "applied"):
        while not hand.see(BURST):
            pass
        hand.answer(outcome)
    assert hand.see(BURST, windows=2) is None
    assert hand.see(BURST) is not None


def test_a_stale_answer_is_no_refusal() -> None:
    hand = Hand(cooldown_s=1)
    hand.see(BURST, windows=3)
    hand.answer("stale")
    assert hand.see(BURST, windows=2) is not None


def test_layers_that_went_back_too_early_wait_longer_the_next_time() -> None:
    hand = Hand(cooldown_s=2)
    for _ in range(4):
        while not hand.see(EASE):
            pass
        hand.answer("applied")
        while not hand.see(BURST):
            pass
        hand.answer("applied")
    times = [at_s for at_s, decision in hand.decisions if decision.lever == "swap_down"]
    ups = [at_s for at_s, decision in hand.decisions if decision.lever == "swap_up"][1:]
    waits = [up - down for down, up in zip(times, ups, strict=False)]
    assert waits == [4, 8, 16]
    hand.pass_s(600)  # long ago is forgotten
    assert hand.see(EASE, windows=3) is not None


# --------------------------------------------------------------------------- modes


def rules(mode: Mode, num_layers: int = 32, **policy: float) -> Rules:
    found = rules_of(Policy(mode=mode, **policy), num_layers)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_the_modes_go_different_ways_and_distances() -> None:
    accuracy, default, performance = rules("accuracy"), rules("default"), rules("performance")
    assert (accuracy.step_layers, default.step_layers, performance.step_layers) == (4, 8, 16)
    assert (accuracy.max_layers, default.max_layers, performance.max_layers) == (8, 16, 32)
    assert accuracy.kv_usage_high > default.kv_usage_high == performance.kv_usage_high == 0.85
    assert accuracy.windows == default.windows > performance.windows
    for one in (accuracy, default, performance):
        assert one.kv_usage_low < one.kv_usage_after < one.kv_usage_high


def test_what_the_policy_says_wins_over_its_mode() -> None:
    own = rules("accuracy", step_layers=3, max_layers=20)
    assert (own.step_layers, own.max_layers) == (3, 20)
    assert rules("performance", num_layers=8, max_layers=20).max_layers == 8


def test_every_mode_can_swap_a_model_of_one_layer() -> None:
    for mode in ("accuracy", "default", "performance"):
        one = rules(mode, num_layers=1)
        assert (one.step_layers, one.max_layers) == (1, 1)


def test_what_is_unknown_of_the_pages_is_not_spent() -> None:
    view: View = replace(CALM, layer_pages={"full": 200}, pages_free=1000)
    assert view.pages_spare == 0
    assert replace(view, variants=("full",)).pages_spare == 1000
