"""The serving benchmark: what it asks for, where the other gateways send it, and what its numbers mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from bench.common.load import text_of
from bench.serving import compare as serving
from bench.serving import load as serving_load
from bench.serving import setup as serving_setup
from bench.serving.gateway import (
    PICKS,
    LongRequestGroup,
    Orders,
    RoundRobinPick,
    UnawarePlacement,
    least_load,
)
from bench.serving.load import LoadArrival, LoadServed, ServingLoad, arrivals
from bench.serving.report import (
    OURS,
    ROUND_ROBIN,
    ServingOutcome,
    ServingRun,
    ServingShape,
    bars,
    card,
    grouped,
    grouped_share,
    outcome,
    shapes_of,
)
from bus.messages import InstanceCard
from bus.morphs import MorphReport
from gateway import state
from gateway.delivery.cluster import ReadyInstance
from gateway.delivery.request import RequestState
from gateway.errors import ApiError
from instar.replay import outcomes
from instar.replay.outcomes import UNFINISHED, conclude
from tests.support.gateway_core import Core

LOAD = ServingLoad(
    short_prompt=90,
    short_output=10,
    long_prompt=900,
    long_output=100,
    seconds=100.0,
    warm_up_s=20.0,
    first_long_s=10.0,
    drain_s=10.0,
)
WORKERS = ("w0", "w1", "w2", "w3")
TOKENS_AT = {1: 200, 2: 500, 4: 2000}


# ------------------------------------------------------------------------------------- what is asked for


def test_the_same_seed_asks_for_the_same_and_so_much_as_the_rate_says() -> None:
    script = arrivals(LOAD, 1)
    assert script == arrivals(LOAD, 1) != arrivals(LOAD, 2)
    assert [one.at_s for one in script] == sorted(one.at_s for one in script)
    assert [one.number for one in script] == list(range(102))
    assert [one.at_s for one in script if one.is_long] == [10.0, 70.0]
    assert {(len(one.prompt), one.num_out) for one in script} == {(90, 10), (900, 100)}
    assert LOAD.asked_tokens_per_s == pytest.approx(100 + 1000 / 60)


def test_a_full_run_has_three_long_requests_in_its_window_and_a_quick_one_is_short() -> None:
    held = {1: 1856, 2: 7936, 4: 16384}
    load = serving_setup.make_load(held, 32, is_quick=False)
    long = [one for one in arrivals(load, 0) if one.is_long]
    assert len([one for one in long if load.warm_up_s <= one.at_s < load.seconds]) >= 3
    assert load.seconds - load.warm_up_s >= 180
    assert load.short_output / (load.short_prompt + load.short_output) == pytest.approx(0.103, abs=0.002)
    assert held[2] < load.long_tokens <= held[4] / 2
    assert serving_setup.make_load(held, 32, is_quick=True).seconds < 90
    with pytest.raises(RuntimeError, match="TP4"):
        serving_setup.make_load({1: 1856, 2: 16384, 4: 16384}, 32, is_quick=False)


@pytest.mark.parametrize("num_workers", [4, 8])
def test_every_way_uses_all_workers_and_static_ones_never_change(num_workers: int) -> None:
    there = serving.ways(num_workers)
    assert {sum(way.shapes) for way in there} == {num_workers}
    assert [way.policy["mode"] for way in there] == ["default"] * 3 + ["manual"] * 3
    assert all(way.policy["max_tp"] == max(way.shapes) for way in there if way.is_static)
    assert {way.pick for way in there} == {"", *PICKS}
    assert [way.name for way in serving.chosen_ways(there, "ours,round")] == [OURS, ROUND_ROBIN]


# ------------------------------------------------------------------------------------- who gets it


def ready(*workers: str) -> ReadyInstance:
    card = InstanceCard(
        id=f"m@{workers[0]}",
        model="m",
        model_path="/nowhere",
        max_model_len=5000,
        vocab_size=10,
        num_layers=1,
        dtype="float32",
        block_tokens=16,
        tp=len(workers),
        workers=list(workers),
        degrees=list(TOKENS_AT),
        tokens_at=TOKENS_AT,
    )
    return ReadyInstance(card, workers[0], 1)


def test_round_robin_takes_one_after_the_other_by_number_whatever_they_have_to_do() -> None:
    pick = RoundRobinPick()
    there = [ready(name) for name in ("w10", "w2", "w1")]
    assert [pick(there, {"w2": 99}).worker for _ in range(4)] == ["w1", "w2", "w10", "w1"]
    assert pick([ready("w0", "w1"), ready("w3")], {}).worker == "w3"


def test_least_load_takes_the_instance_with_the_fewest_tokens_left_its_members_together() -> None:
    there = [ready("w0", "w1"), ready("w2"), ready("w3")]
    assert least_load(there, {"w0": 5, "w1": 9, "w2": 8, "w3": 8}).worker == "w2"
    assert least_load(there, {"w1": 7, "w2": 8, "w3": 8}).worker == "w0"


class Told(Orders):
    def __init__(self) -> None:
        super().__init__("")
        self.groups: list[LongRequestGroup] = []

    def send(self, group: LongRequestGroup) -> None:
        self.groups.append(group)


def core_of(monkeypatch: pytest.MonkeyPatch, pick: str, orders: Orders) -> Core:
    """A gateway's core that goes where `pick` says, with four workers alone."""
    monkeypatch.setitem(
        vars(state), "Placement", partial(UnawarePlacement, pick=PICKS[pick](), orders=orders)
    )
    core = Core()
    for name in WORKERS:
        core.worker(name)
        become(core, [name])
    core.poll()
    return core


def become(core: Core, group: Sequence[str]) -> None:
    for name in group:
        instance = replace(ready(*group).card, id=f"m@{name}")
        core.cards[name] = replace(core.cards[name], link="h:1", instances=[instance])


def long_flight(core: Core, name: str) -> RequestState:
    return core.state(name, prompt=[1] * 900, max_tokens=100)


def at(state: RequestState) -> str:
    return state.target.worker if state.target else ""


@pytest.mark.parametrize("pick", PICKS)
def test_short_requests_are_spread_and_a_long_one_makes_a_group_of_neighbours_at_once(
    monkeypatch: pytest.MonkeyPatch, pick: str
) -> None:
    orders = Told()
    core = core_of(monkeypatch, pick, orders)
    short = core.submit("a", "b", "c")
    assert [at(one) for one in short] == ["w0", "w1", "w2"]
    long = long_flight(core, "long")
    core.delivery.submit(long)
    assert (orders.groups, at(long)) == ([LongRequestGroup(WORKERS)], "")
    (late,) = core.submit("d")
    assert at(late) in WORKERS  # who is becoming one still takes requests
    become(core, WORKERS)
    core.poll()
    assert at(long) in WORKERS
    assert not core.delivery.table.for_room  # and no controller was asked
    core.gateway.check_integrity()


def test_an_unaware_gateway_refuses_what_no_shape_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(monkeypatch, ROUND_ROBIN, Told())
    core.cluster.max_tp = 2
    with pytest.raises(ApiError, match="500"):
        core.delivery.submit(long_flight(core, "long"))


# ------------------------------------------------------------------------------------- what it says


def served(
    at_s: float, *token_s: float, is_long: bool = False, is_whole: bool = True, **more: Any
) -> LoadServed:
    num_out, length = (100, 900) if is_long else (10, 90)
    arrival = LoadArrival(0, at_s, [1] * length, num_out, is_long)
    return LoadServed(arrival, list(token_s), is_whole=is_whole, **more)


def run_of(*all_served: LoadServed, shapes: Sequence[ServingShape] = (), way: str = OURS) -> ServingRun:
    return ServingRun(way, list(all_served), (1,) * 4, list(shapes), [], 0, 0, 0, [], 0.0)


def outcome_of(*all_served: LoadServed, shapes: Sequence[ServingShape] = ()) -> ServingOutcome:
    return outcome(run_of(*all_served, shapes=shapes), LOAD)


def test_events_are_read_to_their_end_and_an_error_is_one() -> None:
    arrival = served(1.0).arrival
    ended = outcomes.RequestOutcome(0, 1.0, 90, 10, first_s=2.0, last_s=3.0, status=200)
    events = [
        "data: " + json.dumps({"choices": [{"text": text, "finish_reason": reason}]})
        for text, reason in (("a", None), ("b", "length"))
    ]
    tail = "\n\n".join([*events, "data: [DONE]", ": keepalive"]).encode()
    conclude(ended, tail)
    one = serving_load.served(arrival, ended, [2.0, 3.0], text_of(tail))
    assert (one.text, one.token_s, one.is_whole, one.error) == ("ab", [2.0, 3.0], True, "")
    lost = outcomes.RequestOutcome(0, 1.0, 90, 10, first_s=2.0, last_s=3.0, status=200)
    conclude(lost, tail + b'\n\ndata: {"error": {"message": "gone"}}')
    assert "gone" in serving_load.served(arrival, lost, [2.0, 3.0], "").error


def test_a_refusal_is_no_error_and_what_still_runs_is_neither() -> None:
    arrival = served(1.0).arrival
    refused = serving_load.served(
        arrival, outcomes.RequestOutcome(0, 1.0, 90, 10, status=400, error="400 too_long"), [], ""
    )
    assert (refused.refused, refused.error, refused.is_whole) == ("400 too_long", "", False)
    left = serving_load.served(
        arrival, outcomes.RequestOutcome(0, 1.0, 90, 10, status=200, error=UNFINISHED), [2.0], ""
    )
    assert (left.refused, left.error, left.is_whole, left.token_s) == ("", "", False, [2.0])


def test_a_prompt_counts_with_its_first_token_and_events_share_the_tokens_of_what_ended() -> None:
    one = served(0.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    assert one.tokens_between(0.0, 5.5) == 92.0
    assert one.tokens_between(5.5, 7.5) == 4.0
    assert replace(one, is_whole=False).tokens_between(5.0, 7.0) == 92.0
    assert served(0.0).tokens_between(0.0, 9.0) == 0.0
    assert one.tpot_s == pytest.approx(4 / 9)


def test_throughput_is_of_the_window_and_who_still_waits_counts_with_its_wait() -> None:
    found = outcome_of(
        served(5.0, 19.0, 20.0),  # its prompt came before the window
        served(30.0, 31.0, 32.0),
        served(60.0, is_whole=False),
        served(70.0, is_long=True, is_whole=False, refused="400"),
        served(80.0, is_long=True, is_whole=False, error="504"),
    )
    assert found.tokens_per_s == pytest.approx((5 + 100) / 80)
    assert found.in_time_tokens_per_s == pytest.approx((100) / 80)
    assert found.short_ttft_p95_s == pytest.approx(1.0)  # the lower of two
    assert found.long_ttft_p95_s == pytest.approx(30.0)  # so far; what is refused waits no more
    assert (found.num_short, found.num_short_ended, found.num_long, found.num_long_ended) == (2, 1, 2, 0)
    assert (found.num_refused, found.num_errors) == (1, 1)


def test_transforms_are_counted_by_their_direction_and_their_time_in_groups_is_known() -> None:
    shapes = [ServingShape(40.0, 4, WORKERS), ServingShape(80.0, 1, WORKERS)]
    found = outcome_of(served(30.0, 31.0), shapes=shapes)
    assert (found.num_up, found.num_down) == (1, 1)
    run = run_of(shapes=shapes)
    assert grouped(run, 100.0) == [(0.0, 0), (40.0, 4), (80.0, 0), (100.0, 0)]
    assert grouped_share(run, LOAD) == pytest.approx(0.5)


def test_only_transforms_that_were_applied_and_changed_anything_are_shapes() -> None:
    def report(state: str, after: int) -> MorphReport:
        return MorphReport(
            id="x",
            kind="transform",
            target="m@w0",
            worker="w0",
            epoch=1,
            state=cast(Any, state),
            reason="",
            started_ms=1000,
            ended_ms=3500,
            numbers={"tp_before": 1, "tp_after": after},
            workers=list(WORKERS),
        )

    assert shapes_of([report("deferred", 4), report("applied", 1), report("applied", 4)], 1.0) == [
        ServingShape(2.5, 4, WORKERS)
    ]


def test_a_bar_that_is_missed_is_said_to_be_missed() -> None:
    ours, other = outcome_of(served(30.0, 31.0, 32.0)), outcome_of(served(30.0, 31.0, is_whole=False))
    judged = bars({OURS: ours, ROUND_ROBIN: ours})
    assert not judged[f"throughput to {ROUND_ROBIN}"]["is_met"]
    told = card({OURS: ours, ROUND_ROBIN: ours}, judged)
    assert "1.0 (bar 1.26): MISSED" in told
    better = bars({OURS: replace(ours, tokens_per_s=1.27 * other.tokens_per_s), ROUND_ROBIN: other})
    assert better[f"throughput to {ROUND_ROBIN}"]["is_met"]
    assert bars({ROUND_ROBIN: other}) == {}
