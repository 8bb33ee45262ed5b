"""The layers that workers share before they become one group."""

from __future__ import annotations

import pytest

from bus.messages import LayerShape
from bus.precisions import Precision
from bus.shapes import common_shape, loss_of, loss_of_kv, orders_between

FULL = LayerShape()
INT8 = LayerShape(attention="int8", ffn="int8")
LOSSES: dict[Precision, float] = {"int8": 0.004}


def test_the_fewer_halves_change() -> None:
    one, most = [INT8, FULL, FULL, FULL], [INT8, INT8, INT8, FULL]
    back = common_shape([[FULL] * 4, one], LOSSES, 1.0)
    assert not isinstance(back, str) and back.layers == (FULL,) * 4
    assert (back.num_halves, back.loss, back.words) == (2, 0.0, "2 halves to full")
    down = common_shape([one, most], LOSSES, 1.0)
    assert not isinstance(down, str) and down.layers == tuple(most)
    assert (down.words, down.orders[1]) == ("4 halves to int8", ())
    assert down.loss == pytest.approx(0.002)


def test_a_shape_beyond_the_budget_is_not_taken() -> None:
    one, most = [INT8, FULL, FULL, FULL], [INT8, INT8, INT8, FULL]
    back = common_shape([one, most], LOSSES, 0.0025)
    assert not isinstance(back, str) and back.layers == (FULL,) * 4
    why = common_shape([one, most], LOSSES, 0.0025, may_rise=lambda member, orders: False)
    assert why == (
        "their layers differ in precision: for full there are too few free KV blocks, and the shape of "
        "fewest bits loses 0.30% of at most 0.25%"
    )


def test_a_deployment_goes_back_to_what_it_rests_in() -> None:
    int4 = LayerShape(attention="int4", ffn="int4")
    back = common_shape([[INT8, INT8], [int4, INT8]], {"int8": 0.0, "int4": 1.0}, 0.01, resting="int8")
    assert not isinstance(back, str) and back.layers == (INT8, INT8)


def test_losses_of_halves_are_shares_of_the_whole_and_assumed_without_a_profile() -> None:
    assert loss_of([INT8, FULL], LOSSES) == pytest.approx(0.002)
    assert loss_of([LayerShape(ffn="int4"), FULL], {}) == pytest.approx(0.03 / 4)


def test_a_kv_cache_loses_by_8_bits_unless_it_rests_in_them_and_is_not_on_the_way() -> None:
    assert loss_of_kv("int8", "full", 0.01) == 0.01
    assert loss_of_kv("full", "full", 0.01) == loss_of_kv("full", "int8", 0.01) == 0.0
    assert loss_of_kv("int8", "int8", 0.01) == loss_of_kv("int8", "full", None) == 0.0
    assert loss_of_kv(None, "full", 0.01) == loss_of_kv(None, "int8", 0.01) == 0.01


def test_orders_name_the_halves_that_differ() -> None:
    orders = orders_between([INT8, FULL], [LayerShape(ffn="int8"), LayerShape(ffn="int4")])
    assert [(one.layer, one.part, one.precision) for one in orders] == [
        (0, "attention", "full"),
        (1, "ffn", "int4"),
    ]
