"""Layers onto devices: every layer once and in order, no device over its limit, nothing missed that fits."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.deployments import Configuration
from bus.messages import Stage
from controller.planning.fitting import Device, Refusal, even, fit
from controller.planning.memory import Footprint


def devices(*free: int, page_bytes: int = 1, host: str = "") -> list[Device]:
    return [
        Device(worker=f"w{i}", free_bytes=one, page_bytes=page_bytes, host=host) for i, one in enumerate(free)
    ]


def shares(found: list[Stage] | Refusal) -> list[tuple[str, int]]:
    assert not isinstance(found, Refusal), found.reason
    return [("+".join(one.workers), one.end - one.first) for one in found]


# --------------------------------------------------------------------------- by hand


def test_layers_are_spread_evenly_where_there_is_room() -> None:
    found = fit(Footprint(layer_bytes=10), Configuration(pp=4), 10, devices(100, 100, 100, 100))
    assert [size for _, size in shares(found)] == [2, 2, 3, 3]  # the first stage has embedding and head too


def test_layers_are_spread_unevenly_where_devices_differ() -> None:
    """iServe's own example: two on one device, four on the others."""
    found = fit(Footprint(layer_bytes=10), Configuration(pp=3), 10, devices(49, 40, 25))
    assert sorted(size for _, size in shares(found)) == [2, 4, 4]


def test_the_freest_devices_are_taken() -> None:
    found = fit(Footprint(layer_bytes=10), Configuration(pp=2), 4, devices(30, 10, 50, 40))
    assert {worker for worker, _ in shares(found)} == {"w2", "w3"}


def test_the_first_stage_goes_where_embedding_and_head_have_room() -> None:
    need = Footprint(layer_bytes=10, lead_bytes=25)
    assert shares(fit(need, Configuration(pp=2), 5, devices(40, 35))) == [("w1", 1), ("w0", 4)]
    assert isinstance(fit(need, Configuration(pp=2), 2, devices(34, 34)), Refusal)


def test_a_layer_takes_whole_pages() -> None:
    assert isinstance(fit(Footprint(layer_bytes=10), Configuration(), 2, devices(25, page_bytes=16)), Refusal)
    assert shares(fit(Footprint(layer_bytes=10), Configuration(), 2, devices(32, page_bytes=16))) == [
        ("w0", 2)
    ]


def test_a_refusal_says_what_is_needed_and_what_is_there() -> None:
    found = fit(Footprint(layer_bytes=10, lead_bytes=5), Configuration(pp=2), 9, devices(40, 30, 7))
    assert found == Refusal("needs 95 bytes for 9 layers, 70 bytes are free on w0, w1, which hold 6 layers")
    assert fit(Footprint(layer_bytes=10), Configuration(pp=3), 9, devices(40, 40)) == Refusal(
        "needs 3 devices, there are 2"
    )


def test_ranks_of_a_stage_share_a_host_and_have_no_other_model() -> None:
    there = [
        Device(worker="a0", host="a", free_bytes=90),
        Device(worker="b0", host="b", free_bytes=80),
        Device(worker="b1", host="b", free_bytes=70),
        Device(worker="a1", host="a", free_bytes=60, instances=frozenset({"m@a1"})),
    ]
    assert shares(fit(Footprint(layer_bytes=10), Configuration(tp=2), 4, there)) == [("b0+b1", 4)]
    refused = fit(Footprint(layer_bytes=10), Configuration(tp=2, pp=2), 4, there)
    assert refused == Refusal(
        "needs 2 groups of 2 devices of one host that have no other model; 1 can be formed"
    )


def test_workers_of_a_stage_are_in_natural_order() -> None:
    there = [Device(worker=f"w{i}", free_bytes=50 + i) for i in (10, 2)]
    assert shares(fit(Footprint(layer_bytes=10, every_rank_leads=True), Configuration(tp=2), 2, there)) == [
        ("w2+w10", 2)
    ]


def test_the_one_that_leads_is_named_first_where_it_alone_has_room_for_it() -> None:
    need = Footprint(layer_bytes=10, lead_bytes=30)
    found = fit(need, Configuration(tp=2, pp=2), 4, devices(20, 50, 20, 20))
    assert shares(found) == [("w1+w0", 2), ("w2+w3", 2)]


def test_the_leader_takes_the_fullest_along_where_others_would_be_wasted_on_it() -> None:
    """Ranks two by two, in order, from 12, 10, 9 and 5 hold 12 layers at most."""
    need = Footprint(layer_bytes=1, lead_bytes=7)
    assert shares(fit(need, Configuration(tp=2, pp=2), 14, devices(12, 10, 9, 5))) == [
        ("w0+w3", 5),
        ("w1+w2", 9),
    ]


def test_ranks_that_load_the_whole_model_first_all_have_room_for_its_ends() -> None:
    whole = Footprint(layer_bytes=10, lead_bytes=30, every_rank_leads=True)
    assert isinstance(fit(whole, Configuration(tp=2), 2, devices(50, 40)), Refusal)
    assert shares(fit(whole, Configuration(tp=2), 2, devices(50, 50))) == [("w0+w1", 2)]


# --------------------------------------------------------------------------- for all

NEEDS = st.builds(
    Footprint, layer_bytes=st.integers(1, 9), lead_bytes=st.integers(0, 12), device_bytes=st.integers(0, 5)
)
FREE = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@given(need=NEEDS, free=FREE, num_layers=st.integers(1, 9), stages=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_every_layer_has_one_place_in_order_and_what_could_fit_does(
    need: Footprint, free: list[int], num_layers: int, stages: int
) -> None:
    there = devices(*free)
    found = fit(need, Configuration(pp=stages), num_layers, there)
    room = {one.worker: one.free_bytes for one in there}
    if isinstance(found, Refusal):
        freest = sorted(free, reverse=True)[:stages]
        assert stages > min(len(free), num_layers) or not any_partition(need, num_layers, freest)
        return
    assert [layer for one in found for layer in range(one.first, one.end)] == list(range(num_layers))
    assert len({worker for one in found for worker in one.workers}) == stages == len(found)
    for i, one in enumerate(found):
        size = one.end - one.first
        assert size >= 1
        assert need.of(size, leads=i == 0) <= room[one.workers[0]]
    freest_of_all = sorted(free, reverse=True)[:stages]
    assert sorted((room[one.workers[0]] for one in found), reverse=True) == freest_of_all


def any_partition(need: Footprint, num_layers: int, free: list[int]) -> bool:
    """All orders of the devices, all ways to cut."""
    cuts = combinations(range(1, num_layers), len(free) - 1)
    sizes = [[end - first for first, end in zip((0, *cut), (*cut, num_layers), strict=True)] for cut in cuts]
    return any(
        all(
            need.of(size, leads=i == 0) <= room for i, (size, room) in enumerate(zip(cut, order, strict=True))
        )
        for order in permutations(free)
        for cut in sizes
    )


@given(
    need=NEEDS,
    free=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), min_size=1, max_size=8),
    num_layers=st.integers(1, 9),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_ranks_share_a_host_and_all_of_them_hold_their_stage(
    need: Footprint, free: list[tuple[str, int]], num_layers: int, tp: int, pp: int
) -> None:
    there = [Device(worker=f"w{i}", host=host, free_bytes=size) for i, (host, size) in enumerate(free)]
    found = fit(need, Configuration(tp=tp, pp=pp), num_layers, there)
    if isinstance(found, Refusal):
        return
    by_name = {one.worker: one for one in there}
    assert [layer for one in found for layer in range(one.first, one.end)] == list(range(num_layers))
    for i, stage in enumerate(found):
        assert len(stage.workers) == tp
        assert tp == 1 or len({by_name[worker].host for worker in stage.workers}) == 1
        for j, worker in enumerate(stage.workers):
            leads = i == 0 and (j == 0 or need.every_rank_leads)
            assert need.of(stage.end - stage.first, leads=leads) <= by_name[worker].free_bytes


@given(need=NEEDS, free=st.lists(st.integers(0, 40), min_size=4, max_size=4), num_layers=st.integers(2, 9))
@settings(max_examples=200, deadline=None)
def test_stages_of_two_ranks_are_found_if_there_are_any(
    need: Footprint, free: list[int], num_layers: int
) -> None:
    found = fit(need, Configuration(tp=2, pp=2), num_layers, devices(*free))
    assert isinstance(found, Refusal) != any_pairs(need, num_layers, free)


def any_pairs(need: Footprint, num_layers: int, free: list[int]) -> bool:
    """All ways to deal four devices out, all ways to cut."""
    return any(
        need.of(first, leads=True) <= leader
        and need.of(first, leads=need.every_rank_leads) <= rank
        and need.of(num_layers - first) <= min(others)
        for leader, rank, *others in permutations(free)
        for first in range(1, num_layers)
    )


@given(most=st.lists(st.integers(0, 9), min_size=1, max_size=6), num_layers=st.integers(0, 30))
def test_shares_differ_by_one_except_where_a_limit_says_so(most: list[int], num_layers: int) -> None:
    if sum(most) < num_layers:
        return
    found = even(num_layers, most)
    assert sum(found) == num_layers
    assert all(one <= limit for one, limit in zip(found, most, strict=True))
    free = [one for one, limit in zip(found, most, strict=True) if one < limit]
    assert not free or max(found) - min(free) <= 1


@pytest.mark.parametrize("page_bytes", [1, 7, 64])
def test_pages_are_never_overbooked(page_bytes: int) -> None:
    need = Footprint(layer_bytes=100, lead_bytes=30)
    for free in range(0, 1200, 13):
        found = fit(need, Configuration(pp=2), 9, devices(free, 500, page_bytes=page_bytes))
        if not isinstance(found, Refusal):
            for i, stage in enumerate(found):
                pages = (stage.end - stage.first) * -(-100 // page_bytes) + (i == 0) * -(-30 // page_bytes)
                assert pages * page_bytes <= (free if stage.workers == ["w0"] else 500)
