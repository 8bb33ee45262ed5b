"""Requests that wait for KV blocks: moved where there is room, for which the reflex takes no loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bus.levers import LeverPlan
from bus.messages import LayerShape
from bus.policy import Policy
from controller.morphing.envelopes import envelopes
from controller.morphing.groups import Group
from controller.morphing.pressure import MoveDecision, PressureState, relieve_pressure
from controller.morphing.track import Freshness, PendingMorph, State, Track
from controller.planning.lever_costs import LeverCosts
from tests.support.parallelism_groups import group, live, worker_card

FRESHNESS = Freshness(stale_s=5.0, gap_s=7.0)


def worker(name: str, used: int, queued: int = 0, **changes: Any) -> Group:
    """100 blocks of 10 tokens; `used` and `queued` in blocks. A layer in int8 frees 20."""
    one = group(
        name,
        kv_tokens=1000,
        used_tokens=10 * used,
        queued_tokens=10 * queued,
        waiting=4.0 if queued else 0.0,
        running=5.0,
        block_tokens=10,
        layers=(LayerShape(),) * 4,
        tokens_per_s=50.0,
    )
    return replace(one, layer_blocks={"int8": 20.0}, losses={"int8": 0.0004}, **changes)


def judged(
    *groups: Group, state: PressureState | None = None, at_s: float = 100.0, **policy: Any
) -> tuple[PressureState, list[MoveDecision], list[LeverPlan]]:
    state = state or PressureState()
    return relieve_pressure(state, groups, Policy(**policy), at_s, FRESHNESS, LeverCosts())


def test_what_waits_goes_to_an_instance_with_room_and_no_loss_is_taken_for_it() -> None:
    state, (move,), (plan,) = judged(worker("w0", 95, 30), worker("w1", 10))
    assert (move.instance, move.epoch, move.numbers["tokens"]) == ("m@w0", 1, 250)
    assert move.numbers["queued_tokens"] == 300
    assert move.reason.startswith(
        "4 requests wait for 25 KV blocks: prompts of 250 tokens go to m@w1; weighed"
    )
    assert state.moved == {"m@w0": 25} and plan.taken[0].lever == "move"
    assert [one.lever for one in move.plan.taken] == ["move"]  # which its event has
    assert "m@w0" in state.moved_s


def test_a_move_is_ordered_again_when_metrics_can_show_what_it_did() -> None:
    there = worker("w0", 95, 30), worker("w1", 10)
    state, _, _ = judged(*there)
    state, moves, news = judged(*there, state=state, at_s=100.5)
    assert (moves, news) == ([], [])  # nothing else is taken than before
    assert state.moved == {}  # what is still missing is the reflex's
    _, moves, _ = judged(*there, state=state, at_s=101.0)
    assert len(moves) == 1


def test_without_room_elsewhere_the_reflex_may_take_loss() -> None:
    state, moves, (plan, other) = judged(worker("w0", 95, 30), worker("w1", 95, 30))
    assert not moves and not state.moved
    assert [one.lever for one in (*plan.taken, *other.taken)] == ["swap", "swap"]
    calm, _, news = judged(worker("w0", 50), state=state)
    assert calm.plans == {} and news == []


def test_other_models_old_reports_and_manual_mode_get_no_move() -> None:
    full = worker("w0", 95, 30)
    assert judged(full, replace(worker("w1", 10), model="other"))[1] == []
    assert judged(full, worker("w1", 10, age_s=6.0))[1] == []
    assert judged(full, worker("w1", 10), mode="manual") == (PressureState(), [], [])


def test_members_that_become_a_group_keep_their_layers() -> None:
    """Layers would differ again, or a swap of the reflex would stand in the way."""
    state = State(tracks={"m@w0": Track(1, 0.0, pending={"s1": PendingMorph("level", 100.0)})})
    state = state.with_track("m@w1", Track(1, 0.0, levelled_s=99.0))
    assert state.reshaping(100.0) == {"m@w0", "m@w1"}
    assert state.reshaping(120.0) == {"m@w0"}  # a worker that is silent for a minute is given up
    cards = live(worker_card("w0", variants=["full", "int8"]), worker_card("w1", variants=["full", "int8"]))
    found = envelopes(cards, Policy(), {}, moved={"m@w0": 7}, held={"m@w1"})
    assert [found[name][1].policy.mode for name in ("m@w0", "m@w1")] == ["default", "manual"]
    assert [found[name][1].moved_blocks for name in ("m@w0", "m@w1")] == [7, 0]
