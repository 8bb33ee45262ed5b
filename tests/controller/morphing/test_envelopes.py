"""The envelopes that the controller grants, and when it sends them again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bus.client import LiveWorker
from bus.messages import Demand, InstanceCard, WorkerCard
from bus.policy import NEWS_S, Envelope, Policy, Slowdown
from bus.precisions import Precision
from controller.morphing.envelopes import Floors, due, envelopes, hear_floor, raised
from controller.morphing.resting import Rest


def instance(worker: str = "w0", **fields: Any) -> InstanceCard:
    default: dict[str, Any] = {
        "id": f"m@{worker}",
        "model": "m",
        "model_path": "",
        "max_model_len": 100,
        "vocab_size": 10,
        "num_layers": 4,
        "dtype": "float32",
        "block_tokens": 16,
        "variants": ["full", "int8", "int4", "int3"],
    }
    return InstanceCard(**(default | fields))


def worker(name: str = "w0", *instances: InstanceCard, state: Any = "serving") -> LiveWorker:
    card = WorkerCard(
        id=name,
        epoch=3,
        host="h",
        pid=1,
        device="cpu",
        page_bytes=4096,
        state=state,
        instances=list(instances),
    )
    return LiveWorker(card, 3, 1000)


def only(live: LiveWorker, policy: Policy | None = None, rests: Any = None) -> Envelope:
    ((_, envelope),) = envelopes([live], policy or Policy(), rests or {}).values()
    return envelope


def test_an_envelope_has_the_policy_in_force_and_the_precisions_down_to_the_wished_one() -> None:
    envelope = only(worker("w0", instance()))
    assert (envelope.epoch, envelope.instance, envelope.resting) == (3, "m@w0", "full")
    assert envelope.policy == Policy().in_force() and envelope.policy.loss_budget == 0.0025
    assert envelope.precisions == ["int8", "int4"]
    assert only(worker("w0", instance()), Policy(precision="int3")).precisions == ["int8", "int4", "int3"]
    assert only(worker("w0", instance(variants=["full", "int4"]))).precisions == ["int4"]


def test_the_kv_cache_may_go_to_8_bits_where_its_loss_was_measured_and_the_intent_allows_it() -> None:
    assert only(worker("w0", instance())).kv_precisions == []
    assert only(worker("w0", instance(kv_loss=0.0002))).kv_precisions == ["int8"]
    deployed = worker("w0", instance(kv_loss=0.0002, deployed="d"))
    assert only(deployed, rests={"m@w0": Rest(coarsest="full")}).kv_precisions == []
    assert only(deployed, rests={"m@w0": Rest(coarsest="int8")}).kv_precisions == ["int8"]


def test_in_mode_manual_the_envelope_says_so() -> None:
    assert only(worker("w0", instance()), Policy(mode="manual")).policy.mode == "manual"


def test_a_deployment_rests_in_its_own_configuration_and_is_left_alone_until_that_is_known() -> None:
    deployed = worker("w0", instance(deployed="d1"))
    assert envelopes([deployed], Policy(), {}) == {}
    envelope = only(deployed, rests={"m@w0": Rest(precision="int8", coarsest="int4")})
    assert (envelope.resting, envelope.precisions) == ("int8", ["int4"])
    assert envelope.policy.loss_budget == 0.0025
    strict = only(deployed, rests={"m@w0": Rest(loss_left=0.001)})
    assert strict.policy.loss_budget == 0.001


def test_the_reflex_learns_how_much_slower_steps_are_from_the_profile_of_a_deployment() -> None:
    slowdowns: dict[Precision, Slowdown] = {"int4": Slowdown(1.5, 0.7)}
    deployed = worker("w0", instance(deployed="d1"))
    assert only(deployed, rests={"m@w0": Rest(slowdowns=slowdowns)}).slowdowns == slowdowns
    assert only(worker("w0", instance())).slowdowns == {}


def test_leaders_alone_get_one_of_groups_and_pipelines_and_nobody_who_leaves() -> None:
    group = [
        worker("w0", instance("w0", workers=["w0", "w1"], tp=2)),
        worker("w1", instance("w1", workers=["w0", "w1"], tp=2)),
    ]
    assert list(envelopes(group, Policy(), {})) == ["m@w0"]
    line = [worker("w0", instance(pp=2, workers=["w0", "w1"])), worker("w1")]
    assert envelopes(line, Policy(), {})["m@w0"][0] == "w0"
    assert envelopes([worker("w0", instance(), state="draining")], Policy(), {}) == {}


def test_one_instance_of_a_model_is_raised_for_what_waits_at_gateways() -> None:
    workers = [
        worker("w0", instance()),
        worker("w1", instance("w1")),
        worker("w2", instance("w2", model="n")),
    ]
    floors: Floors = {}
    for gateway, floor in (("a", "int8"), ("b", "full"), ("c", "")):
        demand = Demand(gateway=gateway, model="m", tokens=0, count=0, at_ms=0, floor=floor)  # type: ignore[arg-type]
        floors = hear_floor(floors, demand, 10.0)
    assert raised(floors, workers, 11.0, {}) == {"m@w0": "full"}
    told = envelopes(workers, Policy(), {}, raised(floors, workers, 11.0, {}))
    assert {name: envelope.floor for name, (_, envelope) in told.items()} == {
        "m@w0": "full",
        "m@w1": "",
        "m@w2": "",
    }
    served = Demand(gateway="b", model="m", tokens=0, count=0, at_ms=0)
    assert raised(hear_floor(floors, served, 11.0), workers, 11.0, {}) == {"m@w0": "int8"}
    assert raised(floors, workers, 12.0, {}) == {}  # nobody repeats it


def test_the_least_loaded_leader_is_raised_and_stays_so() -> None:
    workers = [
        worker("w0", instance("w0")),
        worker("w1", instance("w1", workers=["w1", "w2"], tp=2)),
        worker("w2", instance("w2", workers=["w1", "w2"], tp=2)),
    ]
    floors: Floors = {("a", "m"): ("int8", 10.0)}
    assert raised(floors, workers, 10.0, {"m@w0": 3.0, "m@w1": 2.0}) == {"m@w1": "int8"}
    assert raised(floors, workers, 10.0, {"m@w0": 1.0, "m@w1": 2.0}) == {"m@w0": "int8"}
    assert raised(floors, workers, 10.0, {"m@w0": 1.0, "m@w1": 2.0}, ["m@w1"]) == {"m@w1": "int8"}


def test_what_is_expected_or_waits_is_repeated_before_it_is_over() -> None:
    for news in ({"expected": {"m@w0": 80}}, {"floors": {"m@w0": "int8"}}):
        wanted = envelopes([worker("w0", instance())], Policy(), {}, **news)
        ((_, first),) = due({}, wanted, 10.0)
        assert due({"m@w0": (first, 10.0)}, wanted, 10.0 + NEWS_S / 8) == []
        assert due({"m@w0": (first, 10.0)}, wanted, 10.0 + NEWS_S / 3)


def test_an_envelope_is_sent_when_it_changes_and_again_before_it_is_stale() -> None:
    wanted = envelopes([worker("w0", instance())], Policy(), {})
    ((name, first),) = due({}, wanted, 10.0)
    assert name == "w0" and first.id
    granted = {"m@w0": (first, 10.0)}
    assert due(granted, wanted, 10.0 + first.valid_s / 4 - 0.1) == []
    ((_, again),) = due(granted, wanted, 10.0 + first.valid_s / 4)
    assert again.id != first.id and replace(again, id=first.id) == first
    changed = envelopes([worker("w0", instance())], Policy(revision=1, mode="accuracy"), {})
    assert due(granted, changed, 10.0)


def test_a_worker_of_release_0_1_gets_none() -> None:
    live = worker("w0", instance())
    old = LiveWorker(replace(live.card, reads=(1,)), live.epoch, live.lease_ms)
    assert envelopes([live], Policy(), {}) and not envelopes([old], Policy(), {})
