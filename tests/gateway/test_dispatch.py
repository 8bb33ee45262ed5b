"""Algorithm 1: where short and long requests go when instances of several degrees are about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.delivery.dispatch import (
    SPLIT_PATIENCE_S,
    Candidate,
    QueuesAhead,
    Seat,
    TooLong,
    Wait,
    WaitForSplit,
    choose,
    is_long,
    member_for,
)

LOW, HIGH = 100, 1000
AHEAD = QueuesAhead(reserved_tokens=500)


def seat(name: str, load: float = 0.0, short: float = 0.0) -> Seat:
    return Seat(name, name, 1, load, 0, 0, short_tokens=short, home_tokens=LOW)


def full(name: str, short: float = LOW, load: float = 0.0, **changes: Any) -> Candidate:
    """A group of four, each of which has so many tokens of short requests."""
    seats = tuple(seat(f"{name}{i}", short=short) for i in range(4))
    return one(name, load, tp=4, seats=seats, **changes)


def one(name: str, load: float = 0.0, **changes: Any) -> Candidate:
    """A candidate of one worker; a group of four with `tp=4`."""
    tp = changes.get("tp", 1)
    base: dict[str, Any] = {
        "worker": name,
        "epoch": 1,
        "max_tokens": HIGH if tp > 1 else LOW,
        "num_own": 0,
        "num_own_since": 0,
        "low_tokens": LOW,
        "free_tokens": HIGH if tp > 1 else LOW,
        "stays": tp == 1,
        "seats": tuple(seat(f"{name}{i}") for i in range(tp if tp > 1 else 0)),
    }
    return Candidate(**(base | {"instance": name, "num_measured": load} | changes))


def test_a_request_is_long_if_no_single_worker_holds_it() -> None:
    there = [one("a"), one("g", tp=4)]
    assert is_long(there, LOW + 1) and not is_long(there, LOW)
    assert not is_long([*there, one("b", low_tokens=300)], 200)  # a device with more memory


def test_a_long_request_goes_to_the_group_however_loaded_it_is() -> None:
    there = [one("a"), one("g", tp=4, load=50)]
    assert choose(there, 500) == there[1]


def test_of_two_groups_a_long_request_takes_the_one_that_has_to_stay() -> None:
    there = [one("g", tp=4), one("h", tp=4, load=8, stays=True)]
    assert choose(there, 500) == there[1]


def test_a_long_request_waits_for_room_in_a_group_rather_than_in_its_queue() -> None:
    there = [one("a"), one("g", tp=4, free_tokens=499, stays=True)]
    assert choose(there, 500) == Wait.GROUP
    assert choose(there, 499) == there[1]


def test_a_group_of_unknown_room_is_tried() -> None:
    group = one("g", tp=4, free_tokens=None)
    assert choose([group], 500) == group


def test_what_no_instance_holds_names_the_largest() -> None:
    assert choose([one("a"), one("g", tp=4)], HIGH + 1) == TooLong(HIGH)


def test_a_short_request_keeps_away_from_a_group_that_is_to_part() -> None:
    there = [one("a", load=9, free_tokens=0), one("g", tp=4)]
    assert choose(there, 10) == there[0]


def test_a_short_request_uses_the_room_of_a_group_that_stays_when_it_would_wait_elsewhere() -> None:
    there = [one("a", load=9, free_tokens=0), one("g", tp=4, stays=True)]
    assert choose(there, 10) == there[1]
    assert choose([replace(there[0], free_tokens=10), there[1]], 10) == replace(there[0], free_tokens=10)


def test_a_short_request_leaves_the_room_that_a_long_one_waits_for() -> None:
    there = [one("a", free_tokens=0), one("g", tp=4, stays=True, free_tokens=510)]
    assert choose(there, 10, "", AHEAD) == there[1]
    assert choose(there, 11, "", AHEAD) == there[0]


def test_where_there_are_only_groups_a_short_request_goes_after_a_long_one_that_waits() -> None:
    group = one("g", tp=4, stays=True, free_tokens=509)
    assert choose([group], 10, "", AHEAD) == Wait.LONG
    assert choose([group], 9, "", AHEAD) == group
    assert choose([replace(group, stays=False)], 10, "", AHEAD) == Wait.LONG
    assert (
        choose([group], 10, "", QueuesAhead(reserved_tokens=HIGH + 1)) == group
    )  # that one waits for another
    assert choose([group, one("a", free_tokens=0)], 10, "", AHEAD) == one("a", free_tokens=0)


def test_where_there_are_only_groups_short_short_requests_run_there() -> None:
    there = [one("g", tp=4, load=3), one("h", tp=4, load=2)]
    assert choose(there, 10) == there[1]


def test_load_is_that_of_one_workers_share() -> None:
    there = [one("g", tp=2, load=3, stays=True), one("h", tp=4, load=4, stays=True)]
    assert choose(there, 10) == there[1]


def test_a_request_that_would_keep_the_only_group_from_parting_should_wait_for_the_parts() -> None:
    idle, busy = one("g", tp=4), full("h", short=91)
    assert choose([busy], 10) == WaitForSplit(busy)
    assert choose([busy], 9) == busy  # it parts all the same
    assert choose([idle, busy], 90) == idle  # alone it may have all of it
    staying = full("s", stays=True, can_split=False, free_tokens=0)
    assert choose([busy, staying], 10) == staying  # nothing parts by itself


def test_beside_a_long_request_there_are_no_more_short_ones_than_the_parts_will_hold() -> None:
    """Else a group that gets less done than comes would never part again."""
    busy = full("g", short=91, stays=True)
    assert choose([busy], 9) == busy
    assert choose([busy], 10) == WaitForSplit(busy)
    assert choose([replace(busy, can_split=False)], 10) == replace(busy, can_split=False)
    single = one("a", free_tokens=0)
    assert choose([busy, single], 9) == busy and choose([busy, single], 10) == single
    assert choose([busy], 500) == busy  # a long one


def test_the_member_with_the_fewest_requests_and_room_at_home_takes_the_next() -> None:
    seats = (seat("w10", 1), seat("w2", 1), seat("w3", 0, short=95), seat("w4", 2))
    group = one("g", tp=4, seats=seats)
    assert [member_for(group, n).worker for n in (5, 6, 500)] == ["w3", "w2", "w3"]
    assert member_for(one("a"), 5) == one("a")


def test_members_get_the_same_number_of_requests() -> None:
    seats = [seat(f"w{i}") for i in range(4)]
    for _ in range(11):
        taken = member_for(one("g", tp=4, seats=tuple(seats)), 5)
        seats = [
            replace(each, num_own=each.num_own + 1, num_own_since=each.num_own_since + 1)
            if each.worker == taken.worker
            else each
            for each in seats
        ]
    assert [each.num_own for each in seats] == [3, 3, 3, 2]


def test_a_long_request_goes_after_a_long_one_that_came_before() -> None:
    group = one("g", tp=4, stays=True)
    assert choose([group], 500) == group
    assert choose([group], 500, "", QueuesAhead(has_long=True)) == Wait.GROUP


def test_what_the_instances_cannot_hold_waits_for_a_larger_shape_that_can() -> None:
    there = [one("a")]
    assert choose(there, 500, "", QueuesAhead(cluster_tokens=500)) == Wait.GROUP
    assert choose(there, 501, "", QueuesAhead(cluster_tokens=500)) == TooLong(500)


def test_a_short_request_overtakes_only_those_whose_precision_the_instance_lacks() -> None:
    coarse = one("g", tp=4, precision="int4")
    assert choose([coarse], 10, "", QueuesAhead(short_floors=["full"])) == coarse
    assert choose([coarse], 10, "", QueuesAhead(short_floors=["full", ""])) == WaitForSplit(coarse)


def test_a_short_request_that_waited_long_enough_for_a_split_goes_to_the_group() -> None:
    busy = full("g", short=91)
    for waited_s, is_overdue in ((SPLIT_PATIENCE_S - 1, False), (SPLIT_PATIENCE_S, True)):
        ahead = QueuesAhead(now=7 + waited_s, waits_since=7.0)
        assert choose([busy], 10, "", ahead) == WaitForSplit(busy, is_overdue)


candidates = st.builds(
    lambda name, load, tp, free, stays, parts, short: (
        full(name, short, load=load, free_tokens=free, stays=stays or not parts, can_split=parts)
        if tp > 1
        else one(name, load, free_tokens=free)
    ),
    st.sampled_from("abcdefgh"),
    st.floats(0, 20),
    st.sampled_from([1, 4]),
    st.one_of(st.none(), st.floats(0, HIGH)),
    st.booleans(),
    st.booleans(),
    st.floats(0, LOW),
)


@given(st.lists(candidates, min_size=1, max_size=8), st.integers(1, HIGH), st.integers(0, HIGH))
def test_whatever_is_chosen_holds_it_and_respects_the_ranks(
    there: list[Candidate], num_tokens: int, reserved: int
) -> None:
    found = choose(there, num_tokens, "", QueuesAhead(reserved_tokens=reserved))
    fitting = [c for c in there if num_tokens <= c.max_tokens]
    if not fitting:
        assert found == TooLong(max(c.max_tokens for c in there))
    elif is_long(there, num_tokens):
        roomy = [c for c in fitting if c.free_tokens is None or c.free_tokens >= num_tokens]
        assert found in roomy if roomy else found == Wait.GROUP
    else:
        if found is Wait.LONG or isinstance(found, WaitForSplit):
            assert all(c.tp > 1 for c in fitting)
            assert found is Wait.LONG or found.candidate.can_split
            return
        assert isinstance(found, Candidate) and found in fitting
        if found.tp > 1 and found.can_split:
            assert any(each.is_home(num_tokens) for each in found.seats)
        singles = [c for c in fitting if c.tp == 1]
        if singles and found.tp > 1:  # only where a request would wait at every single worker
            assert found.stays
            assert all(c.free_tokens is not None and c.free_tokens < num_tokens for c in singles)
            if found.free_tokens is not None and found.max_tokens >= reserved:
                assert found.free_tokens >= num_tokens + reserved


def test_a_conversation_returns_to_the_instance_that_has_its_beginning() -> None:
    there = [one("a", load=1), one("b", load=2, cached_tokens=1024)]
    assert getattr(choose(there, 10), "instance", "") == "b", "two sequences of work are saved there"
    busier = [one("a", load=1), one("b", load=3.5, cached_tokens=100_000)]
    assert getattr(choose(busier, 10), "instance", "") == "a", "it waits there longer than it saves"


def test_a_common_beginning_does_not_gather_all_requests_in_one_place() -> None:
    sent = {"a": 0, "b": 0, "c": 0}
    for _ in range(30):
        there = [
            one(name, num_own=count, num_own_since=count, cached_tokens=1024 * (name == "a"), load=0.0)
            for name, count in sent.items()
        ]
        sent[getattr(choose(there, 10), "instance", "")] += 1
    assert sent["a"] - min(sent.values()) <= 3, sent


def test_a_member_of_a_group_that_has_the_beginning_takes_the_request() -> None:
    seats = tuple(replace(seat(f"g{i}"), cached_tokens=600 * (i == 2)) for i in range(4))
    assert member_for(one("g", tp=4, seats=seats), 10).worker == "g2"
