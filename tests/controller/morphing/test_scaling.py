"""When a group is made and when it parts: demands and windows in, transforms out, without clock and Redis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from bus.levers import LeverOption, LeverPlan
from bus.messages import PARTS, Demand, LayerShape
from bus.morphs import (
    STANDS_S,
    ConvertCache,
    HalfOrder,
    MorphKind,
    MorphOutcome,
    MorphReport,
    Swap,
    Transform,
)
from bus.policy import Policy
from bus.precisions import KVPrecision
from controller.morphing.decision import MorphDecision, parting
from controller.morphing.groups import Group
from controller.morphing.resting import Rest
from controller.morphing.scaling import hear, scale_down, scale_up
from controller.morphing.track import FORGET_S, Freshness, State, Track, observe, sent, unsent
from tests.support.parallelism_groups import group, singles

FRESHNESS = Freshness(stale_s=5.0, gap_s=7.0)
TOLD_S = 0.5
FOUR = ("w0", "w1", "w2", "w3")


class Hand:
    """Tells demands and windows, `TOLD_S` apart, and answers the transforms."""

    def __init__(self, *groups: Group, **policy: Any) -> None:
        self.groups = list(groups)
        self.policy = Policy(**policy)
        self.state = State()
        self.at_s = 1000.0
        self.decisions: list[tuple[float, MorphDecision]] = []

    def demand(
        self, tokens: int, times: int = 1, gateway: str = "g", model: str = "m", count: int = 1
    ) -> MorphDecision | None:
        """The last decision of these tellings."""
        found = None
        for _ in range(times):
            self.at_s += TOLD_S
            told = Demand(gateway=gateway, model=model, tokens=tokens, count=count, at_ms=0)
            self.state = hear(self.state, told, self.at_s)
            self.state, made = scale_up(self.state, self.groups, self.policy, self.at_s, FRESHNESS)
            found = self._send(made) or found
        return found

    def window(self, times: int = 1) -> MorphDecision | None:
        found = None
        for _ in range(times):
            self.at_s += TOLD_S
            self.state, made = scale_down(self.state, self.groups, self.policy, self.at_s, FRESHNESS)
            found = self._send(made) or found
        return found

    def _send(self, made: list[MorphDecision]) -> MorphDecision | None:
        for one in made:
            self.decisions.append((self.at_s, one))
            for name in one.instances:
                self.state = sent(self.state, name, one.lever, f"morph-{len(self.decisions)}", self.at_s)
        return made[-1] if made else None

    def answer(self, outcome: MorphOutcome = "applied", kind: MorphKind = "transform") -> None:
        """Report the end of the last decision; applied, the groups are what it made of them."""
        _, one = self.decisions[-1]
        report = MorphReport(
            id=f"morph-{len(self.decisions)}",
            kind=kind,
            target=one.instance,
            worker=one.worker,
            epoch=1,
            state=outcome,
            reason="a test wants it",
            started_ms=0,
            workers=list(one.epochs),
        )
        self.state = observe(self.state, report, self.at_s)
        if outcome == "applied" and kind == "transform":
            self.groups = [g for g in self.groups if not set(g.workers) & set(one.epochs)]
            if one.lever == "scale_up":
                self.groups.append(group(*one.epochs))
            else:
                self.groups += [group(worker) for worker in one.epochs]

    def pass_s(self, seconds: float) -> None:
        self.at_s += seconds


def test_an_instance_that_has_gone_for_long_is_forgotten_and_one_that_is_there_is_not() -> None:
    hand = Hand(*singles(0, 1))
    for name in ("m@w0", "m@w1"):
        hand.state = hand.state.with_track(name, Track(1, hand.at_s, morphed_s=hand.at_s))
    hand.groups = singles(0)
    for _ in range(2):
        hand.window()
        assert set(hand.state.tracks) == {"m@w0", "m@w1"}
        hand.pass_s(FORGET_S / 2 - TOLD_S)
    hand.window()
    assert set(hand.state.tracks) == {"m@w0"} and hand.state.tracks["m@w0"].morphed_s == 1000.0


def test_a_cool_down_longer_than_that_is_not_forgotten() -> None:
    hand = Hand(*singles(0, 1), cooldown_s=3 * FORGET_S)
    hand.state = hand.state.with_track("m@w0", Track(1, hand.at_s, morphed_s=hand.at_s))
    hand.groups = []
    hand.pass_s(2 * FORGET_S)
    hand.window()
    hand.groups = singles(0, 1)
    assert hand.demand(300, times=9) is None  # w0 cools down
    hand.pass_s(FORGET_S)
    assert hand.demand(300, times=3) is not None


# --------------------------------------------------------------------------- scale-up


def test_a_request_that_waits_for_several_tellings_makes_a_group() -> None:
    hand = Hand(*singles(*range(8)))
    assert hand.demand(1000, times=2) is None
    found = hand.demand(1000)
    assert found is not None
    assert found.command("t1") == Transform(
        id="t1", epoch=1, instance="m@w0", workers=list(FOUR), epochs=dict.fromkeys(FOUR, 1), tp=4, wait_s=1.0
    )
    assert found.reason.startswith(
        "a request of 1000 tokens waits and no instance has room for it: w0, w1, w2, w3 at degree 1 become "
        "one of degree 4, which holds 1200; weighed, in request-seconds: queue never; merge m@w0, m@w1, "
    )
    assert found.reason.endswith("taken: merge m@w0, m@w1, m@w2, m@w3 at tp 4, which meets the objective")
    assert (found.numbers["queue_cost_s"], found.numbers["merge_cost_s"]) == (3600, 1)
    assert found.numbers["waiting_tokens"] == 1000 and found.numbers["waited_s"] == 1.0
    assert (found.numbers["tp_before"], found.numbers["tp_after"], found.numbers["windows"]) == (1, 4, 3)


def test_a_demand_that_is_not_repeated_is_over() -> None:
    hand = Hand(*singles(*range(8)))
    hand.demand(1000, times=2)
    hand.pass_s(2.0)
    assert hand.demand(1000, times=2) is None
    assert hand.demand(1000) is not None


def test_demands_of_several_gateways_ask_for_the_longest() -> None:
    hand = Hand(*singles(*range(4)))
    for _ in range(4):
        hand.demand(300, gateway="g1")
        hand.demand(1000, gateway="g2")
    ((_, found),) = hand.decisions
    assert (found.tp, found.numbers["waiting"]) == (4, 2)


def test_several_requests_get_a_group_each_where_that_costs_less_than_to_wait_in_turn() -> None:
    hand = Hand(*singles(*range(8)), max_tp=2)
    hand.demand(300, times=3, count=3)
    assert [set(one.epochs) for _, one in hand.decisions] == [{"w0", "w1"}, {"w2", "w3"}, {"w4", "w5"}]
    assert "a request of 300 tokens waits (the longest of 3)" in hand.decisions[0][1].reason
    busy = Hand(*singles(*range(8), load=6.0, tokens_per_s=3000.0), max_tp=2)
    busy.demand(300, times=3, count=3)
    assert len(busy.decisions) == 1  # more groups would slow down more requests than wait


def test_short_requests_keep_an_instance_beside_several_groups() -> None:
    hand = Hand(*singles(*range(4)))
    hand.window()  # when they had load last
    hand.groups = [replace(one, load=0.1) for one in hand.groups]
    hand.window()
    hand.demand(300, times=3, count=2)
    assert len(hand.decisions) == 1


def test_members_keep_their_layers_from_the_first_telling_on() -> None:
    """Else a reflex swaps some meanwhile, or runs a morph that a transform would have to wait for."""
    hand = Hand(*singles(*range(8)))
    assert hand.demand(1000) is None
    assert hand.state.reshaping(hand.at_s) == {f"m@{worker}" for worker in FOUR}
    hand.pass_s(2.0)
    assert not hand.state.reshaping(hand.at_s)


@pytest.mark.parametrize("kind", ["swap", "resize", "kv"])
def test_members_that_morph_by_themselves_keep_their_layers_and_are_waited_for(kind: MorphKind) -> None:
    """A group would never be made where some worker always swapped."""
    hand = Hand(*singles(0, 1))
    told = MorphReport(
        id="r1", kind=kind, target="m@w1", worker="w1", epoch=1, state="running", reason="", started_ms=0
    )
    hand.state = observe(hand.state, told, hand.at_s)
    assert hand.demand(300, times=5) is None
    assert hand.state.reshaping(hand.at_s) == {"m@w0", "m@w1"}
    hand.state = observe(hand.state, replace(told, state="applied"), hand.at_s)
    found = hand.demand(300)
    assert found is not None and found.lever == "scale_up"


def test_workers_whose_caches_are_full_become_a_group_when_there_is_room_and_may_swap_until_then() -> None:
    hand = Hand(*singles(0, 1, used=95, tokens_per_s=50.0))
    assert hand.demand(300, times=4) is None and not hand.state.reshaping(hand.at_s)
    hand.groups = singles(0, 1, used=40)
    found = hand.demand(300)
    assert found is not None and found.lever == "scale_up"


def test_a_group_that_is_too_small_for_what_waits_parts_and_a_larger_one_is_made() -> None:
    """Else it would stay while something waits, and nothing could be merged with it."""
    hand = Hand(group("w0", "w1"), *singles(2, 3))
    assert hand.demand(1000, times=2) is None
    found = hand.demand(1000)
    assert found is not None and (found.lever, found.tp, found.cause) == ("scale_down", 1, "long_request")
    assert found.reason.startswith("a request of 1000 tokens waits, which needs a larger group than this one")
    hand.answer()
    hand.pass_s(5.0)
    found = hand.demand(1000, times=3)
    assert found is not None and (found.lever, found.tp) == ("scale_up", 4)


def test_one_request_parts_one_group_and_gets_its_parts_without_a_cool_down() -> None:
    """The next group is as able to part while the first does, and before its parts show."""
    other = [group("w4", "w5", host="h2"), *singles(6, 7, host="h2")]
    hand = Hand(group("w0", "w1"), *singles(2, 3), *other)
    found = hand.demand(1000, times=3)
    assert found is not None and found.instances == ("m@w0", "m@w1")
    assert hand.demand(1000, times=5) is None
    before = hand.groups
    hand.answer()
    after, hand.groups = hand.groups, before
    assert hand.demand(1000) is None  # metrics are older
    hand.groups = after
    found = hand.demand(1000)
    assert found is not None and (found.lever, {*found.epochs}) == ("scale_up", {*FOUR})


def test_a_group_that_was_just_made_parts_for_a_longer_request_without_a_cool_down() -> None:
    """Short requests queue at the gateway as long as one waits that no instance could hold."""
    hand = Hand(*singles(*range(4)))
    made = hand.demand(300, times=3)
    assert made is not None and made.tp == 2
    hand.answer()
    assert hand.demand(300, times=8) is None  # the group holds it, and is not left again so soon
    found = hand.demand(1000)
    assert found is not None and (found.lever, found.instances) == ("scale_down", made.instances)
    assert hand.demand(1000, times=3) is None
    hand.answer()
    found = hand.demand(1000)
    assert found is not None and (found.lever, found.tp) == ("scale_up", 4)


def test_a_longer_request_right_after_the_first_answer_waits_for_no_cool_down() -> None:
    hand = Hand(*singles(*range(4)))
    hand.demand(300, times=3)
    hand.answer()
    began_s = hand.at_s
    found = hand.demand(1000, times=3)
    assert found is not None and found.lever == "scale_down"
    hand.answer()
    found = hand.demand(1000)
    assert found is not None and (found.lever, found.tp) == ("scale_up", 4)
    assert hand.at_s < began_s + hand.policy.cooldown_s
    hand.answer()
    hand.groups = [replace(hand.groups[0], max_tokens=100)]  # the next metrics are to come
    assert hand.demand(1000, times=2) is None, "made a moment ago"


def test_a_group_that_runs_a_long_request_does_not_part_for_a_longer_one() -> None:
    hand = Hand(group("w0", "w1", longest_tokens=300), *singles(2, 3))
    assert hand.demand(1000, times=20) is None


def test_others_become_a_larger_group_at_once_where_the_one_just_made_is_too_small() -> None:
    hand = Hand(*singles(*range(6)))
    hand.demand(300, times=3)
    hand.answer()
    found = hand.demand(1000)
    assert found is not None and (found.lever, found.tp) == ("scale_up", 4)
    assert not set(found.epochs) & {"w0", "w1"}


def test_two_groups_part_into_the_degrees_that_were_weighed_for_each() -> None:
    two, four = group("w0", "w1"), group("w4", "w5", "w6", "w7")
    options = [
        LeverOption(lever="part", targets=[*one.instances], tp=tp, is_taken=True)
        for one, tp in ((two, 1), (four, 2))
    ]
    plan = LeverPlan(model="m", subject="m@w0", need="a test", options=options)
    assert [parting(one, plan, 3, Policy()).tp for one in (two, four)] == [1, 2]


def test_one_group_is_made_at_a_time() -> None:
    hand = Hand(*singles(*range(8)))
    hand.demand(1000, times=50)
    assert len(hand.decisions) == 1  # in flight
    hand.answer()
    hand.groups[-1] = replace(hand.groups[-1], max_tokens=100)  # the next metrics are to come
    hand.demand(1000, times=9)
    assert len(hand.decisions) == 1  # made a moment ago
    hand.demand(1000, times=4)
    assert len(hand.decisions) == 2


def test_a_group_that_is_full_gets_time_to_empty() -> None:
    full = group(*FOUR, used=900)
    hand = Hand(full, *singles(4, 5, 6, 7), long_patience_s=10)
    assert hand.demand(1000, times=20) is None
    found = hand.demand(1000, times=2)
    assert found is not None and found.numbers["waited_s"] == 10.0


def test_a_second_group_does_not_take_the_last_workers_of_short_requests() -> None:
    """Groups get less done: all would be slower, the long request too."""
    full = group(*FOUR, used=900)
    hand = Hand(full, *singles(4, 5, 6, 7, load=1.0), long_patience_s=10)
    for _ in range(100):
        assert hand.demand(1000) is None
        hand.window()
    hand.groups = [full, *singles(4, 5, 6, 7)]  # nothing comes for them any more
    assert hand.demand(1000, times=10) is None
    assert hand.demand(1000, times=15) is not None
    more = Hand(full, *singles(*range(4, 12), load=1.0), long_patience_s=10)
    assert more.demand(1000, times=30) is not None  # four are left


def test_a_command_that_the_bus_did_not_take_holds_nothing_back() -> None:
    hand = Hand(*singles(0, 1))
    hand.demand(300, times=3)
    assert hand.state.tracks["m@w1"].is_morphing(hand.at_s)
    hand.state = unsent(hand.state, "morph-1")
    assert not any(track.pending for track in hand.state.tracks.values())


def test_workers_in_a_morph_or_a_cool_down_are_left_alone() -> None:
    hand = Hand(*singles(0, 1, 2))
    hand.state = hand.state.with_track("m@w0", Track(1, 1000.0, morphed_s=1000.0))
    found = hand.demand(300, times=3)
    assert found is not None and list(found.epochs) == ["w1", "w2"]


def test_workers_that_refused_are_not_asked_again_at_once() -> None:
    hand = Hand(*singles(0, 1))
    hand.demand(300, times=3)
    for outcome in ("deferred", "failed", "conflict"):
        hand.answer(outcome)
        hand.demand(300, times=100)
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(hand.decisions)]
    assert len(hand.decisions) == 4 and all(pause >= 10 for pause in pauses)


def test_old_reports_and_manual_mode_make_no_group() -> None:
    assert Hand(*singles(0, 1, age_s=6.0)).demand(300, times=9) is None
    assert Hand(*singles(0, 1), mode="manual").demand(300, times=9) is None
    assert Hand(*singles(0, 1), max_tp=1).demand(300, times=9) is None


def kv_of(number: int, layers: tuple[LayerShape, ...], **changes: Any) -> Group:
    """A worker whose layers free 40 tokens of KV each in int8."""
    one = group(f"w{number}", layers=layers, kv_tokens=100, block_tokens=10, max_model_len=5000)
    return replace(one, layer_blocks={"int8": 4.0}, losses={"int8": 0.002}, **changes)


FULL = (LayerShape(), LayerShape())
LOW = (LayerShape(attention="int8", ffn="int8"), LayerShape())


def test_after_a_refusal_others_become_a_group_without_a_cool_down() -> None:
    hand = Hand(*(kv_of(number, FULL) for number in range(4)))
    refused = hand.demand(350, times=3)
    assert refused is not None and refused.lever == "scale_up"
    hand.answer("deferred")
    other = hand.demand(350)
    assert other is not None and not set(other.epochs) & set(refused.epochs)


def test_members_of_different_layers_are_made_alike_and_then_become_one() -> None:
    hand = Hand(kv_of(0, FULL), kv_of(1, LOW))
    down = hand.demand(350, times=3)
    assert down is not None and down.lever == "level"
    halves = [HalfOrder(layer=0, part=part, precision="full") for part in PARTS]
    assert down.command("s1") == Swap(
        id="s1", epoch=1, instance="m@w1", halves=halves, wait_s=1.0, stands_s=STANDS_S, urgency=1.0
    )
    assert "w0, w1 get equal layers (2 halves to full, 0.00% more loss)" in down.reason
    assert hand.state.reshaping(hand.at_s) == {"m@w0", "m@w1"}  # also the one whose layers stay
    assert hand.demand(350, times=4) is None  # under way
    hand.answer("applied", kind="swap")
    hand.groups = [replace(one, age_s=0.5) for one in hand.groups]
    assert hand.demand(350) is None  # the report is older than the swap
    hand.groups = [kv_of(0, FULL), kv_of(1, FULL)]
    hand.pass_s(1.0)
    up = hand.demand(350, times=3)
    assert up is not None and (up.lever, list(up.epochs)) == ("scale_up", ["w0", "w1"])


def test_a_member_without_room_for_more_bits_keeps_them_and_the_others_lose_theirs() -> None:
    hand = Hand(kv_of(0, FULL), kv_of(1, LOW, used_tokens=50, kv_tokens=80))
    down = hand.demand(300, times=3)
    assert down is not None and (down.lever, down.instance, down.halves[0].precision) == (
        "level",
        "m@w0",
        "int8",
    )
    assert down.numbers["loss"] == 0.001


def kv_group(number: int, kv_precision: KVPrecision, **fields: Any) -> Group:
    known: dict[str, Any] = {"kv_loss": 0.001, "kv_gain": 2.0, "kv_precision": kv_precision}
    return kv_of(number, FULL, **(known | fields))


def test_members_whose_kv_differs_are_made_alike_and_then_become_one() -> None:
    hand = Hand(kv_group(0, "full"), kv_group(1, "int8"), loss_budget=0.001)
    down = hand.demand(350, times=3)
    assert down is not None and (down.lever, down.instance) == ("level", "m@w0")
    assert down.command("k1") == ConvertCache(
        id="k1", epoch=1, instance="m@w0", kv_dtype="int8", wait_s=1.0, stands_s=STANDS_S
    )
    assert "the KV caches of w0, w1 are alike in int8" in down.reason
    assert hand.state.reshaping(hand.at_s) == {"m@w0", "m@w1"}
    assert hand.demand(350, times=4) is None  # under way
    hand.answer("applied", kind="kv")
    hand.groups = [replace(one, age_s=0.5) for one in hand.groups]
    assert hand.demand(350) is None  # the report is older than the conversion
    hand.groups = [kv_group(0, "int8"), kv_group(1, "int8")]
    hand.pass_s(1.0)
    up = hand.demand(350, times=3)
    assert up is not None and (up.lever, list(up.epochs)) == ("scale_up", ["w0", "w1"])


@pytest.mark.parametrize("fields", [{"kv_loss": None}, {"kv_loss": 0.003}])
def test_without_a_budget_for_8_bits_kv_goes_back_where_there_is_room(fields: dict[str, Any]) -> None:
    hand = Hand(kv_group(0, "full", **fields), kv_group(1, "int8", **fields))
    back = hand.demand(350, times=3)
    assert back is not None and (back.instance, back.kv_dtype) == ("m@w1", "full")
    held = {"used_tokens": 60, "kv_tokens": 100}
    full = Hand(kv_group(0, "full", **fields), kv_group(1, "int8", **(fields | held)))
    assert full.demand(300, times=9) is None, "not in full precision, and no group"


def test_members_that_would_lose_more_than_the_budget_are_not_made_alike() -> None:
    full = kv_of(1, LOW, used_tokens=50, kv_tokens=80)
    assert Hand(kv_of(0, FULL), full, loss_budget=0.0005).demand(300, times=9) is None
    swapped = Hand(kv_of(0, FULL), full, loss_budget=0.001).demand(300, times=9)
    assert swapped is not None


def test_layers_and_kv_are_made_alike_within_one_budget_of_loss() -> None:
    """Each of the two costs 0.1 %; the member without room for more bits keeps its fewer ones."""
    tight = {"used_tokens": 50, "kv_tokens": 80}
    low = replace(kv_group(1, "int8", **tight), layers=LOW)
    assert Hand(kv_group(0, "full"), low, loss_budget=0.0015).demand(300, times=9) is None
    first = Hand(kv_group(0, "full"), low, loss_budget=0.002).demand(300, times=3)
    assert first is not None and (first.instance, first.kv_dtype) == ("m@w0", "int8")
    converted = kv_group(0, "int8")
    assert Hand(converted, low, loss_budget=0.0015).demand(300, times=9) is None
    then = Hand(converted, low, loss_budget=0.002).demand(300, times=3)
    assert then is not None and (then.instance, len(then.halves)) == ("m@w0", len(PARTS))
    at_rest = [replace(one, kv_rest="int8") for one in (converted, low)]
    assert Hand(*at_rest, loss_budget=0.0015).demand(300, times=3) is not None, "what rests in int8 is free"


def test_members_of_a_deployment_are_made_alike_within_its_own_limit_of_loss() -> None:
    low = kv_of(1, LOW, used_tokens=50, kv_tokens=80)
    for left, levels in ((0.0005, False), (0.001, True)):
        hand = Hand(*(replace(one, rest=Rest(loss_left=left)) for one in (kv_of(0, FULL), low)))
        assert (hand.demand(300, times=9) is not None) == levels


def test_a_request_that_a_swap_makes_room_for_needs_no_group() -> None:
    """One layer in int8 holds 40 tokens more, at a tenth of the budget."""
    hand = Hand(kv_of(0, FULL), kv_of(1, FULL, load=9.0), loss_budget=0.01)
    found = hand.demand(130, times=3)
    assert found is not None and (found.lever, found.instance) == ("swap", "m@w0")
    assert found.command("s1") == Swap(
        id="s1",
        epoch=1,
        instance="m@w0",
        count=1,
        precision="int8",
        wait_s=1.0,
        stands_s=STANDS_S,
        urgency=1.0,
    )
    assert found.numbers["swap_cost_s"] < found.numbers["merge_cost_s"] < found.numbers["queue_cost_s"]
    costly = Hand(kv_of(0, FULL), kv_of(1, FULL), loss_budget=0.0005).demand(130, times=3)
    assert costly is not None and costly.lever == "scale_up"


def test_a_swap_whose_room_others_took_is_followed_by_a_group() -> None:
    hand = Hand(kv_of(0, FULL), kv_of(1, FULL), loss_budget=0.01)
    found = hand.demand(130, times=3)
    assert found is not None and found.lever == "swap"
    assert hand.demand(130, times=9) is None  # under way
    hand.answer("applied", kind="swap")
    hand.groups[0] = kv_of(0, LOW, max_tokens=140, used_tokens=60)
    assert hand.demand(130, times=40) is None  # it holds the request, and gets time to empty
    found = hand.demand(130, times=30)
    assert found is not None and found.lever == "level"  # the members are made alike, and become a group
    hand.answer("applied", kind="swap")
    hand.groups = [replace(hand.groups[0], layers=LOW), kv_of(1, LOW)]
    found = hand.demand(130, times=30)
    assert found is not None and found.lever == "scale_up"


def test_a_swap_that_was_too_small_is_followed_by_another() -> None:
    hand = Hand(kv_of(0, FULL), kv_of(1, FULL), loss_budget=0.01)
    first = hand.demand(130)  # one telling is enough: a swap is cheap
    assert first is not None and (first.lever, first.count) == ("swap", 1)
    hand.answer("applied", kind="swap")
    hand.groups[0] = kv_of(0, LOW, max_tokens=120)
    found = hand.demand(130)
    assert found is not None and (found.lever, found.instance) == ("swap", "m@w0")


def test_a_layer_of_which_a_half_is_swapped_is_not_counted_on() -> None:
    half = (LayerShape(attention="int8"), LayerShape(), LayerShape())
    found = Hand(kv_of(0, half), kv_of(1, half), loss_budget=0.01).demand(170)
    assert found is not None and (found.lever, found.count) == ("swap", 3)


def test_a_swap_that_was_refused_is_not_ordered_again_at_once() -> None:
    hand = Hand(kv_of(0, FULL), kv_of(1, LOW))
    hand.demand(350, times=3)
    hand.answer("deferred", kind="swap")
    assert hand.demand(350, times=15) is None


def test_a_worker_that_refused_a_swap_hinders_no_other_and_no_group() -> None:
    hand = Hand(kv_of(0, FULL), kv_of(1, FULL), loss_budget=0.01)
    first = hand.demand(130)
    assert first is not None and (first.lever, first.instance) == ("swap", "m@w0")
    hand.answer("deferred", kind="swap")
    found = hand.demand(130, times=3)
    assert found is not None and (found.lever, found.instance) == ("swap", "m@w1")
    hand.answer("deferred", kind="swap")
    found = hand.demand(130, times=60)
    assert found is not None and found.lever == "scale_up"


# --------------------------------------------------------------------------- scale-down


def test_a_group_without_long_requests_parts_after_several_windows() -> None:
    hand = Hand(group(*FOUR, used=40))
    assert hand.window(2) is None
    found = hand.window()
    assert found is not None
    assert found.command("t1") == Transform(
        id="t1", epoch=1, instance="m@w0", workers=list(FOUR), epochs=dict.fromkeys(FOUR, 1), tp=1, wait_s=1.0
    )
    assert found.reason.startswith("no long request is left and 0.97 of the KV is free, 0.5 suffices")


def test_one_window_that_does_not_let_it_begins_the_count_anew() -> None:
    hand = Hand(group(*FOUR))
    for _ in range(5):
        assert hand.window(2) is None
        hand.groups = [replace(hand.groups[0], longest_tokens=1000)]
        assert hand.window() is None
        hand.groups = [group(*FOUR)]


def test_a_group_stays_while_something_waits_for_one() -> None:
    hand = Hand(group(*FOUR))
    for _ in range(20):
        hand.demand(1000)
        assert hand.window() is None


def test_a_group_stays_through_a_gap_of_the_metrics_and_in_manual_mode() -> None:
    hand = Hand(group(*FOUR))
    hand.window(2)
    hand.pass_s(8)
    assert hand.window(2) is None
    assert Hand(group(*FOUR), mode="manual").window(9) is None
    assert Hand(group(*FOUR, age_s=6.0)).window(9) is None


def swings(num_waiting: float) -> Hand:
    """A long request every 20 s, that runs for 5; so many short ones queue in the group after it."""
    hand = Hand(*singles(*range(4)), windows=2, cooldown_s=2.0)
    for _ in range(30):
        if len(hand.groups) == 4 and hand.demand(1000, times=4):
            hand.answer()
        hand.groups = [replace(one, longest_tokens=1000 if one.tp > 1 else 0) for one in hand.groups]
        hand.window(10)
        hand.groups = [replace(one, longest_tokens=0, waiting=num_waiting) for one in hand.groups]
        for _ in range(30):
            if hand.window():
                hand.answer()
    return hand


def test_a_group_that_parted_too_early_is_kept_longer_the_next_time() -> None:
    """The shape does not swing with the long requests for ever."""
    hand = swings(num_waiting=0)
    assert 4 <= len(hand.decisions) <= 30  # of 60
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(hand.decisions)]
    assert all(pause >= 2.0 for pause in pauses)


def test_a_group_in_which_requests_queue_parts_however_soon_the_next_is_needed() -> None:
    hand = swings(num_waiting=3)
    assert len(hand.decisions) == 60
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(hand.decisions)]
    assert all(pause >= 2.0 for pause in pauses), "cool-downs hold"


def test_regret_is_the_models_and_not_the_instances() -> None:
    """One group parts, and another has to be made at once: the other stays longer, too."""
    hand = Hand(group(*FOUR), *singles(4, 5, 6, 7, load=0.0))
    hand.groups[1:] = [replace(one, load=0.5) for one in hand.groups[1:]]
    hand.window(3)
    hand.answer()
    hand.groups = [replace(one, load=9.0) if one.leader in FOUR else one for one in hand.groups]
    hand.demand(1000, times=3)
    hand.answer()
    (_, down), (_, up) = hand.decisions
    assert set(down.epochs) & set(up.epochs) == set()
    assert hand.window(20) is None
    found = hand.window(5)
    assert found is not None and found.lever == "scale_down"


def test_a_morph_by_hand_holds_every_member_back() -> None:
    hand = Hand(*singles(*range(4)))
    for one in hand.groups:
        hand.state = hand.state.with_track(one.instance, Track(1, 1000.0))
    report = MorphReport(
        id="by-hand",
        kind="transform",
        target="m@w0",
        worker="w0",
        epoch=1,
        state="running",
        reason="",
        started_ms=0,
        workers=["w0", "w1"],
    )
    hand.state = observe(hand.state, report, hand.at_s)
    found = hand.demand(300, times=3)
    assert found is not None and list(found.epochs) == ["w2", "w3"]


@pytest.mark.parametrize(
    ("kind", "state", "degrees", "cools"),
    [
        ("transform", "applied", (2, 4), True),
        ("transform", "applied", (4, 4), False),
        ("transform", "failed", (2, 4), False),
        ("transform", "conflict", (2, 4), False),
        ("swap", "applied", (4, 4), False),
        ("deploy", "applied", (), True),
    ],
)
def test_only_a_change_of_degree_holds_the_next_one(
    kind: Any, state: Any, degrees: tuple[int, int], cools: bool
) -> None:
    report = MorphReport(
        id="by-hand",
        kind=kind,
        target="m@w0",
        worker="w0",
        epoch=1,
        state=state,
        reason="",
        started_ms=0,
        workers=["w0", "w1"],
        numbers=dict(zip(("tp_before", "tp_after"), degrees, strict=False)),
    )
    track = observe(State(tracks={"m@w0": Track(1, 1000.0)}), report, 1001.0).tracks["m@w0"]
    assert track.is_cooling(1002.0, 5.0) == cools
