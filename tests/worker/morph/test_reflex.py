"""The reflex as a function: what is pressure, how much is swapped, and when layers go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.messages import PARTS
from bus.morphs import HALF_S
from bus.policy import RELIEF_SHARE, Envelope, Mode, Policy, Slowdown
from bus.precisions import Precision
from worker.morph import reflex, sizing
from worker.morph.losses import losses_of
from worker.morph.plan import Half
from worker.morph.reflex import Load, Need, ReflexState, Withheld
from worker.morph.sizing import Decision, KVState, Shape

LAYERS = 8
PAGES = {"full": 32, "int8": 8, "int4": 4, "int3": 3}
HALVES = [Half(layer, part) for layer in range(LAYERS) for part in PARTS]
FULL: dict[Half, Precision] = dict.fromkeys(HALVES, "full")

CALM = Load(at_s=100.0, kv_blocks=100, kv_used=60, kv_needed=70, running=10, residence_s=4.0)
BURST = replace(CALM, kv_used=95, kv_needed=180, waiting=9, waited_s=0.05)
SLIGHT = replace(BURST, residence_s=0.4)  # blocks come free in time: a wait of 0.39 s
EASE = replace(CALM, kv_used=10, kv_needed=12, running=2)
IDLE = replace(CALM, kv_used=0, kv_needed=0, running=0)


def policy(mode: Mode = "default", **fields: Any) -> Policy:
    made = Policy(mode=mode, **fields)
    return made.in_force() or made


def envelope(mode: Mode = "default", **fields: Any) -> Envelope:
    precisions: list[Precision] = ["int8", "int4"]
    return Envelope(
        id="e",
        epoch=1,
        instance="m@w0",
        policy=policy(mode, **fields),
        precisions=precisions,
        kv_precisions=["int8"],
    )


def kv(**fields: Any) -> KVState:
    """Return a KV cache of 100 blocks that can be one of 190."""
    return KVState(**{"blocks": {"full": 100, "int8": 190}, "loss": 0.0002, **fields})


def shape(halves: dict[Half, Precision] | None = None, **fields: Any) -> Shape:
    default: dict[str, Any] = {
        "halves": halves or FULL,
        "losses": losses_of(LAYERS, PAGES, {}),  # type: ignore[arg-type]
        "pages": lambda half, precision: PAGES[precision],
        "order": range(LAYERS),
        "pages_per_block": 8.0,
        "min_blocks": 20,
    }
    return Shape(**(default | fields))


def due(load: Load, steps: int = 3, state: ReflexState | None = None, **fields: Any) -> list[Need]:
    """Return what is due after so many such steps."""
    state, needs = state or ReflexState(preemptions=load.preemptions), list[Need]()
    for _ in range(steps):
        state, needs = reflex.judge(state, load, envelope(**fields))
    return needs


def relief(
    load: Load = BURST, of: Shape | None = None, *, may_lose: bool = True, **fields: Any
) -> Decision | None:
    found = weighed(load, of, may_lose=may_lose, **fields)
    assert not isinstance(found, Withheld)
    return found


def weighed(
    load: Load, of: Shape | None = None, *, cause: Any = "queue_delay", may_lose: bool = True, **fields: Any
) -> Decision | Withheld | None:
    need = Need("relief", cause, "words")
    return sizing.relieve(ReflexState(), load, of or shape(), envelope(**fields), need, may_lose=may_lose)


def back(load: Load, of: Shape, cause: Any = "ease", **fields: Any) -> Decision | None:
    return sizing.restore(ReflexState(), load, of, envelope(**fields), Need("return", cause, "words"))


# ------------------------------------------------------------------------------------- what is pressure


def test_pressure_must_show_in_steps_in_a_row() -> None:
    assert due(SLIGHT, steps=2) == []
    (need,) = due(SLIGHT, steps=3)
    assert (need.goal, need.cause) == ("relief", "queue_delay")
    state = ReflexState(pressure=2)
    state, _ = reflex.judge(state, CALM, envelope())
    assert due(SLIGHT, steps=2, state=state) == []
    assert due(SLIGHT, steps=1, mode="performance")


def test_a_long_predicted_wait_is_acted_on_at_once_since_the_next_step_may_be_long() -> None:
    assert reflex.urgency(SLIGHT, policy()) < 1.0 == reflex.urgency(BURST, policy())
    assert [need.goal for need in due(BURST, steps=1)] == ["relief"]
    assert due(replace(BURST, waiting=0, kv_used=85), steps=1) == []  # nobody waits


def test_pressure_that_lasts_is_acted_on_after_fewer_long_steps() -> None:
    state, needs = ReflexState(), list[Need]()
    for at_s in (100.0, 100.03, 100.06):
        assert needs == []
        state, needs = reflex.judge(state, replace(SLIGHT, at_s=at_s), envelope(windows=1000))
    assert [need.goal for need in needs] == ["relief"]
    state, needs = reflex.judge(state, replace(CALM, at_s=100.3), envelope())
    state, needs = reflex.judge(state, replace(SLIGHT, at_s=100.6), envelope())
    assert needs == []  # a row of its own
    _, needs = reflex.judge(state, replace(SLIGHT, at_s=100.7), envelope())
    assert needs  # steps of 100 ms: the second


def test_the_wait_is_predicted_from_what_is_missing_and_how_fast_blocks_come_free() -> None:
    # 95 blocks come free in 4 s, 80 are missing.
    assert BURST.predicted_wait_s == pytest.approx(0.05 + 80 * 4 / 95)
    assert replace(BURST, kv_needed=100).predicted_wait_s == 0.0  # it fits: it waits for something else
    assert replace(BURST, residence_s=0.0).predicted_wait_s == 0.05  # no history
    (need,) = due(BURST)
    assert "3.42 s by prediction, above 0.1 s: 180 KV blocks are needed of 100" in need.words


def test_a_queue_for_compute_is_pressure_only_where_blocks_are_missing_too() -> None:
    late = replace(CALM, waiting=3, prompt_tokens=1200, prompt_rate=1000.0)
    assert late.predicted_compute_s == pytest.approx(1.2)  # above half of 2 s
    assert due(late) == [] and reflex.urgency(late, policy()) == 0.0
    why = reflex.waits_for_compute(late, envelope())
    assert why and why.reason == (
        "requests wait for compute, not for KV blocks: 1200 prompt tokens are due at 1000 a second, so the "
        "next request waits for 1.20 s, above half of the objective of 2 s; 70 KV blocks are needed of 100"
    )
    assert reflex.waits_for_compute(replace(late, prompt_tokens=900), envelope()) is None
    assert reflex.waits_for_compute(late, envelope("manual")) is None
    both = replace(late, kv_needed=101, residence_s=0.01)
    assert both.predicted_wait_s < 0.1 and reflex.waits_for_compute(both, envelope()) is None
    (need,) = due(both)
    assert need.cause == "queue_delay" and need.words.endswith("and KV blocks are missing too")
    assert reflex.urgency(both, policy()) == 1.0


def test_a_full_cache_is_pressure_before_anybody_waits() -> None:
    (need,) = due(replace(CALM, kv_used=86))
    assert need.cause == "kv_usage"
    assert due(replace(CALM, kv_used=85)) == []


def test_a_preemption_is_pressure_for_a_while() -> None:
    state, _ = reflex.judge(ReflexState(), replace(CALM, preemptions=1), envelope())
    assert [need.cause for need in due(replace(CALM, preemptions=1), state=state)] == ["preemptions"]
    later = replace(CALM, preemptions=1, at_s=CALM.at_s + 2)
    assert due(later, state=state) == []


def test_what_is_expected_is_pressure_may_lose_less_and_holds_layers_where_they_are() -> None:
    soon = replace(CALM, kv_expected=300)
    (need,) = due(soon)
    assert (need.cause, need.words) == ("forecast", "300 KV blocks are expected to be needed of 100")
    assert due(replace(CALM, kv_expected=85)) == []
    assert due(EASE) and due(replace(EASE, kv_expected=70)) == []

    def loss(need: Need) -> float:
        decision = sizing.relieve(
            ReflexState(), soon, shape(), envelope(loss_budget=0.01), need, may_lose=True
        )
        assert isinstance(decision, Decision)
        return float(decision.numbers["loss"])

    assert loss(need) <= 0.0025 < loss(replace(need, cause="queue_delay")) <= 0.01


def test_manual_does_nothing() -> None:
    assert due(BURST, mode="manual") == due(IDLE, mode="manual") == []


def test_the_share_of_time_follows_the_predicted_wait() -> None:
    quarter = policy(ttft_slo_s=2.0)
    assert reflex.urgency(CALM, quarter) == 0.0
    load = replace(BURST, residence_s=0.0, waited_s=0.1)
    assert reflex.urgency(load, quarter) == pytest.approx(0.2)
    assert reflex.urgency(BURST, quarter) == 1.0
    assert reflex.urgency(CALM, quarter, is_relieving=True) == RELIEF_SHARE
    assert reflex.urgency(BURST, quarter, is_relieving=True) == 1.0


def test_pressure_during_a_relief_that_was_too_small_is_acted_on_at_its_end() -> None:
    state = reflex.decided(ReflexState(), "swap_down", BURST.at_s)
    for _ in range(3):
        state, _ = reflex.judge(state, SLIGHT, envelope())
    state = reflex.ended(state, "swap_down", is_applied=True, seconds=0.1, at_s=BURST.at_s)
    assert due(SLIGHT, steps=1, state=state)
    assert due(CALM, steps=1, state=state) == []  # the relief was enough


def test_no_loss_is_taken_for_what_is_over_before_a_half_is_swapped() -> None:
    (need,) = due(SLIGHT)  # 80 blocks come free in 0.34 s
    slow, quick = ReflexState(relief_half_s=0.4), ReflexState(relief_half_s=0.3)
    why = reflex.soon_over(slow, SLIGHT, need)
    assert why and why.reason == (
        "the 80 KV blocks that are missing come free within 0.34 s, and a half of a layer takes 0.40 s"
    )
    assert reflex.soon_over(quick, SLIGHT, need) is None
    assert reflex.soon_over(slow, replace(SLIGHT, arriving=99.0), need) is None
    assert reflex.soon_over(slow, replace(SLIGHT, residence_s=0.0), need) is None  # unknown
    assert reflex.soon_over(slow, SLIGHT, replace(need, cause="kv_usage")) is None


def test_long_generations_after_short_ones_withhold_no_relief_for_longer_than_a_half_takes() -> None:
    (need,) = due(SLIGHT)
    state = ReflexState(relief_half_s=0.4)
    waiting = [replace(SLIGHT, waited_s=waited_s) for waited_s in (0.1, 0.4, 0.41, 5.0)]
    assert [reflex.soon_over(state, load, need) is not None for load in waiting] == [True, True, False, False]


def test_a_half_is_expected_to_take_as_long_as_in_the_last_relief() -> None:
    state = reflex.ended(ReflexState(), "swap_down", is_applied=True, seconds=0.6, at_s=100.0, halves=3)
    assert state.relief_half_s == pytest.approx(0.2)
    state = reflex.ended(state, "swap_down", is_applied=False, seconds=9.0, at_s=110.0)
    assert state.relief_half_s == pytest.approx(0.2)


# ------------------------------------------------------------------------------------- how much


def test_relief_is_as_large_as_what_is_missing() -> None:
    decision = relief(of=shape(pages_per_block=2.0))
    assert decision and decision.lever == "swap_down"
    missing = -(-180 * 100 // 85) - 100  # so that the use falls to 0.85
    assert decision.numbers["blocks_missing"] == missing
    saved = sum(32 - PAGES[one] for one in decision.halves.values())
    assert missing * 2 <= saved < missing * 2 + 24 + LAYERS
    small = relief(replace(BURST, kv_needed=100), shape(pages_per_block=2.0))
    assert small and len(small.halves) < len(decision.halves)


def test_relief_is_for_what_comes_until_it_is_done_too() -> None:
    """Ten requests run and nine wait, of 9.47 blocks each: 20 a second ask for 189, and 95 / 4 come free."""
    burst = replace(BURST, arriving=20.0)
    assert burst.kv_coming(1.0) == int(20 * 180 / 19 - 95 / 4)
    coming = burst.kv_coming(reflex.AHEAD_S)
    before, found = relief(of=shape(pages_per_block=2.0)), relief(burst, shape(pages_per_block=2.0))
    assert before and found and before.numbers["blocks_coming"] == 0
    assert found.numbers["blocks_missing"] == -(-(180 + coming) * 100 // 85) - 100
    assert len(found.halves) > len(before.halves)
    assert f"({coming} of them for what comes next)" in found.reason
    # Relief that takes long must suffice for longer; blocks that come free as fast as they are asked for do.
    assert ReflexState(relief_took_s=0.5).ahead_s == 0.5 and ReflexState(relief_took_s=9.0).ahead_s == 1.0
    assert replace(burst, residence_s=0.4).kv_coming(1.0) == 0
    assert replace(IDLE, arriving=20.0).kv_coming(1.0) == 0
    most = relief(replace(burst, arriving=1e6))
    assert most and most.numbers["loss"] <= 0.0025  # of the budget


def test_layers_that_what_comes_next_will_need_do_not_go_back() -> None:
    few = replace(EASE, kv_used=40, kv_needed=40, running=20)
    assert back(few, swapped("int8")) and back(replace(few, arriving=10.0), swapped("int8"))
    assert back(replace(few, arriving=100.0), swapped("int8")) is None


def test_eight_bits_go_before_four_and_the_budget_ends_it() -> None:
    decision = relief(replace(BURST, kv_needed=10_000))
    assert decision
    assert sorted(decision.halves.values()).count("int8") == 15  # all that 0.25 % allow: one in four bits
    assert decision.numbers["loss"] <= 0.0025
    more = relief(replace(BURST, kv_needed=10_000), mode="performance")
    assert more and set(more.halves.values()) == {"int4"}
    assert relief(replace(BURST, kv_needed=10_000), loss_budget=1e-6) is None


def test_a_budget_that_is_set_wins_over_that_of_the_mode() -> None:
    decision = relief(replace(BURST, kv_needed=10_000), mode="accuracy", loss_budget=0.05)
    assert decision and set(decision.halves.values()) == {"int4"}
    assert relief(mode="performance", loss_budget=0.0) is None


def test_a_limit_of_layers_is_kept() -> None:
    decision = relief(replace(BURST, kv_needed=10_000), max_layers=2)
    assert decision and {half.layer for half in decision.halves} == {0, 1}


def test_a_request_with_a_floor_forbids_what_is_below_it_and_nothing_else() -> None:
    assert relief(of=shape(floor="full")) is None
    decision = relief(replace(BURST, kv_needed=10_000), shape(floor="int8"), mode="performance")
    assert decision and set(decision.halves.values()) == {"int8"}


def test_free_pages_go_first() -> None:
    decision = relief(of=shape(pages_spare=8 * 4 + 3))
    assert decision and (decision.lever, decision.blocks) == ("resize", 104)
    assert relief(of=shape(pages_spare=7)).lever == "swap_down"  # type: ignore[union-attr]


def test_a_stale_envelope_takes_no_more_loss_and_its_free_pages() -> None:
    assert relief(may_lose=False) is None
    assert relief(of=shape(pages_spare=80), may_lose=False).lever == "resize"  # type: ignore[union-attr]
    assert reflex.is_stale(envelope(), granted_s=0.0, at_s=60.0)
    assert not reflex.is_stale(envelope(), granted_s=0.0, at_s=59.0)


def test_an_envelope_without_precisions_allows_nothing() -> None:
    nothing = replace(envelope(), precisions=[])
    need = Need("relief", "queue_delay", "words")
    assert sizing.relieve(ReflexState(), BURST, shape(), nothing, need, may_lose=True) is None


@pytest.mark.parametrize(
    ("code", "fields", "of"),
    [
        ("precisions", {"precisions": []}, {}),
        ("precisions", {}, {"losses": losses_of(LAYERS, ["full"], {})}),
        ("floor", {}, {"floor": "full"}),
        ("lowest", {}, {"halves": dict.fromkeys(HALVES, "int4")}),
        (
            "max_layers",
            {"policy": policy(max_layers=1)},
            {"halves": FULL | dict.fromkeys(HALVES[:2], "int4")},
        ),
        ("loss_budget", {"policy": policy(loss_budget=0.0)}, {}),
    ],
)
def test_why_nothing_is_done_under_pressure_is_told(
    code: str, fields: dict[str, Any], of: dict[str, Any]
) -> None:
    about = ReflexState(), BURST, shape(**of), replace(envelope(), **fields)
    need = Need("relief", "queue_delay", "words")
    assert sizing.relieve(*about, need, may_lose=True) is None
    why = sizing.why_nothing(*about, may_lose=True)
    assert why and why.code == code
    stale = sizing.why_nothing(*about, may_lose=False)
    assert stale and stale.code == "stale"


def test_a_quantised_checkpoint_has_nothing_to_give_and_nothing_to_go_back_to() -> None:
    of = shape(dict.fromkeys(HALVES, "int4"), losses=losses_of(LAYERS, ["int4"], {}, "int4"))
    assert of.losses.precisions == ["int4"] and of.losses.total(of.halves) == 0.0
    need = Need("relief", "queue_delay", "words")
    about = ReflexState(), BURST, of, replace(envelope(), precisions=["int8", "int4"])
    assert sizing.relieve(*about, need, may_lose=True) is None
    why = sizing.why_nothing(*about, may_lose=True)
    assert why and why.code == "lowest"
    assert back(EASE, of) is None
    assert back(replace(EASE, floor_refused="full"), of, "precision_floor") is None
    assert relief(of=replace(of, pages_spare=80)).lever == "resize"  # type: ignore[union-attr]


def test_what_is_withheld_is_told_once_in_a_burst() -> None:
    state, told = ReflexState(), list[float]()
    for at_s in (0.0, 0.1, 5.0, 14.0, 24.0):
        state, is_new = reflex.withhold(state, reflex.Withheld("floor", ""), at_s)
        told += [at_s] * is_new
    assert told == [0.0, 24.0]
    _, is_new = reflex.withhold(state, reflex.Withheld("loss_budget", ""), 24.0)
    assert is_new


# ------------------------------------------------------------------------------------- the way back


def test_an_idle_instance_goes_back_at_once_and_a_calm_one_after_steps_in_a_row() -> None:
    assert [need.goal for need in due(IDLE, steps=1)] == ["return"]
    assert due(EASE, steps=2) == []
    assert [need.goal for need in due(EASE, steps=3)] == ["return"]
    assert due(CALM) == []  # between the thresholds


def test_a_return_waits_for_ten_times_what_the_relief_took() -> None:
    state = reflex.ended(ReflexState(), "swap_down", is_applied=True, seconds=0.2, at_s=100.0)
    assert state.return_due_s(policy()) == pytest.approx(102.0)
    slow = reflex.ended(ReflexState(), "swap_down", is_applied=True, seconds=9.0, at_s=100.0)
    assert slow.return_due_s(policy()) == pytest.approx(105.0)  # at most the cool-down


def test_layers_that_went_back_too_early_wait_longer_each_time() -> None:
    state, waits = ReflexState(), []
    for _ in range(6):
        state = reflex.decided(state, "swap_up", 100.0)
        state = reflex.decided(state, "swap_down", 101.0)
        waits.append(state.return_due_s(policy()) - 101.0)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_what_was_swapped_by_hand_stands_until_something_runs_and_relief_is_not_held() -> None:
    state = reflex.ordered(ReflexState(), 0.0, 0.0)
    assert due(IDLE, state=state) == due(replace(IDLE, at_s=1e6), steps=100, state=state) == []
    assert due(BURST, state=state)
    assert due(EASE, state=state)
    for mode in ("default", "manual"):
        ran, _ = reflex.judge(state, EASE, envelope(mode))
        assert due(IDLE, steps=1, state=ran)


def swapped(precision: Precision, count: int = 4) -> Shape:
    return shape(FULL | dict.fromkeys(HALVES[:count], precision))


def test_as_many_go_back_as_leave_the_use_low_enough() -> None:
    everything = back(IDLE, swapped("int8"))
    assert everything and everything.halves == dict.fromkeys(HALVES[:4], "full")
    # 76 of 100 blocks are needed, and 0.7625 may be in use: 0 blocks can go.
    assert back(replace(EASE, kv_used=76, kv_needed=77), swapped("int8")) is None
    some = back(replace(EASE, kv_used=71, kv_needed=71, running=10), swapped("int8"))
    assert some and len(some.halves) == 2  # 6 blocks make 48 pages
    # One more like these takes 14.2 blocks, which is pressure already.
    assert back(replace(EASE, kv_used=71, kv_needed=71, running=5), swapped("int8")) is None


def test_four_bits_become_eight_before_eight_become_full() -> None:
    mixed = shape(FULL | {HALVES[0]: "int4", HALVES[1]: "int8"})
    some = back(replace(EASE, kv_used=75, kv_needed=75, running=10), mixed)  # a block makes 8 pages
    assert some and some.halves == {HALVES[0]: "int8"}


def test_nothing_goes_back_below_the_blocks_of_the_longest_sequence() -> None:
    assert back(IDLE, replace(swapped("int8"), min_blocks=100)) is None


def test_what_was_deployed_in_few_bits_goes_back_to_these() -> None:
    rest = replace(envelope(), resting="int8")
    need = Need("return", "ease", "words")
    assert sizing.restore(ReflexState(), IDLE, swapped("int8"), rest, need) is None
    down = sizing.restore(ReflexState(), IDLE, swapped("int4"), rest, need)
    assert down and set(down.halves.values()) == {"int8"}


def test_a_refused_floor_brings_layers_up_to_it_even_under_pressure() -> None:
    pressed = replace(BURST, floor_refused="int8")
    first, second = due(pressed)
    assert (first.cause, second.goal) == ("precision_floor", "relief")
    decision = back(replace(pressed, kv_used=90), swapped("int4"), "precision_floor")
    assert decision and decision.halves == dict.fromkeys(HALVES[:4], "int8")
    assert back(pressed, swapped("int8"), "precision_floor") is None  # relief is next


# ------------------------------------------------------------------------------------- refusals


def test_a_refused_lever_rests_longer_each_time_and_others_go_on() -> None:
    state, at_s, rests = ReflexState(), 100.0, []
    for _ in range(4):
        state = reflex.ended(state, "swap_down", is_applied=False, seconds=1.0, at_s=at_s)
        rests.append(state.pauses["swap_down"].until_s - at_s)
        at_s = state.pauses["swap_down"].until_s
    assert rests == pytest.approx([0.1, 0.2, 0.4, 0.8])
    need = Need("relief", "queue_delay", "words")
    paused = replace(BURST, at_s=at_s - 0.01)
    assert sizing.relieve(state, paused, shape(), envelope(), need, may_lose=True) is None
    spare = shape(pages_spare=80)
    assert sizing.relieve(state, paused, spare, envelope(), need, may_lose=True)


def test_an_applied_resize_is_not_asked_for_again_at_once() -> None:
    state = reflex.ended(ReflexState(), "resize", is_applied=True, seconds=0.1, at_s=BURST.at_s)
    need = Need("relief", "queue_delay", "words")
    decision = sizing.relieve(state, BURST, shape(pages_spare=80), envelope(), need, may_lose=True)
    assert isinstance(decision, Decision) and decision.lever == "swap_down"


def test_a_decision_says_what_was_seen() -> None:
    decision = relief()
    assert decision and decision.cause == "queue_delay"
    assert decision.reason.startswith(
        "words: 15 halves to int8, 1 halves to int4 for about 48 KV blocks, of 112"
    )
    assert decision.numbers["kv_needed"] == 180 and decision.numbers["policy_revision"] == 0


# ------------------------------------------------------------------------------------- what it is worth

# 80 blocks are missing; prompts of so many tokens are due, at 1000 in a second.
PROMPTS = replace(BURST, prompt_tokens=500, prompt_rate=1000.0, members=2)
BUSY = replace(PROMPTS, prompt_tokens=900, residence_s=0.4)


def test_no_layer_loses_bits_where_prompts_take_longer_than_blocks() -> None:
    """One misses blocks for 0.05 s already; 100 come free in 4 s, so the 112 that are missing in 4.48 s."""
    found = relief(PROMPTS)
    assert found and found.numbers["wait_without_s"] == 4.53
    withheld = weighed(BUSY)
    assert isinstance(withheld, Withheld) and withheld.code == "price"
    assert withheld.reason == (
        "with 16 halves to int8 the requests that wait would have their first tokens after 1.06 s, and "
        "without after 0.90 s"
    )
    assert isinstance(weighed(BUSY, ttft_slo_s=1.0), Decision)  # the objective is in danger
    assert isinstance(weighed(replace(BUSY, members=1)), Decision)  # and gateways may have more of a queue


def test_no_layer_goes_to_bits_that_make_the_wait_longer() -> None:
    slow: dict[Precision, Slowdown] = {"int8": Slowdown(1.0, 1.0), "int4": Slowdown(9.0, 9.0)}
    need = Need("relief", "queue_delay", "words")

    def halves(load: Load, **fields: Any) -> set[Precision]:
        granted = replace(envelope("performance"), **fields)
        found = sizing.relieve(ReflexState(), load, shape(), granted, need, may_lose=True)
        assert isinstance(found, Decision)
        return set(found.halves.values())

    many = replace(PROMPTS, kv_needed=10_000)
    assert halves(many) == {"int4"}
    assert halves(many, slowdowns=slow) == {"int8"}
    assert halves(replace(many, prompt_rate=0.0), slowdowns=slow) == {"int4"}  # nothing is predicted


@pytest.mark.parametrize("cause", ["kv_usage", "preemptions", "forecast"])
def test_relief_that_no_queue_asks_for_is_not_weighed(cause: Any) -> None:
    assert isinstance(weighed(BUSY, cause=cause), Decision)


def test_where_halves_are_too_dear_the_kv_cache_may_lose_bits() -> None:
    found = relief(BUSY, shape(kv=kv(loss=0.0024)))
    assert found and found.lever == "kv_down"


def test_the_work_of_a_half_is_that_of_the_last_relief() -> None:
    about: dict[str, Any] = {"is_applied": True, "seconds": 0.6, "at_s": 100.0}
    state = reflex.ended(ReflexState(), "swap_down", **about, halves=3, work_s=0.06)
    assert ReflexState().half_work_s == HALF_S and state.half_work_s == pytest.approx(0.02)
    state = reflex.ended(state, "kv_down", **about)
    assert state.half_work_s == pytest.approx(0.02)


# ------------------------------------------------------------------------------------- the KV cache


def test_the_kv_cache_loses_bits_where_that_costs_less_for_each_block_than_halves() -> None:
    decision = relief(of=shape(kv=kv()))
    assert decision and (decision.lever, decision.kv, decision.halves) == ("kv_down", "int8", {})
    assert decision.numbers["blocks_after"] == 190 and decision.numbers["loss"] == 0.0002
    assert "the KV cache to int8 for about 90 KV blocks, of 112 that are missing" in decision.reason
    dear = relief(replace(BURST, kv_needed=110), shape(kv=kv(loss=0.002)))  # ten halves in int8 cost 0.0003
    assert dear and dear.lever == "swap_down"


def test_the_loss_of_the_kv_cache_and_of_halves_share_one_budget() -> None:
    of = shape(kv=kv(form="int8", loss=0.0023))
    decision = relief(replace(BURST, kv_needed=400), of)
    assert decision and decision.lever == "swap_down"
    assert 0.0023 < decision.numbers["loss"] <= 0.0025 and len(decision.halves) < len(HALVES)
    every = relief(replace(BURST, kv_needed=400), shape())
    assert every and len(every.halves) == len(HALVES)


def test_a_cache_that_is_half_converted_pays_its_loss_once() -> None:
    halfway = kv(form=None, loss=0.0015)  # the budget is 0.0025
    decision = relief(replace(BURST, kv_needed=110), shape(kv=halfway))
    assert decision and (decision.lever, decision.numbers["loss"]) == ("kv_down", 0.0015)


@pytest.mark.parametrize(
    "fields",
    [{"loss": None}, {"loss": 0.003}, {"blocks": {}}, {"form": "int8"}],
    ids=["never measured", "above the budget", "cannot be converted", "is already"],
)
def test_otherwise_layers_are_what_is_left(fields: dict[str, Any]) -> None:
    decision = relief(of=shape(kv=kv(**fields)))
    assert decision and decision.lever == "swap_down"


def test_a_request_that_insists_on_full_precision_keeps_the_kv_cache_in_it() -> None:
    assert relief(of=shape(kv=kv(), floor="full")) is None
    decision = relief(of=shape(kv=kv(), floor="int8"))
    assert decision and decision.lever == "kv_down"
    no_word = replace(envelope(), kv_precisions=[])
    need = Need("relief", "queue_delay", "words")
    found = sizing.relieve(ReflexState(), BURST, shape(kv=kv()), no_word, need, may_lose=True)
    assert isinstance(found, Decision) and found.lever == "swap_down", "the controller allows no other"


def test_it_goes_back_once_what_is_needed_fits_into_fewer_blocks() -> None:
    of = shape(kv=kv(form="int8"))
    load = replace(EASE, kv_blocks=190)
    decision = back(load, of)
    assert decision and (decision.lever, decision.kv) == ("kv_up", "full")
    assert (decision.numbers["blocks_after"], decision.numbers["loss"]) == (100, 0.0)
    assert back(replace(load, kv_used=80, kv_needed=80), of) is None
    assert back(load, shape(kv=kv(form=None))), "half-way after a fault"
    assert back(load, shape(kv=kv(form="int8", rest="int8"))) is None
    exact = replace(load, floor_refused="full")
    decision = back(exact, of, "precision_floor")
    assert decision and decision.kv == "full"
    assert back(exact, shape(kv=kv(form="int8", rest="int8")), "precision_floor") is None
    assert back(replace(load, floor_refused="int8"), of, "precision_floor") is None


def test_what_regains_more_for_each_block_goes_back_first() -> None:
    halves: dict[Half, Precision] = dict.fromkeys(HALVES, "int8")  # 0.0005 for 48 blocks
    load = replace(IDLE, kv_blocks=238)
    first = back(load, shape(halves, kv=kv(form="int8", loss=0.002)))
    assert first and first.lever == "kv_up" and first.numbers["loss"] == 0.0005
    first = back(load, shape(halves, kv=kv(form="int8", loss=0.0002)))
    assert first and first.lever == "swap_up" and first.numbers["loss"] == 0.0002


def test_a_kv_cache_that_went_back_too_early_stays_longer_next_time() -> None:
    state = reflex.decided(ReflexState(), "kv_up", 100.0)
    state = reflex.decided(state, "kv_down", 110.0)
    assert state.return_due_s(policy()) > 110.0
    state = reflex.ended(state, "kv_down", True, 0.5, 111.0)
    assert (state.relieved_s, state.relief_took_s) == (111.0, 0.5)
