"""Which instances become a group and when a group parts; what the cards allow at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.groups import longest_tokens, natural, parted
from bus.messages import LayerShape
from bus.policy import Policy
from controller.morphing.groups import Group, groups_of
from controller.morphing.parallelism import Merge, degrees_below
from controller.morphing.resting import Rest
from controller.morphing.track import Waiting
from controller.morphing.weighing import WeighedMerge, taken_merges, weigh_long
from tests.support.parallelism_groups import TOKENS_AT, group, live, metrics_for, singles, worker_card

# --------------------------------------------------------------------------- scale-up


def merge(groups: list[Group], num_tokens: int, max_tp: int = 0) -> Merge:
    found = decide_scale_up(groups, num_tokens, max_tp)
    assert found is not None
    return found


def decide_scale_up(groups: list[Group], num_tokens: int, max_tp: int = 0) -> Merge | None:
    """The merge that the planner takes for a request that has lost its patience."""
    found = weighed(groups, num_tokens, max_tp)
    return found.merge if found and not found.parting else None


def weighed(groups: list[Group], num_tokens: int, max_tp: int = 0) -> WeighedMerge | None:
    policy = Policy(max_tp=max_tp).in_force()
    assert policy is not None
    waiting = Waiting(num_tokens, 1, 3, 0.0, 0.0)
    plan, offers = weigh_long(groups, groups, groups, groups, waiting, policy, 60.0)
    return next(iter(taken_merges(plan, offers)), None)


def decide_scale_down(group: Group, free_share: float) -> int | None:
    return next(iter(degrees_below(group, free_share)), None)


def test_the_lowest_degree_that_holds_it_is_made() -> None:
    eight = singles(*range(8))
    assert (merge(eight, 300).tp, merge(eight, 300).workers) == (2, ["w0", "w1"])
    assert (merge(eight, 1000).tp, merge(eight, 1000).workers) == (4, ["w0", "w1", "w2", "w3"])
    assert merge(eight, 3000).tp == 8
    assert decide_scale_up(eight, 3001) is None


def test_the_least_loaded_neighbours_come_together() -> None:
    loads = [0, 9, 1, 1, 3, 3, 0, 5]
    groups = [replace(one, load=load) for one, load in zip(singles(*range(8)), loads, strict=True)]
    assert merge(groups, 300).workers == ["w2", "w3"]  # idle ones that are no neighbours would not do


def test_without_free_neighbours_any_workers_of_the_host_do() -> None:
    assert merge(singles(1, 2, 5, 7), 1000).workers == ["w1", "w2", "w5", "w7"]
    there = [group("w0", "w2"), *singles(1, 3)]
    assert merge(there, 300).workers == ["w1", "w3"]


def test_a_group_of_more_than_the_kv_heads_is_made_of_single_workers_and_parts_into_them() -> None:
    def of(*members: str) -> Group:
        cards = [worker_card(name, members, kv_heads=2) for name in members]
        (found,) = groups_of(metrics_for(*cards), live(*cards))
        return found

    assert set(of("w0").tokens_at) == {1, 2, 4, 8}
    assert set(of("w0", "w1").tokens_at) == {1, 2}
    shared = of("w0", "w1", "w2", "w3")
    assert set(shared.tokens_at) == {1, 4} and degrees_below(shared, 0.0) == [1]
    assert decide_scale_up([of("w0", "w1"), of("w2", "w3")], 1000) is None
    assert merge([of(f"w{number}") for number in range(4)], 1000).tp == 4


def test_groups_become_larger_before_more_single_workers_change() -> None:
    there = [group("w0", "w1", load=5), group("w2", "w3", load=5), *singles(4, 5, 6, 7)]
    found = merge(there, 1000)
    assert found.groups == tuple(there[:2])
    assert found.workers == ["w0", "w2", "w1", "w3"]  # shards nest: 0 of both, then 1 of both


def test_unlike_instances_do_not_become_one() -> None:
    assert decide_scale_up([group("w0", "w1"), *singles(2, 3)], 1000) is None
    assert decide_scale_up([group("w0"), group("w1", host="other")], 300) is None
    assert decide_scale_up([group("w0"), group("w1", model="other")], 300) is None
    assert decide_scale_up([group("w0", device="H100"), group("w1", device="L4")], 300) is None
    assert decide_scale_up([group("w0"), group("w1", tokens_at={1: 100})], 300) is None


def test_a_group_that_is_too_small_parts_to_become_a_larger_one_with_others() -> None:
    small = group("w0", "w1", used=50, own_tokens=(30, 20))
    found = weighed([small, *singles(2, 3)], 1000)
    assert found is not None and found.parting == small
    assert (found.merge.tp, found.merge.workers) == (4, ["w0", "w1", "w2", "w3"])
    assert [one.used_tokens for one in found.merge.groups] == [30, 20, 0, 0]
    assert weighed([replace(small, used_tokens=250), *singles(2, 3)], 1000) is None  # less than half is free
    assert weighed([replace(small, longest_tokens=300), *singles(2, 3)], 1000) is None  # a long one runs


def test_what_lies_in_the_caches_is_reckoned_with() -> None:
    busy = singles(0, 1, used=60)
    assert decide_scale_up(busy, 290) is None  # 400 hold 120 and 280
    assert merge(busy, 280).tp == 2
    four = singles(0, 1, 2, 3, used=60)
    assert merge(four, 290).tp == 4
    assert merge([*busy, *singles(2, 3)], 290).workers == ["w2", "w3"]


def test_workers_whose_layers_differ_in_precision_come_together_where_that_costs_less_than_others() -> None:
    full, low = (LayerShape(),), (LayerShape(ffn="int4"),)
    mixed = [replace(one, layers=low if one.leader in ("w1", "w3") else full) for one in singles(*range(4))]
    assert merge(mixed, 300).workers == ["w0", "w1"]  # a half goes back sooner than strangers get to know
    assert merge([mixed[1], mixed[3]], 300).workers == ["w1", "w3"]
    assert merge(mixed, 1000).workers == ["w0", "w1", "w2", "w3"]
    eight = [*mixed, *(replace(one, layers=full) for one in singles(4, 5, 6, 7))]
    assert merge(eight, 1000).workers == ["w4", "w5", "w6", "w7"]
    apart = replace(mixed[1], layers=(LayerShape(ffn="int4"),) * 2)
    assert decide_scale_up([mixed[0], apart], 300) is None


def test_a_limit_of_the_degree_is_kept() -> None:
    assert merge(singles(*range(8)), 300, max_tp=2).tp == 2
    assert decide_scale_up(singles(*range(8)), 1000, max_tp=2) is None


# --------------------------------------------------------------------------- scale-down


def test_a_group_parts_when_its_long_requests_are_over_and_half_of_the_kv_is_free() -> None:
    four = group("w0", "w1", "w2", "w3", used=50)
    assert decide_scale_down(four, 0.5) == 1
    assert decide_scale_down(replace(four, longest_tokens=101), 0.5) == 2
    assert decide_scale_down(replace(four, longest_tokens=401), 0.5) is None
    assert decide_scale_down(replace(four, used_tokens=601), 0.5) is None
    assert decide_scale_down(group("w0"), 0.5) is None


def test_a_group_parts_as_soon_as_each_part_holds_what_its_members_requests_have() -> None:
    """A group that gets less done than comes would never be half empty by what one worker holds."""
    four = group("w0", "w1", "w2", "w3", used=400)
    assert decide_scale_down(four, 0.5) == 2  # it may all be of one
    assert decide_scale_down(replace(four, own_tokens=(100, 100, 100, 100)), 0.5) == 1
    assert decide_scale_down(replace(four, own_tokens=(101, 99, 100, 100)), 0.5) == 2
    assert decide_scale_down(replace(four, own_tokens=(300, 0, 100, 0)), 0.5) == 2  # w0, w2; w1, w3
    assert decide_scale_down(replace(four, own_tokens=(301, 0, 100, 0)), 0.5) is None


def test_the_parts_are_the_subgroups_that_it_was_made_of() -> None:
    made = merge([group("w0", "w1"), group("w2", "w3"), *singles(4)], 1000)
    four = group(*made.workers)
    assert parted(four.workers, 2) == [("w0", "w1"), ("w2", "w3")]
    assert parted(four.workers, 1) == [("w0",), ("w2",), ("w1",), ("w3",)]


numbers = st.integers(0, 100)


@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 4]), numbers, st.floats(0, 9)), min_size=1, max_size=8),
    st.integers(101, 3000),
    st.sampled_from([0, 2, 4]),
)
def test_a_new_group_holds_what_it_is_made_for_and_nothing_is_in_it_twice(
    shapes: list[tuple[int, int, float]], num_tokens: int, max_tp: int
) -> None:
    there, first = [], 0
    for tp, used, load in shapes:
        there.append(group(*(f"w{i}" for i in range(first, first + tp)), used=used, load=load))
        first += tp
    found = decide_scale_up(there, num_tokens, max_tp)
    if found is not None:
        assert len(set(found.workers)) == len(found.workers) == found.tp
        assert len({one.tp for one in found.groups}) == 1
        assert TOKENS_AT[found.tp] >= num_tokens + sum(one.used_tokens for one in found.groups)
        assert found.tp <= (max_tp or 8)
        assert parted(found.workers, found.groups[0].tp) == [tuple(one.workers) for one in found.groups]


@given(st.sampled_from([2, 4, 8]), st.data(), st.integers(0, 3000), st.floats(0, 1))
def test_what_parts_has_room_for_what_stays_with_each_part(
    tp: int, data: st.DataObject, longest: int, free: float
) -> None:
    own = data.draw(st.lists(st.integers(0, 500), min_size=tp, max_size=tp))
    whole = group(*(f"w{i}" for i in range(tp)), used=sum(own), own_tokens=tuple(own), longest_tokens=longest)
    found = decide_scale_down(whole, free)
    if found is not None:
        assert found < tp and longest <= TOKENS_AT[found]
        assert sum(own) <= (1 - free) * TOKENS_AT[tp]
        for part in parted(whole.workers, found):
            assert sum(own[whole.workers.index(name)] for name in part) <= TOKENS_AT[found]


# --------------------------------------------------------------------------- what is seen


def test_a_group_is_one_instance_with_the_load_of_all_its_members() -> None:
    members = ("w2", "w0")
    cards = [worker_card("w0", members), worker_card("w1"), worker_card("w2", members)]
    both, alone = sorted(
        groups_of(metrics_for(*cards, used=50, longest=70, running=2), live(*cards), 1.5), key=lambda g: -g.tp
    )
    assert (both.workers, both.instances, both.leader) == (members, ("m@w2", "m@w0"), "w2")
    assert (both.tp, both.max_tokens, both.used_tokens, both.longest_tokens) == (2, 400, 50, 70)
    assert (both.load, both.age_s, both.tokens_at) == (4, 1.5, TOKENS_AT)
    assert both.own_tokens == (40, 40)  # 2 of the 5 blocks, and a spare one for each of two that run
    assert (alone.workers, alone.max_tokens, alone.load) == (("w1",), 100, 2)


def test_the_weights_of_a_model_are_counted_as_they_were_loaded() -> None:
    layer_pages, attention_pages = {"full": 20, "int8": 6}, {"full": 8, "int8": 2}
    card = worker_card("w0", layer_pages=layer_pages, attention_pages=attention_pages)
    metrics = metrics_for(card)
    (one,) = groups_of(metrics, live(card))
    assert one.weight_bytes == 60
    last = replace(metrics.instances[0].last, layers=[LayerShape(ffn="int8")])
    swapped = replace(metrics, instances=[replace(metrics.instances[0], last=last)])
    (one,) = groups_of(swapped, live(card))
    assert one.weight_bytes == 60 + 8  # pages of a byte; 8 of them are the KV cache's now


def test_a_context_that_ends_before_the_cache_bounds_one_request_and_not_all_together() -> None:
    members = ("w0", "w1")
    cards = [worker_card(name, members, max_model_len=150) for name in members]
    (both,) = groups_of(metrics_for(*cards, used=180, longest=90), live(*cards))
    assert (both.max_tokens, both.usage) == (150, 180 / 400)
    assert decide_scale_down(both, 0.5) == 1
    cards = [worker_card(name, max_model_len=150) for name in members]
    apart = groups_of(metrics_for(*cards, used=90), live(*cards))
    assert decide_scale_up(apart, 160) is None
    merge = decide_scale_up(apart, 140)
    assert merge is not None and (merge.tp, merge.tokens_after) == (2, 150)


@pytest.mark.parametrize(
    "other", [{"state": "draining"}, {"epoch": 2}, {"tp": 1}, {"workers": ["w1"]}, {"model": "x"}]
)
def test_a_group_whose_members_do_not_agree_is_not_seen(other: dict[str, Any]) -> None:
    members = ("w0", "w1")
    cards = [worker_card("w0", members), worker_card("w1", members)]
    metrics = metrics_for(*cards)
    assert len(groups_of(metrics, live(*cards))) == 1
    cards[1] = worker_card("w1", members, **other)
    assert all(one.tp == 1 for one in groups_of(metrics, live(*cards)))


def test_a_deployment_of_a_degree_does_not_part_below_it() -> None:
    members = ("w0", "w1")
    cards = [worker_card(name, members, deployed=f"d1-1-{name}") for name in members]
    metrics = metrics_for(*cards)
    assert groups_of(metrics, live(*cards)) == []  # nothing is known of it yet
    (both,) = groups_of(metrics, live(*cards), rests={f"m@{name}": Rest(tp=2) for name in members})
    assert (both.tp, both.resting_tp) == (2, 2)
    assert decide_scale_down(both, 0.1) is None
    assert decide_scale_down(replace(both, resting_tp=1), 0.1) == 1


def test_workers_that_nobody_can_reach_are_in_no_group() -> None:
    (alone,) = groups_of(metrics_for(card := worker_card("w0", link="")), live(card))
    assert alone.tokens_at == {1: 100}


# --------------------------------------------------------------------------- what the cards allow


def test_the_longest_is_that_of_the_largest_group_on_one_host() -> None:
    cards = [worker_card(f"w{i}") for i in range(4)]
    assert longest_tokens(cards, "m") == 1200
    assert longest_tokens(cards, "m", max_tp=2) == 400
    assert longest_tokens(cards[:3], "m") == 400
    assert longest_tokens(cards[:1], "m") == longest_tokens(cards, "other") == 0
    spread = [worker_card(f"w{i}", host=f"h{i // 2}") for i in range(4)]
    assert longest_tokens(spread, "m") == 400


def test_the_member_with_the_least_memory_decides() -> None:
    cards = [worker_card("w0"), worker_card("w1", tokens_at={2: 150}), worker_card("w2", degrees=[1])]
    assert longest_tokens(cards, "m") == 150


def test_the_models_context_is_a_limit_too() -> None:
    assert longest_tokens([worker_card("w0", max_model_len=90), worker_card("w1")], "m") == 90


def test_workers_are_sorted_by_their_numbers() -> None:
    assert sorted(["w10", "w2", "a", "w", "7"], key=natural) == ["7", "a", "w", "w2", "w10"]
