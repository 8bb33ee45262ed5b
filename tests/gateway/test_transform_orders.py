"""The workers that may become a group, and the refusals of others, before an order is sent."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from bus.client import LiveWorker
from bus.messages import LayerShape, Stage, WorkerCard
from bus.morphs import MorphOutcome, MorphReport, Transform, TransformOrder
from bus.policy import Policy
from bus.precisions import KVPrecision
from gateway.delivery.cluster import Cluster, PlacedInstance
from gateway.errors import ApiError
from gateway.morphs import Morphs
from gateway.operations import orders, transforms
from gateway.operations.picture import shown_instances
from tests.support.fake_worker import FakeWorker
from tests.support.metrics_samples import metrics_of


def card(name: str, *group: str, state: str = "serving", **changes: Any) -> WorkerCard:
    """The card of a worker w7 with the instance demo@w7 and the epoch 7, in a group or alone."""
    worker = FakeWorker(None, None, list, worker=name)  # type: ignore[arg-type]
    worker.group = list(group) or [name]
    for field, value in changes.items():
        assert hasattr(worker, field)
        setattr(worker, field, value)
    return replace(worker.card(state), epoch=int(name[1:]))


def beside(worker: WorkerCard, model: str) -> WorkerCard:
    """The same with another model, which makes it join no group."""
    own = replace(worker.instances[0], degrees=[1])
    other = replace(own, id=f"{model}@{worker.id}", model=model)
    return replace(worker, instances=[own, other], link="")


def staged(worker: WorkerCard, *workers: str) -> WorkerCard:
    """The same, leading stages on these."""
    stages = [Stage(workers=[name], first=i, end=i + 1) for i, name in enumerate(workers)]
    own = replace(worker.instances[0], pp=len(workers), stages=stages, workers=list(workers), degrees=[1])
    return replace(worker, instances=[own])


ALONE = [card(f"w{number}") for number in range(4)]
PAIRS = [card(name, *pair) for pair in (("w0", "w1"), ("w2", "w3")) for name in pair]
FOUR = [card(f"w{number}", "w2", "w0", "w3", "w1") for number in range(4)]


def cluster(cards: list[WorkerCard]) -> Cluster:
    found = Cluster(stale_s=5.0)
    found.update([LiveWorker(one, one.epoch, 1000) for one in cards], now=0.0)
    return found


def ordered(cards: list[WorkerCard], body: Any) -> tuple[PlacedInstance, Transform]:
    parsed = orders.parse_order(TransformOrder, json.dumps(body).encode())
    model, (step,) = transforms.plan(cluster(cards), parsed, Policy(), 0.0)
    place, command = transforms.command(cluster(cards), model, step, parsed, "id")
    assert isinstance(command, Transform)
    return place, command


def planned(cards: list[WorkerCard], body: Any) -> list[str]:
    parsed = orders.parse_order(TransformOrder, json.dumps(body).encode())
    return [str(step) for step in transforms.plan(cluster(cards), parsed, Policy(), 0.0)[1]]


def body(*workers: str, tp: Any, **fields: Any) -> dict[str, Any]:
    return {"workers": list(workers), "tp": tp, **fields}


def test_single_workers_become_a_group_in_the_order_they_are_named() -> None:
    place, command = ordered(ALONE, body("w1", "w0", tp=2, layers_per_step=3, wait_s=1.5))
    assert place.worker.id == "w1"
    assert command == Transform(
        id="id",
        epoch=1,
        instance="demo@w1",
        workers=["w1", "w0"],
        epochs={"w0": 0, "w1": 1},
        tp=2,
        layers_per_step=3,
        wait_s=1.5,
    )


def test_shards_of_groups_nest_in_those_of_the_group_they_become() -> None:
    place, command = ordered(PAIRS, body("w3", "w0", "w1", "w2", tp=4))
    assert (place.worker.id, command.instance) == ("w2", "demo@w2")
    assert command.workers == ["w2", "w0", "w3", "w1"]  # shard 0 of both, then shard 1


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_group_parts_in_the_order_of_its_shards_whatever_the_order_of_the_body(tp: int) -> None:
    place, command = ordered(FOUR, body("w0", "w1", "w2", "w3", tp=tp))
    assert (place.worker.id, command.instance, command.epoch) == ("w2", "demo@w2", 2)
    assert (command.workers, command.tp, command.layers_per_step) == (["w2", "w0", "w3", "w1"], tp, 0)


def test_what_is_so_already_may_be_ordered_again() -> None:
    assert ordered(ALONE, body("w0", "w1", tp=1))[1].workers == ["w0", "w1"]
    assert ordered(PAIRS, body("w0", "w1", tp=2))[1].workers == ["w0", "w1"]


def test_a_target_that_no_single_change_reaches_takes_steps() -> None:
    """Whole groups of unequal degrees, a part of a group, and groups that part or join side by side."""
    mixed = [*PAIRS[:2], *ALONE[2:]]
    assert planned(mixed, body("w0", "w1", "w2", "w3", tp=4)) == ["tp 2 on w2, w3", "tp 4 on w0, w2, w1, w3"]
    assert planned(PAIRS, body("w0", "w2", tp=2)) == ["tp 1 on w0, w1", "tp 1 on w2, w3", "tp 2 on w0, w2"]
    assert planned(FOUR, body("w0", tp=1)) == ["tp 1 on w2, w0, w3, w1"]
    assert planned(PAIRS, body("w0", "w1", "w2", "w3", tp=1)) == ["tp 1 on w0, w1", "tp 1 on w2, w3"]
    assert planned(ALONE, body("w0", "w1", "w2", "w3", tp=2)) == ["tp 2 on w0, w1", "tp 2 on w2, w3"]


def instances(worker: WorkerCard, *models: str) -> WorkerCard:
    (one,) = worker.instances
    return replace(
        worker, instances=[replace(one, id=f"{model}@{worker.id}", model=model) for model in models]
    )


def test_of_several_models_the_common_one_is_meant_or_the_one_that_is_named() -> None:
    both = [instances(ALONE[0], "a", "b"), instances(ALONE[1], "b", "c")]
    assert ordered(both, body("w0", "w1", tp=2))[1].instance == "b@w0"
    both = [instances(one, "a", "b") for one in ALONE]
    assert ordered(both, body("w0", "w1", tp=2, model="a"))[1].instance == "a@w0"
    with pytest.raises(ApiError, match="these workers serve a, b; say which as model") as refusal:
        ordered(both, body("w0", "w1", tp=2))
    assert (refusal.value.status, refusal.value.param) == (400, "model")
    with pytest.raises(ApiError, match="w0 does not serve 'aa'; did you mean 'a'"):
        ordered(both, body("w0", "w1", tp=2, model="aa"))


def refusal_of(cards: list[WorkerCard], order: Any) -> tuple[int, str | None, str]:
    with pytest.raises(ApiError) as refusal:
        ordered(cards, order)
    return refusal.value.status, refusal.value.param, refusal.value.message


@pytest.mark.parametrize(
    ("cards", "order", "param", "told"),
    [
        (ALONE, body("w0", tp=2), "workers", "of degree 2 takes 2 workers; 1 are too few: w0"),
        (ALONE, body("w0", "w1", "w2", tp=2), "workers", "3 are too many: w0, w1, w2"),
        (ALONE, body("w0", "w0", tp=2), "workers", "names 'w0' more than once"),
        (ALONE, body("w0", "w1", "w2", tp=3), "tp", "3, which neither divides the 8 KV heads of demo nor"),
        (ALONE, body("w0", "w1", "w2", tp=3), "tp", "allowed is: 1, 2, 4"),
        (
            ALONE,
            body("w0", tp=8),
            "tp",
            "not laid out for when they were loaded (worker.max_tp, or a number of heads or experts)",
        ),
        (ALONE, body("w0", "w1", tp=0), "tp", "tp is 0; allowed is 1 to 64"),
        (ALONE, body("w0", "w1", tp="2"), "tp", "integer"),
        (ALONE, body("w0", "w1", tp=2, layers_per_step=0), "layers_per_step", "is 0"),
        (ALONE, body("w0", "w1", tp=2, wait_s=-1), "wait_s", "is -1"),
        (ALONE, body("w0", "w1", tp=2, layer_per_step=1), "layer_per_step", "did you mean 'layers_per_step'"),
        (ALONE, body(tp=2), "workers", "is empty"),
        (ALONE, {"workers": "w0", "tp": 2}, "workers", "must be an array"),
        ([*PAIRS[:2], *ALONE[2:]], body("w0", "w1", "w2", tp=4), "workers", "3 are too few: w0, w1, w2"),
        (
            [card(f"w{n}", "w0", "w1", "w2", "w3", degrees=[1, 2, 3, 4], kv_heads=12) for n in range(4)],
            body("w0", "w1", "w2", "w3", tp=3),
            "tp",
            "cannot be parted into equal groups",
        ),
        (
            [ALONE[0], card("w1", host="far")],
            body("w0", "w1", tp=2),
            "workers",
            "share one host: w0 has test, w1 has far",
        ),
        (
            [ALONE[0], card("w1", device="cuda:0")],
            body("w0", "w1", tp=2),
            "workers",
            "share one kind of device: w0 has cpu, w1 has cuda",
        ),
        (
            [ALONE[0], card("w1", dtype="bfloat16")],
            body("w0", "w1", tp=2),
            "workers",
            "one dtype: w0 has float32, w1 has bfloat16",
        ),
        (
            [ALONE[0], card("w1", model="other")],
            body("w0", "w1", tp=2),
            "workers",
            "no model in common: w0 serves demo; w1 serves other",
        ),
        (
            [ALONE[0], replace(ALONE[1], link="")],
            body("w0", "w1", tp=2),
            "workers",
            "w1 joins no group: its worker.group_host is empty",
        ),
        (
            [staged(ALONE[0], "w0", "w1"), replace(ALONE[1], instances=[])],
            body("w0", "w1", tp=1),
            "workers",
            "w0, w1: there are stages of demo@w0, which keeps the shape it was deployed in: retire it",
        ),
        (
            [ALONE[0], beside(ALONE[1], "other")],
            body("w0", "w1", tp=2),
            "workers",
            "w1 serves demo, other, and a worker of several models joins no group: retire the others, or "
            "deploy demo with tp 2 onto workers without a model",
        ),
        (
            [card("w0", degrees=[1, 2, 4]), card("w1", degrees=[1])],
            body("w0", "w1", tp=2),
            "tp",
            "allowed is: 1",
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_order_is_refused_with_what_there_is(
    cards: list[WorkerCard], order: Any, param: str, told: str
) -> None:
    status, at, message = refusal_of(cards, order)
    assert (status, at) == (400, param) and told in message


def test_an_unknown_worker_is_not_found() -> None:
    status, param, message = refusal_of(ALONE, body("w0", "w9", tp=2))
    assert (status, param) == (404, "workers") and "no worker 'w9'; there are: w0, w1" in message


@pytest.mark.parametrize("state", ["loading", "draining"])
def test_a_worker_that_loads_or_drains_conflicts(state: str) -> None:
    with pytest.raises(ApiError, match=f"w1 is {state}") as refusal:
        ordered([ALONE[0], card("w1", state=state)], body("w0", "w1", tp=2))
    assert (refusal.value.status, refusal.value.code) == (409, f"worker_{state}")


def test_while_cards_tell_of_different_groups_there_is_a_conflict() -> None:
    for torn in ([card("w0", "w0", "w1"), card("w1")], [card("w0"), card("w1", "w0", "w1")]):
        with pytest.raises(ApiError, match="under way; try again") as refusal:
            ordered(torn, body("w0", "w1", tp=2))
        assert (refusal.value.status, refusal.value.code) == (409, "shape_changing")


def test_an_order_for_a_member_of_a_group_is_told_which_instance_it_is_now() -> None:
    assert orders.find(cluster(PAIRS), "demo@w2").worker.id == "w2"
    with pytest.raises(ApiError, match="w3 is a part of demo@w2, which w2 leads") as refusal:
        orders.find(cluster(PAIRS), "demo@w3")
    assert (refusal.value.status, refusal.value.code) == (404, "instance_not_found")


def test_a_member_of_a_group_that_parted_is_shown_before_its_card_says_so() -> None:
    shown = list(shown_instances(cluster([card("w0"), card("w1", "w0", "w1")])))
    assert [(one.id, one.workers) for _, one in shown] == [("demo@w0", ["w0"]), ("demo@w1", ["w0", "w1"])]
    assert [one.id for _, one in shown_instances(cluster(PAIRS))] == ["demo@w0", "demo@w2"]


@pytest.mark.parametrize(("before", "after", "word"), [(1, 2, "joining"), (2, 1, "parting")])
def test_members_are_joining_or_parting_until_their_cards_say_so(before: int, after: int, word: str) -> None:
    def report(state: MorphOutcome, ago_s: float = 0.0) -> MorphReport:
        now_ms = time.time_ns() // 1_000_000
        return MorphReport(
            id=f"{state}{ago_s}",
            kind="transform",
            target="demo@w0",
            worker="w0",
            epoch=1,
            state=state,
            reason="",
            workers=["w0", "w1"],
            numbers={"tp_before": before, "tp_after": after},
            started_ms=now_ms - 10_000,
            ended_ms=None if state == "running" else now_ms - round(1000 * ago_s),
        )

    for told, words in (
        (report("running"), (word, "")),
        (report("applied"), (word, "")),
        (report("applied", 60.0), ("", "")),
        (report("failed"), ("", "")),
    ):
        morphs = Morphs()
        morphs.on_report(told)
        assert (morphs.changing("w1", before), morphs.changing("w1", after)) == words
        assert morphs.changing("w2", before) == ""


# --------------------------------------------------------------------------- layers that differ

FULL = [LayerShape()] * 4
LOW = [LayerShape(attention="int8", ffn="int8"), *FULL[1:]]
LOWER = [*[LayerShape(attention="int8", ffn="int8")] * 3, LayerShape()]


def levelled(
    cards: list[WorkerCard], tp: int, kv: KVPrecision = "full", **layers: list[LayerShape]
) -> list[str]:
    """The steps that join all of them, which have these layers and KV caches."""
    there = cluster(cards)
    told = [metrics_of(one.instances[0].id, one.epoch, layers=layers.get(one.id, FULL)) for one in cards]
    workers = [report for one in told for report in one.workers]
    found = [one for report in told for one in report.instances]
    instances = [replace(one, last=replace(one.last, kv_precision=kv)) for one in found]
    there.add_metrics(replace(told[0], workers=workers, instances=instances), 0.0)
    order = TransformOrder(workers=[one.id for one in cards], tp=tp)
    model, steps = transforms.plan(there, order, Policy(mode="manual"), 0.0)
    commands = [transforms.command(there, model, step, order, "id") for step in steps]
    assert all(
        (place.worker.id, place.worker.epoch) == (step.workers[0], command.epoch)
        for step, (place, command) in zip(steps, commands, strict=True)
    )
    return [str(step) for step in steps]


def test_workers_with_unlike_layers_get_equal_ones_before_they_join() -> None:
    two = ALONE[:2]
    assert levelled(two, 2) == ["tp 2 on w0, w1"]
    assert levelled(two, 2, w1=LOW) == ["2 halves of layers to full on w1", "tp 2 on w0, w1"]
    assert levelled(two, 2, w0=LOW, w1=LOWER) == ["4 halves of layers to int8 on w0", "tp 2 on w0, w1"]


def test_what_kv_in_8_bits_loses_is_not_left_for_layers_to_lose() -> None:
    two = [replace(one, instances=[replace(one.instances[0], kv_loss=0.0024)]) for one in ALONE[:2]]
    kept = ["4 halves of layers to int8 on w0", "tp 2 on w0, w1"]
    assert levelled(two, 2, "full", w0=LOW, w1=LOWER) == kept
    back = ["2 halves of layers to full on w0", "6 halves of layers to full on w1", "tp 2 on w0, w1"]
    assert levelled(two, 2, "int8", w0=LOW, w1=LOWER) == back
    at_rest = [replace(one, instances=[replace(one.instances[0], kv_dtype="int8")]) for one in two]
    assert levelled(at_rest, 2, "int8", w0=LOW, w1=LOWER) == kept


def test_groups_part_first_and_swap_as_what_they_then_are() -> None:
    back = "2 halves of layers to full on"
    assert levelled(ALONE, 4, w0=LOW, w2=LOW) == [f"{back} w0", f"{back} w2", "tp 4 on w0, w1, w2, w3"]
    assert levelled(PAIRS, 4, w0=LOW, w1=LOW) == [f"{back} w0, w1", "tp 4 on w0, w2, w1, w3"]
    assert levelled(PAIRS, 1, w0=LOW, w1=LOW) == ["tp 1 on w0, w1", "tp 1 on w2, w3"]
