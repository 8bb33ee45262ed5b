"""What the policy sees of an instance: metrics, pages and card put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.client import LiveWorker
from bus.messages import LayerShape, Metrics, PageCounts
from controller.morphing.view import Rest, View, views_of
from tests.support.bus_samples import card
from tests.support.metrics_samples import metrics_of


def live(worker: str = "w0", epoch: int = 1, *, state: str = "serving", **instance: Any) -> LiveWorker:
    """A worker with one instance, `demo@{worker}`."""
    made = card(worker, epoch, state=state)
    made = replace(made, instances=[replace(made.instances[0], **instance)])
    return LiveWorker(card=made, epoch=epoch, lease_ms=1000)


def seen(**changes: Any) -> Metrics:
    """Metrics of `demo@w0`; `changes` are of its newest report."""
    metrics = metrics_of("demo@w0", kv_blocks=60, kv_used=30)
    (one,) = metrics.instances
    return replace(metrics, instances=[replace(one, last=replace(one.last, **changes))])


def view(metrics: Metrics | None = None, worker: LiveWorker | None = None, lag_s: float = 0.0) -> View:
    (only,) = views_of(metrics or seen(), [worker or live()], lag_s)
    return only


def test_pages_and_blocks_are_joined_by_what_the_cache_holds() -> None:
    one = view(worker=live(layer_pages={"full": 8, "int4": 2}, variants=["full", "int4"], min_blocks=5))
    assert (one.kv_blocks, one.pages_free, one.pages_per_block) == (60, 10, 0.5)
    assert (one.pages_spare, one.min_blocks, one.num_layers) == (8, 5, 8)
    assert one.blocks_of(8) == 16  # a page in each of 8 layers
    assert one.blocks_of(15) == 16
    assert one.blocks_of(7) == one.blocks_of(0) == one.blocks_of(-3) == 0
    assert one.blocks_for(1) == one.blocks_for(8) == 16
    assert one.blocks_for(0) == one.blocks_for(-1) == 0


def test_a_layer_counts_as_below_full_if_either_part_is() -> None:
    layers = [
        LayerShape(),
        LayerShape(ffn="int4"),
        LayerShape(attention="int8"),
        LayerShape(attention="int4", ffn="int4"),
    ]
    assert view(seen(layers=layers)).layers_below == 3


def test_a_deployment_rests_in_its_own_configuration_and_is_left_alone_until_that_is_known() -> None:
    layers = [
        LayerShape(attention="int4", ffn="int4"),
        LayerShape(attention="int4", ffn="int3"),
        LayerShape(),
    ]
    deployed = live(deployed="d1-1-w0")
    assert views_of(seen(layers=layers), [deployed]) == []
    rest = Rest(precision="int4", coarsest="int3")
    (one,) = views_of(seen(layers=layers), [deployed], rests={"demo@w0": rest})
    assert (one.layers_below, one.resting, one.coarsest) == (1, "int4", "int3")
    (other,) = views_of(seen(layers=layers), [live()], rests={"demo@w0": rest})  # by the worker's settings
    assert (other.layers_below, other.resting) == (2, "full")


def test_age_is_that_of_the_report_and_of_the_metrics() -> None:
    metrics = seen()
    metrics = replace(metrics, workers=[replace(metrics.workers[0], age_seconds=1.5)])
    assert view(metrics, lag_s=2.0).age_s == 3.5


def test_a_queue_needs_blocks_for_its_tokens_and_a_spare_for_each_who_runs_or_waits() -> None:
    assert view(seen(waiting=2, waiting_tokens=33, running=4)).waiting_blocks == 3 + 2 + 4
    assert view(seen(running=4)).waiting_blocks == 0


@pytest.mark.parametrize(
    "worker",
    [
        live(state="draining"),
        live(state="loading"),
        live(epoch=2),  # the metrics are of the epoch before
        live("w1"),
        live(workers=["w1", "w0"]),  # another one leads it
    ],
)
def test_who_is_not_to_be_morphed_is_not_seen(worker: LiveWorker) -> None:
    assert views_of(seen(), [worker]) == []


def test_blocks_of_several_instances_share_the_pages_of_their_worker() -> None:
    metrics = seen()
    other = replace(metrics.instances[0], id="other@w0")
    shared = replace(metrics, instances=[metrics.instances[0], other])
    assert view(shared).pages_per_block == 30 / 120


def test_an_instance_without_blocks_has_no_known_price() -> None:
    metrics = seen(kv_blocks=0, kv_used=0)
    empty = replace(metrics.workers[0], pages=PageCounts(budget=10, weights=10, kv=0, free=0))
    one = view(replace(metrics, workers=[empty]))
    assert one.pages_per_block == 0
    assert one.blocks_of(100) == one.blocks_for(100) == 0


def test_what_waits_in_a_group_waits_at_all_its_members() -> None:
    metrics = seen(waiting=1, waiting_tokens=16, running=2)
    other = replace(metrics.instances[0], id="demo@w1", worker="w1", queue_delay_seconds=7.0)
    stranger = replace(other, id="demo@w2", worker="w2")
    group = live(workers=["w0", "w1"], tp=2)
    (one,) = views_of(replace(metrics, instances=[*metrics.instances, other, stranger]), [group])
    assert (one.waiting_blocks, one.queue_delay_s) == (2 + 2 + 4, 7.0)
