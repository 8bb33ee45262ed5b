"""The levers that the planner takes: situations in, plans out, without clock and Redis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.levers import NEVER_S, LeverOption, LeverPlan
from controller.planning.lever_costs import MOVE_S, KindCost, LeverCosts
from controller.planning.levers import MARGIN, weigh
from controller.planning.situation import (
    LeverSituation,
    LongNeed,
    MergeOffer,
    Objectives,
    PartOffer,
    ServingInstance,
    SwapRung,
)

INT8 = SwapRung(precision="int8", layers=8, blocks=5.0, loss=0.0001, nbytes=1000)
INT4 = SwapRung(precision="int4", layers=8, blocks=7.5, loss=0.004, nbytes=500)


def instance(name: str = "m@w0", **changes: Any) -> ServingInstance:
    base: dict[str, Any] = {
        "name": name,
        "blocks": 100,
        "used": 60,
        "needed": 60,
        "running": 6.0,
        "tokens_per_s": 160.0,
        "rungs": (INT8, INT4),
        "loss_left": 0.0025,
    }
    return ServingInstance(**(base | changes))


def pressed(name: str = "m@w0", **changes: Any) -> ServingInstance:
    """30 blocks are missing; at 10 blocks a second the queue takes 3 s."""
    return instance(name, **({"used": 95, "needed": 130, "waiting": 4.0} | changes))


def plan(*instances: ServingInstance, **changes: Any) -> LeverPlan:
    (found,) = weigh(LeverSituation(model="m", instances=instances, **changes))
    return found


def taken(found: LeverPlan) -> list[tuple[str, list[str], int]]:
    return [(one.lever, one.targets, one.blocks) for one in found.taken]


# ------------------------------------------------------------------------------------- pressure


def test_a_move_is_taken_where_another_instance_has_room_and_costs_no_loss() -> None:
    found = plan(pressed(), instance("m@w1", used=10, needed=10))
    assert taken(found) == [("move", ["m@w0", "m@w1"], 30)]
    assert (found.meets, found.wait_s) == (True, MOVE_S)
    by_lever = {one.lever: one for one in found.options}
    assert by_lever["queue"].cost_s == 4 * 3 / 2
    assert by_lever["swap"].cost_s > by_lever["move"].cost_s
    assert by_lever["merge"].refusal and by_lever["more"].refusal


def test_a_swap_is_taken_where_no_instance_has_room() -> None:
    both = weigh(LeverSituation(model="m", instances=[pressed(), pressed("m@w1")]))
    assert [taken(one) for one in both] == [
        [("swap", ["m@w0"], 30)],
        [("swap", ["m@w1"], 30)],
    ]
    assert both[0].taken[0].precision == "int8"
    assert "move: not possible" in both[0].reason


def test_kv_in_8_bits_is_weighed_by_its_loss_and_its_blocks() -> None:
    found = plan(pressed(kv_blocks=90, kv_loss=0.00005))
    assert taken(found) == [("kv", ["m@w0"], 90)] and found.taken[0].loss == 0.00005
    assert "kv m@w0: KV cache to int8" in found.reason
    assert taken(plan(pressed(kv_blocks=90, kv_loss=0.003)))[0][0] == "swap", "above what is left to lose"
    both = plan(pressed(needed=190, kv_blocks=60, kv_loss=0.0024))
    assert [one.lever for one in both.taken] in (["swap"], ["kv"]), "together they would lose too much"
    costs = LeverCosts(kinds={**LeverCosts().kinds, "kv": KindCost(duration_s=0.2, stalled_s=0.0)})
    assert taken(plan(pressed(kv_blocks=90, kv_loss=0.0), costs=costs))[0][0] == "kv"


def test_free_pages_go_before_loss() -> None:
    assert taken(plan(pressed(spare_blocks=40))) == [("resize", ["m@w0"], 40)]
    assert [one[0] for one in taken(plan(pressed(spare_blocks=5)))] == ["resize", "swap"]


def test_what_moves_leave_missing_is_swapped_for() -> None:
    found = plan(pressed(), instance("m@w1", used=80, needed=80))
    assert taken(found) == [("move", ["m@w0", "m@w1"], 5), ("swap", ["m@w0"], 25)]


def test_an_instance_is_filled_once_however_many_move_there() -> None:
    both = weigh(
        LeverSituation(
            model="m",
            instances=[pressed(rungs=()), pressed("m@w1", rungs=()), instance("m@w2", needed=45, used=45)],
        )
    )
    moved = [one for found in both for one in found.taken if one.lever == "move"]
    assert sum(one.blocks for one in moved) == 40  # 85 may be used, 45 are


def test_nothing_moves_for_a_gain_within_the_error_of_its_prediction() -> None:
    """The queue would be over in 0.3 s: a move gains 0.05 of these for each request."""
    there = instance("m@w1", used=10, needed=10)
    assert taken(plan(pressed(tokens_per_s=1600.0, rungs=()), there))[0][0] == "queue"
    assert taken(plan(pressed(tokens_per_s=400.0, rungs=()), there))[0][0] == "move"


def test_a_busy_worker_is_expected_to_swap_by_the_share_that_the_wait_gives_it() -> None:
    def swapped(**changes: Any) -> float:
        found = plan(pressed(**changes))
        return next(one.duration_s for one in found.options if one.lever == "swap")

    assert swapped(tokens_per_s=4800.0, oldest_wait_s=0.0) == pytest.approx(4 * swapped(oldest_wait_s=9.0))


def test_a_queue_that_is_soon_over_is_left_alone() -> None:
    found = plan(pressed(needed=101, waiting=1.0, tokens_per_s=16_000.0))
    assert taken(found) == [("queue", ["m@w0"], 0)] and found.meets


def test_no_loss_is_taken_beyond_what_is_left_of_the_budget() -> None:
    found = plan(pressed(loss_left=0.0003))
    (swap,) = (one for one in found.taken if one.lever == "swap")
    assert (swap.layers, swap.blocks) == (3, 15) and swap.loss <= 0.0003
    assert taken(plan(pressed(loss_left=0.0))) == [("queue", ["m@w0"], 0)]


def test_the_rate_between_waiting_and_loss_is_the_policys() -> None:
    """The whole budget for all who run is worth the objective for each of them."""
    assert taken(plan(pressed(rungs=(INT4,), loss_left=1.0, tokens_per_s=400.0)))[0][0] == "queue"
    tolerant = Objectives(loss_budget=0.5)
    assert (
        taken(plan(pressed(rungs=(INT4,), loss_left=1.0, tokens_per_s=400.0), objectives=tolerant))[0][0]
        == "swap"
    )


def test_an_instance_more_is_taken_where_the_queue_takes_longer_than_its_loading() -> None:
    """30 blocks come free in 60 s, and a free worker serves in 10 s."""
    slow = pressed(tokens_per_s=8.0, rungs=())
    found = plan(slow, spares=("w5", "w6"))
    assert taken(found) == [("more", ["w5"], 100)]
    (more,) = found.taken
    assert (more.duration_s, more.price_s, more.basis) == (10.1, 0.4, "assumed")
    assert found.wait_s == 10.1 and "more w5 " in found.reason
    assert taken(plan(pressed(tokens_per_s=80.0, rungs=()), spares=("w5",)))[0][0] == "queue"
    assert taken(plan(pressed(tokens_per_s=8.0), spares=("w5",)))[0][0] == "swap"  # it is there at once
    assert "more: not possible, no worker is free" in plan(slow, no_spare="no worker is free").reason


def test_an_instance_more_of_a_large_model_takes_longer() -> None:
    load = KindCost(duration_s=10.0, stalled_s=0.0, nbytes=10**9, basis="measured")
    costs = LeverCosts(kinds={**LeverCosts().kinds, "load": load})

    def lever(nbytes: int) -> str:
        slow = pressed(tokens_per_s=8.0, rungs=(), weight_bytes=nbytes)
        return taken(plan(slow, spares=("w5",), costs=costs))[0][0]

    assert [lever(10**9), lever(10**10)] == ["more", "queue"]


def test_what_a_swap_leaves_missing_is_for_an_instance_more() -> None:
    found = plan(pressed(tokens_per_s=8.0, loss_left=0.0003), spares=("w5",))
    assert {one[0]: one[2] for one in taken(found)} == {"swap": 15, "more": 100}


def test_one_worker_is_counted_on_once() -> None:
    slow: dict[str, Any] = {"tokens_per_s": 8.0, "rungs": ()}
    both = weigh(
        LeverSituation(model="m", instances=[pressed(**slow), pressed("m@w1", **slow)], spares=("w5",))
    )
    assert [taken(one)[0][0] for one in both] == ["more", "queue"]
    assert "more: not possible, m@w0 takes w5" in both[1].reason


def test_an_instance_where_nothing_waits_has_no_need() -> None:
    assert weigh(LeverSituation(model="m", instances=[instance(needed=130)])) == []


# ------------------------------------------------------------------------------------- long requests


def offer(*workers: str, load: float = 0.0, tp_before: int = 1, **changes: Any) -> MergeOffer:
    names = tuple(f"m@{worker}" for worker in workers)
    tp = len(names) * tp_before
    return MergeOffer(instances=names, tp_before=tp_before, tp=tp, load=load, **changes)


def test_a_group_is_made_for_a_long_request_that_nothing_else_holds() -> None:
    there = [instance(f"m@w{number}", rungs=()) for number in range(4)]
    merges = [offer("w0", "w1"), offer("w0", "w1", "w2", "w3")]
    found = plan(*there, long=LongNeed(tokens=4000), merges=merges)
    assert taken(found) == [("merge", ["m@w0", "m@w1"], 0)]
    assert found.options[0].duration_s == NEVER_S and "queue never" in found.reason


def test_a_swap_holds_a_long_request_that_needs_little_more() -> None:
    there = [instance(used=0, needed=0, running=0.0), instance("m@w1", rungs=())]
    found = plan(*there, long=LongNeed(tokens=110 * 16), merges=[offer("w0", "w1", load=6.0)])
    assert taken(found) == [("swap", ["m@w0"], 10)]
    found = plan(*there, long=LongNeed(tokens=200 * 16), merges=[offer("w0", "w1", load=6.0)])
    assert taken(found)[0][0] == "merge"


def test_a_group_that_is_soon_free_is_waited_for() -> None:
    there = [instance(running=9.0) for _ in range(4)]
    merges = [offer("w0", "w1", load=18.0)]
    assert taken(plan(*there, long=LongNeed(tokens=4000, queue_s=1.0), merges=merges))[0][0] == "queue"
    assert taken(plan(*there, long=LongNeed(tokens=4000, queue_s=500.0), merges=merges))[0][0] == "merge"


def test_groups_of_idle_and_neighbouring_workers_cost_less() -> None:
    there = [instance(f"m@w{number}", rungs=()) for number in range(4)]

    def chosen(*merges: MergeOffer) -> list[str]:
        return plan(*there, long=LongNeed(tokens=4000), merges=merges).taken[0].targets

    assert chosen(offer("w0", "w1", load=9.0), offer("w2", "w3")) == ["m@w2", "m@w3"]
    assert chosen(offer("w0", "w2", are_neighbours=False), offer("w0", "w1", load=1.0)) == ["m@w0", "m@w1"]
    assert chosen(offer("w0", "w1", halves=40, load=2.0), offer("w2", "w3", load=2.0)) == ["m@w2", "m@w3"]
    refused = plan(*there, long=LongNeed(tokens=4000), merges=[offer("w0", "w1", refusal="no room")])
    assert refused.taken[0].lever == "queue" and "merge: not possible, no room" in refused.reason


def test_several_requests_get_several_groups_where_waiting_in_turn_would_cost_more() -> None:
    there = [instance(f"m@w{number}", rungs=()) for number in range(4)]

    def chosen(count: int, *merges: MergeOffer, speed: float = 400.0) -> list[list[str]]:
        long, costs = LongNeed(tokens=4000, count=count), LeverCosts(speeds={1: speed})
        found = plan(*there, long=long, merges=merges, costs=costs)
        return [one.targets for one in found.taken]

    two = offer("w0", "w1"), offer("w2", "w3")
    assert chosen(1, *two) == [["m@w0", "m@w1"]]
    assert chosen(2, *two) == [["m@w0", "m@w1"], ["m@w2", "m@w3"]]
    assert chosen(2, *two, speed=1e6) == [["m@w0", "m@w1"]]  # the first is over at once
    four = offer("w0", "w1", "w2", "w3", holds=2)
    assert chosen(2, two[0], four) == [["m@w0", "m@w1", "m@w2", "m@w3"]]


def test_a_group_under_pressure_is_made_when_its_members_have_room() -> None:
    there, long = [instance(rungs=())], LongNeed(tokens=4000)
    full = offer("w0", "w1", room_s=3.0)
    found = plan(*there, long=long, merges=[full])
    assert (taken(found)[0][0], found.wait_s, found.meets) == ("merge", 4.0, False)
    assert plan(*there, long=long, merges=[full, offer("w2", "w3")]).taken[0].targets == ["m@w2", "m@w3"]


def test_a_group_that_parts_first_takes_longer() -> None:
    there, long = [instance(rungs=())], LongNeed(tokens=4000)
    found = plan(*there, long=long, merges=[offer("w0", "w1", "w2", "w3", parted=("m@w0", "m@w1"))])
    (part,) = found.taken
    assert (part.lever, part.targets, part.tp, part.duration_s) == ("part", ["m@w0", "m@w1"], 1, 2.0)


def test_two_groups_that_part_for_merges_with_the_same_worker_are_not_both_taken() -> None:
    there, long = [instance(rungs=())], LongNeed(tokens=4000, count=2)
    merges = [
        offer("w0", "w1", "w4", "w5", parted=("m@w0", "m@w1")),
        offer("w2", "w3", "w4", "w5", parted=("m@w2", "m@w3")),
    ]
    assert len(plan(*there, long=long, merges=merges).taken) == 1
    merges[1] = offer("w2", "w3", "w6", "w7", parted=("m@w2", "m@w3"))
    assert len(plan(*there, long=long, merges=merges).taken) == 2


@given(
    st.integers(1, 6),
    st.floats(0, 200),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 9), st.integers(1, 3)), max_size=5),
)
def test_what_is_taken_for_long_requests_costs_no_more_than_the_best_single_lever(
    count: int, queue_s: float, rows: list[tuple[int, float, int]]
) -> None:
    by_place = {i: offer(f"w{i}", f"w{i + 1}", load=load, holds=holds) for i, load, holds in rows}
    merges = list(by_place.values())
    found = plan(instance(rungs=()), long=LongNeed(tokens=4000, count=count, queue_s=queue_s), merges=merges)
    targets = [name for one in found.taken for name in one.targets]
    assert len(targets) == len({*targets})
    possible = [one for one in found.options if not one.refusal]
    if not found.meets:
        assert found.cost_s <= min(one.cost_s + MARGIN * one.price_s for one in possible) + 1e-3


# ------------------------------------------------------------------------------------- no long request


def test_a_group_parts_where_its_workers_get_more_done_alone() -> None:
    group = instance(tp=2, needed=10, used=10)
    offers = [PartOffer(instances=("m@w0", "m@w1"), tp_before=2, tp=1, load=6.0)]
    assert taken(plan(group, parts=offers))[0][0] == "part"
    fast = LeverCosts(speeds={1: 100.0, 2: 230.0})
    assert taken(plan(group, parts=offers, costs=fast))[0][0] == "queue"
    slow = replace(LeverCosts(), kinds={**LeverCosts().kinds, "part": KindCost(duration_s=60, stalled_s=60)})
    assert taken(plan(group, parts=offers, costs=slow))[0][0] == "queue"


# ------------------------------------------------------------------------------------- always


@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.floats(0, 9), st.floats(0, 5000), st.integers(0, 40)),
        min_size=1,
        max_size=5,
    )
)
def test_what_meets_no_objective_costs_no_more_than_any_single_lever_and_no_room_is_taken_twice(
    rows: list[tuple[int, float, float, int]],
) -> None:
    there = [
        instance(
            f"m@w{i}",
            needed=needed,
            used=min(needed, 100),
            waiting=waiting,
            tokens_per_s=speed,
            spare_blocks=spare,
        )
        for i, (needed, waiting, speed, spare) in enumerate(rows)
    ]
    free = {one.name: max(0, 85 - one.needed) for one in there}
    for found in weigh(LeverSituation(model="m", instances=there)):
        alone = [one for one in found.options if not one.refusal and one.lever != "move"]
        assert found.taken
        if not found.meets:
            assert found.cost_s <= min(one.cost_s + MARGIN * one.price_s for one in alone) + 1e-3
        for one in found.taken:
            if one.lever == "move":
                free[one.targets[1]] -= one.blocks
    assert all(left >= 0 for left in free.values())


def test_costs_are_in_the_words_for_people() -> None:
    found = plan(pressed(), instance("m@w1", used=10, needed=10))
    assert found.reason.startswith("queue m@w0 6.00; swap m@w0: 6 layers to int8 ")
    assert found.reason.endswith("taken: move m@w0 to m@w1, which meets the objective")
    assert found.need == "4 requests wait for 30 KV blocks"


@pytest.mark.parametrize("speed", [0.0, 1e-9])
def test_a_wait_without_an_end_is_a_number(speed: float) -> None:
    found = plan(pressed(tokens_per_s=speed, rungs=()))
    assert found.wait_s == NEVER_S and not found.meets


def test_an_event_has_what_is_taken_and_the_cheapest_other_option_of_each_lever() -> None:
    option = LeverOption(lever="merge", targets=["m@w0", "m@w1"], cost_s=6.0)
    here = [
        replace(option, lever="queue", targets=[], cost_s=9.0),
        *(replace(option, cost_s=7.0), option, replace(option, cost_s=5.0, is_taken=True)),
        *(replace(option, lever="swap", refusal=why, cost_s=0.0) for why in ("no room", "no variant")),
    ]
    found = LeverPlan(model="m", subject="m@w0", need="1 waits", options=here, reason="all").in_brief()
    assert found.options == [here[0], here[2], here[3], here[4]]
    assert (found.need, found.reason) == ("1 waits", "")
