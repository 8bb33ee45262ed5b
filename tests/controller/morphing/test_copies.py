"""When a deployment is copied, and when its copies retire: windows in, orders out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bus.deployments import DeployModel, Intent, RetireModel
from bus.policy import Policy
from controller.morphing.copies import Copies, CopyDecision, CopyState, adjust
from controller.morphing.groups import Group
from controller.morphing.weighing import weigh_pressure
from controller.planning.lever_costs import KindCost, LeverCosts
from tests.controller.morphing.test_pressure import FRESHNESS, worker

FREE = Copies(original="d1", intent=Intent(tp=1), spares=("w5",))
COSTS = LeverCosts(kinds={**LeverCosts().kinds, "load": KindCost(duration_s=2.0, stalled_s=0.0)})


class Hand:
    """Tells windows, half a second apart."""

    def __init__(self, *groups: Group, copies: Copies = FREE, **policy: Any) -> None:
        self.groups, self.copies, self.policy = list(groups), copies, Policy(**policy)
        self.state, self.at_s, self.costs = CopyState(), 100.0, COSTS

    def window(self, times: int = 1) -> list[CopyDecision]:
        found = []
        for _ in range(times):
            self.at_s += 0.5
            rules = self.policy.in_force() or self.policy
            plans = weigh_pressure(self.groups, rules, self.costs, self.copies)
            about = {"m": self.copies}, self.policy, self.at_s, FRESHNESS, self.costs
            self.state, made = adjust(self.state, plans, self.groups, *about)
            found += made
        return found


def crowded() -> Group:
    """Return a worker whose queue takes 25 s."""
    return replace(worker("w0", 95, 30), layer_blocks={}, tokens_per_s=10.0)


def test_a_copy_is_ordered_after_several_windows_and_not_again_at_once() -> None:
    hand = Hand(crowded())
    assert hand.window(2) == []
    (made,) = hand.window()
    assert isinstance(made.order, DeployModel)
    assert (made.order.name, made.order.copies, made.order.intent) == ("m", "d1", Intent(tp=1))
    assert "-" not in made.order.id  # ids of commands are made of it
    assert made.reason.startswith("4 requests wait for 25 KV blocks: d1 is deployed once more, as ")
    assert "w5 is free; weighed, in request-seconds: queue m@w0 " in made.reason
    assert made.numbers["more_cost_s"] < made.numbers["queue_cost_s"]
    assert hand.window(9) == []
    hand.copies = replace(FREE, spares=(), refusal="o2 is on its way")
    assert hand.window(40) == []


def test_a_short_queue_gets_no_copy_and_mode_manual_neither() -> None:
    assert Hand(replace(crowded(), tokens_per_s=200.0)).window(9) == []
    assert Hand(crowded(), mode="manual").window(9) == []


def test_windows_that_do_not_follow_each_other_do_not_count() -> None:
    hand = Hand(crowded())
    for _ in range(5):
        assert hand.window(2) == []
        hand.groups = [worker("w0", 10)]
        assert hand.window() == []
        hand.groups = [crowded()]


def served_twice(used: int, **changes: Any) -> Hand:
    """`used` of 100 blocks at each of two instances, the second a copy."""
    copies = Copies(original="d1", made={"m@w5": "o2"}, refusal="no worker is free")
    return Hand(worker("w0", used), worker("w5", used, **changes), copies=copies)


def test_a_copy_retires_when_the_others_have_had_room_for_ten_times_its_loading() -> None:
    hand = served_twice(20)
    assert hand.window(40) == []  # 20 s
    (made,) = hand.window()
    assert isinstance(made.order, RetireModel) and made.order.deployment == "o2"
    assert made.reason == "the other instances have had room for all requests for 20 s: o2 retires"
    assert hand.window(9) == []
    busy = served_twice(20)
    busy.window(39)
    busy.groups = [worker("w0", 30), worker("w5", 30)]  # more than half of what one would have
    assert busy.window() == []
    busy.groups = [worker("w0", 20), worker("w5", 20)]
    assert busy.window(40) == []  # the count begins anew


def test_a_copy_of_a_large_model_is_kept_for_longer() -> None:
    measured = KindCost(duration_s=2.0, stalled_s=0.0, nbytes=1e9)
    hand = served_twice(20, weight_bytes=3 * 10**9)
    hand.costs = LeverCosts(kinds={**COSTS.kinds, "load": measured})
    assert hand.window(120) == []  # 60 s
    (made,) = hand.window()
    assert "for 60 s" in made.reason


def test_a_copy_stays_while_requests_wait_or_nothing_is_known_of_it() -> None:
    assert served_twice(20, queued=1).window(60) == []
    hand = served_twice(20)
    hand.groups = hand.groups[:1]
    assert hand.window(60) == []


def test_one_copy_at_a_time_retires_and_its_room_is_not_counted_on() -> None:
    """Two idle copies of three instances; without one of them the other is needed."""
    hand = served_twice(20)
    hand.groups += [worker("w6", 20)]
    hand.copies = replace(hand.copies, made={"m@w5": "o2", "m@w6": "o3"})
    assert [one.subject for one in hand.window(60)] == ["o2"]
    both = served_twice(20)
    both.groups += [worker("w6", 20)]
    both.copies = replace(hand.copies, unwanted={"o2": "d3 waits for a place"})
    assert {one.subject for one in both.window(60)} == {"o2"}


def test_a_copy_stays_while_a_report_of_its_model_is_stale() -> None:
    hand = served_twice(20)
    hand.groups[0] = replace(hand.groups[0], age_s=FRESHNESS.stale_s + 1)
    assert hand.window(60) == []


def test_an_unwanted_copy_retires_at_once_and_is_told_so_once() -> None:
    hand = served_twice(60)
    hand.copies = replace(hand.copies, unwanted={"o2": "d3 waits for a place"})
    (made,) = hand.window(9)
    assert made.reason == "d3 waits for a place: o2 retires"
