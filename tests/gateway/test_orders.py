"""The orders of an operator: each slip is answered with what there is, before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bus.client import LiveWorker
from bus.morphs import Resize, ResizeOrder, Swap, SwapOrder
from bus.policy import Policy
from bus.precisions import PRECISIONS, Precision
from gateway.delivery.cluster import Cluster
from gateway.errors import ApiError
from gateway.operations import orders
from gateway.operations import policy as policies
from tests.support.fake_worker import FakeWorker


def cluster(*variants: Precision, state: str = "serving") -> Cluster:
    """One worker w0 with the instance demo@w0 of two layers."""
    worker = FakeWorker(None, None, list, worker="w0")  # type: ignore[arg-type]
    worker.variants = list(variants) or worker.variants
    found = Cluster(stale_s=5.0)
    found.update([LiveWorker(worker.card(state), 0, 1000)], now=0.0)
    return found


def ordered(call: str, body: Any, there: Cluster | None = None) -> Swap | Resize:
    """`call`: what stands after /admin/instances/ in the path."""
    instance, _, verb = call.partition("/")
    data = json.dumps(body).encode()
    if verb == "swap":
        swap = orders.parse_order(SwapOrder, data)
        return orders.swap(orders.find(there or cluster(), instance), swap, "id")
    resize = orders.parse_order(ResizeOrder, data)
    return orders.resize(orders.find(there or cluster(), instance), resize, "id")


@pytest.mark.parametrize(
    ("call", "body", "status", "param", "told"),
    [
        ("demo@w9/swap", {"count": 1, "precision": "int4"}, 404, "instance", "did you mean 'demo@w0'"),
        ("zzz/resize", {"blocks": 9}, 404, "instance", "there are: demo@w0"),
        (
            "demo@w0/swap",
            {"count": 1, "precision": "int5"},
            400,
            "precision",
            ", ".join(map(repr, PRECISIONS[:-1])) + " or",
        ),
        ("demo@w0/swap", {"count": 1}, 400, "precision", "is missing"),
        ("demo@w0/swap", {"precision": "int4"}, 400, "layers", "neither layers nor count is given"),
        (
            "demo@w0/swap",
            {"count": 1, "layers": [1], "precision": "int4"},
            400,
            "layers",
            "both layers and count",
        ),
        ("demo@w0/swap", {"layers": [1, 2], "precision": "int4"}, 400, "layers", "has layers 0 to 1"),
        ("demo@w0/swap", {"layers": [-1], "precision": "int4"}, 400, "layers[0]", "is -1"),
        ("demo@w0/swap", {"layers": [], "precision": "int4"}, 400, "layers", "is empty"),
        ("demo@w0/swap", {"layers": "all", "precision": "int4"}, 400, "layers", "must be an array"),
        ("demo@w0/swap", {"count": 5, "precision": "int4"}, 400, "count", "has 2 layers"),
        ("demo@w0/swap", {"count": 0, "precision": "int4"}, 400, "count", "is 0"),
        ("demo@w0/swap", {"count": 1, "precision": "int4", "parts": ["mlp"]}, 400, "parts[0]", "'ffn'"),
        ("demo@w0/swap", {"count": 1, "precison": "int4"}, 400, "precison", "did you mean 'precision'"),
        ("demo@w0/swap", {"count": 1, "precision": "int4", "wait_s": -1}, 400, "wait_s", "is -1"),
        ("demo@w0/resize", {"blocks": 0}, 400, "blocks", "is 0"),
        ("demo@w0/resize", {"blocks": 7}, 400, "blocks", "demo@w0 needs at least 8 KV blocks: the longest"),
        (
            "demo@w0/resize",
            {"blocks": 4097},
            400,
            "blocks",
            "the memory of demo@w0 could hold at most 4096 KV blocks, with every layer in its fewest bits",
        ),
        ("demo@w0/resize", {"blocks": 9.5}, 400, "blocks", "integer"),
        ("demo@w0/resize", {}, 400, "blocks", "is missing"),
        ("demo@w0/resize", [], 400, None, "an object is needed"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict | list) else "",
)
def test_a_wrong_order_is_refused_with_what_there_is(
    call: str, body: Any, status: int, param: str | None, told: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        ordered(call, body)
    assert (refusal.value.status, refusal.value.param) == (status, param) and told in refusal.value.message


@pytest.mark.parametrize(
    ("body", "status", "param", "told"),
    [
        ({"kv_usage_hi": 0.9}, 400, "kv_usage_hi", "did you mean 'kv_usage_high'"),
        ({"kv_usage_high": 1.2}, 400, "kv_usage_high", "0.01 to 1"),
        ({"kv_usage_high": 5e-324}, 400, "kv_usage_high", "0.01 to 1"),
        ({"ttft_slo_s": 5e-324}, 400, "ttft_slo_s", "0.001 to 3600"),
        (
            {"kv_usage_high": 0.4},
            400,
            "kv_usage_high",
            "kv_usage_low = 0.5 must be below kv_usage_high = 0.4",
        ),
        ({"kv_usage_low": 0.85}, 400, "kv_usage_low", "must be below"),
        ({"queue_delay_low_s": 0.5}, 400, "queue_delay_low_s", "must be below queue_delay_high_s = 0.1"),
        ({"windows": 0}, 400, "windows", "1 to 1000"),
        ({"windows": 2.5}, 400, "windows", "integer"),
        ({"cooldown_s": -1}, 400, "cooldown_s", "0 to 86400"),
        ({"mode": "fast"}, 400, "mode", "'manual'"),
        ({"precision": "full"}, 400, "precision", "'int3'"),
        ({"max_layers": True}, 400, "max_layers", "integer"),
        ({"loss_budget": 10}, 400, "loss_budget", "0 to 1"),
        ({"loss_budget": "1000%"}, 400, "loss_budget", "0 to 1"),
        ({"loss_budget": "some"}, 400, "loss_budget", "number"),
        ({"windows": "1%"}, 400, "windows", "integer"),
        ({"cooldown_s": None}, 400, None, "changes nothing"),
        ({"scale_down_free": 1.5}, 400, "scale_down_free", "1"),
        ({"max_tp": -1}, 400, "max_tp", "0"),
        ({"long_patience_s": -1}, 400, "long_patience_s", "0"),
        ({}, 400, None, "changes nothing"),
        ({"mode": "manual", "revision": 7}, 409, "revision", "the policy is at 0"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_wrong_policy_is_refused_with_what_is_allowed(
    body: Any, status: int, param: str | None, told: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        policies.changed(Policy(), orders.parse(policies.PolicyBody, json.dumps(body).encode()))
    assert (refusal.value.status, refusal.value.param) == (status, param) and told in refusal.value.message


@pytest.mark.parametrize(
    ("value", "stored"), [("1%", 0.01), ("0%", 0.0), (0, 0.0), (0.02, 0.02), ("mode", None)]
)
def test_a_budget_of_loss_is_a_share_a_percentage_or_that_of_the_mode(
    value: Any, stored: float | None
) -> None:
    body = orders.parse(policies.PolicyBody, json.dumps({"loss_budget": value}).encode())
    before = Policy(loss_budget=0.5)
    after = policies.changed(before, body)
    assert after.loss_budget == stored
    told = "mode" if stored is None else stored
    assert policies.differences(before, after) == f"loss_budget 0.5 -> {told}"


def test_a_precision_without_a_variant_is_refused_with_those_there_are() -> None:
    with pytest.raises(ApiError, match="its layers can be: full, int8") as refusal:
        ordered("demo@w0/swap", {"count": 1, "precision": "int4"}, cluster("full", "int8"))
    assert (refusal.value.status, refusal.value.param) == (400, "precision")
    with pytest.raises(ApiError, match=r"can be: int4 \(its checkpoint is quantised and has one precision\)"):
        ordered("demo@w0/swap", {"count": 1, "precision": "int8"}, cluster("int4"))


def test_an_instance_that_is_loading_takes_no_orders_yet() -> None:
    with pytest.raises(ApiError, match="still loading") as refusal:
        ordered("demo@w0/resize", {"blocks": 9}, cluster(state="loading"))
    assert refusal.value.status == 503


def test_an_instance_whose_worker_drains_takes_no_orders_any_more() -> None:
    for call, body in (("swap", {"count": 1, "precision": "int4"}), ("resize", {"blocks": 9})):
        with pytest.raises(ApiError, match="w0 is draining: it finishes its requests and exits") as refusal:
            ordered(f"demo@w0/{call}", body, cluster(state="draining"))
        assert (refusal.value.status, refusal.value.code) == (409, "worker_draining")


def test_a_worker_that_was_mark_draining_is_asked_for_nothing_before_its_card_says_so() -> None:
    there = cluster()
    there.mark_draining("w0", epoch=there.workers["w0"].epoch - 1)  # an earlier life of it
    assert there.ready_models()
    there.mark_draining("w0", there.workers["w0"].epoch)
    assert not there.ready_models()
    with pytest.raises(ApiError, match="w0 is draining"):
        ordered("demo@w0/resize", {"blocks": 9}, there)


def test_parts_are_both_unless_said_and_each_once() -> None:
    swap = ordered("demo@w0/swap", {"layers": [1, 0, 1], "precision": "int8", "parts": ["ffn", "ffn"]})
    assert isinstance(swap, Swap) and (swap.layers, swap.parts) == ([0, 1], ["ffn"])
    swap = ordered("demo@w0/swap", {"count": 2, "precision": "full"})
    assert isinstance(swap, Swap) and (swap.count, swap.parts) == (2, ["attention", "ffn"])
