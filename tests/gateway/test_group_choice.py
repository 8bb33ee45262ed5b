"""The workers of a transform that names none."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from bus.messages import InstanceCard, WorkerCard
from bus.morphs import TransformOrder
from bus.policy import Policy
from gateway.errors import ApiError
from gateway.operations import transforms
from gateway.operations.group_choice import with_workers
from tests.gateway.test_transform_orders import ALONE, FOUR, PAIRS, beside, card, cluster, staged


def chosen(
    cards: list[WorkerCard], tp: int, loads: dict[str, float] | None = None, **fields: Any
) -> tuple[list[str], str]:
    """The workers and the model of an order; what is refused only by the plan is refused here."""

    def load(worker: WorkerCard, shown: InstanceCard) -> float:
        return (loads or {}).get(worker.id, 0.0)

    order = with_workers(cluster(cards), TransformOrder(tp=tp, **fields), load)
    transforms.plan(cluster(cards), order, Policy(), 0.0)
    assert order.workers is not None and order.model is not None
    return order.workers, order.model


def refusal(cards: list[WorkerCard], tp: int, **fields: Any) -> str:
    with pytest.raises(ApiError) as refused:
        chosen(cards, tp, **fields)
    assert refused.value.status == 400
    return refused.value.message


def elsewhere(worker: WorkerCard) -> WorkerCard:
    return replace(worker, host="far")


def of_model(worker: WorkerCard, model: str) -> WorkerCard:
    return replace(worker, instances=[replace(worker.instances[0], id=f"{model}@{worker.id}", model=model)])


def test_the_least_loaded_of_one_host_become_a_group() -> None:
    loads = {"w0": 6.0, "w1": 2.0, "w2": math.inf, "w3": 4.0}  # w2 has not reported: it is not idle
    assert chosen(ALONE, 2, loads) == (["w1", "w3"], "demo")
    assert chosen(ALONE, 2, loads, instance="demo@w2") == (["w1", "w2"], "demo")
    assert chosen(ALONE, 4, loads) == (["w0", "w1", "w2", "w3"], "demo")
    assert chosen([*ALONE[:3], elsewhere(ALONE[3])], 2, loads) == (["w0", "w1"], "demo")


def test_groups_become_larger_groups_or_part() -> None:
    assert chosen(PAIRS, 4)[0] == ["w0", "w1", "w2", "w3"]
    assert chosen(PAIRS, 1, instance="demo@w2")[0] == ["w2", "w3"]
    assert chosen(FOUR, 2)[0] == ["w2", "w0", "w3", "w1"]


def test_what_is_so_already_may_be_ordered() -> None:
    assert chosen(ALONE[:2], 1) == (["w0"], "demo")
    assert chosen(PAIRS[:2], 2) == (["w0", "w1"], "demo")


def test_a_model_may_be_named_where_there_are_several() -> None:
    both = [of_model(one, "a" if one.id in ("w0", "w1") else "b") for one in ALONE]
    assert chosen(both, 2, model="b") == (["w2", "w3"], "b")
    assert "no instance of c serves; there are: a@w0 (tp 1)" in refusal(both, 2, model="c")
    assert "say which model; there are: a, b" in refusal(both, 2)


@pytest.mark.parametrize(
    ("cards", "tp", "fields", "told"),
    [
        (PAIRS, 1, {"instance": "demo@w9"}, "no instance demo@w9 serves; there are: demo@w0 (tp 2)"),
        (PAIRS, 1, {}, "say which instance; there are: demo@w0 (tp 2), demo@w2 (tp 2)"),
        (
            [beside(one, "a") for one in ALONE[:2]],
            2,
            {"instance": "demo@w0"},
            "w0 serves a, demo, and a worker of several models joins no group: retire the others",
        ),
        (
            [staged(ALONE[0], "w0", "w1"), replace(ALONE[1], instances=[])],
            2,
            {},
            "stages of demo@w0, which keeps the shape",
        ),
        ([ALONE[0], elsewhere(ALONE[1])], 2, {}, "has 0 other instances of demo at that degree"),
        ([ALONE[0], card("w1", state="draining")], 2, {}, "at that degree; demo@w1 is draining"),
        ([card("w0", state="draining")], 2, {}, "no instance of any model serves; demo@w0 is draining"),
        (ALONE, 3, {}, "tp is 3"),
        (ALONE[:2], 4, {}, "tp 4 takes 4 workers of one host"),
        ([], 2, {}, "no instance of any model serves"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_it_is_not_clear_which_are_meant_it_asks(
    cards: list[WorkerCard], tp: int, fields: dict[str, Any], told: str
) -> None:
    assert told in refusal(cards, tp, **fields)
