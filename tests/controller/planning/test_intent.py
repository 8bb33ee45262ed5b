"""The configurations that an intent allows and prefers, and the answer where nothing meets it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.deployments import Configuration, Estimate, Intent, Quantity
from bus.precisions import PRECISIONS
from controller.planning.intent import (
    DEFAULT_MAX_LOSS,
    IntentError,
    UnmetError,
    judge,
    objective,
    rank,
    validate,
)


def quantity(value: float) -> Quantity:
    return Quantity(value=value, low=value, high=value, basis="extrapolated")


def row(
    tp: int = 1,
    pp: int = 1,
    precision: Any = "full",
    *,
    latency: float = 1.0,
    cost: float = 1.0,
    memory: float = 1.0,
    hours: float = 1.0,
    loss: float | None = 0.0,
) -> Estimate:
    return Estimate(
        configuration=Configuration(tp=tp, pp=pp, precision=precision),
        memory_bytes=quantity(memory),
        ttft_s=quantity(latency / 2),
        tpot_s=quantity(latency / 128),
        latency_s=quantity(latency),
        cost=quantity(cost),
        gpu_hours=quantity(hours),
        loss=None if loss is None else quantity(loss),
    )


SMALL = row(precision="int4", latency=3.0, cost=1.0, memory=1.0, hours=3.0, loss=0.05)
PLAIN = row(latency=2.0, cost=2.0, memory=4.0, hours=2.0)
WIDE = row(tp=2, latency=1.0, cost=3.0, memory=6.0, hours=2.5)
ROWS = [WIDE, SMALL, PLAIN]

# --------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"minimise": "speed"}, "minimise is 'speed': it may be latency, cost, memory, gpu_hours"),
        ({"cost": "euros"}, "cost is 'euros': it may be memory_seconds, memory, gpu_hours"),
        ({"max_latency_s": 0.0}, "max_latency_s is 0.0: it must be above 0"),
        ({"max_latency_s": float("nan")}, "max_latency_s is nan"),
        ({"max_cost": -2.0}, "max_cost is -2.0: it must be above 0"),
        ({"pp": 0}, "pp is 0: it must be a whole number, 1 or more"),
        ({"precision": "int5"}, f"precision is 'int5': it may be {', '.join(PRECISIONS)}"),
        ({"max_cost": "cheap"}, "max_cost is 'cheap': it must be above 0"),
        ({"max_loss": True}, "max_loss is True"),
        ({"max_loss": -0.01}, "max_loss is -0.01: it must be 0 or more"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0: it must be a whole number, 1 or more"),
        ({"output_tokens": -1}, "output_tokens is -1"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        (
            {"max_latency_s": 1.0, "max_cost": 2.0},
            "max_latency_s is 1.0 and max_cost is 2.0: only one of them",
        ),
        ({"max_latency_s": 1.0, "minimise": "memory"}, "minimise is 'memory' beside max_latency_s"),
        ({"max_cost": 1.0, "minimise": "gpu_hours"}, "minimise is 'gpu_hours' beside max_cost"),
    ],
)
def test_a_bad_intent_is_refused_by_field_value_and_what_is_allowed(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(IntentError) as refused:
        validate(Intent(**fields))
    assert words in str(refused.value)


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(IntentError, match=r"max_loss is -1.*prompt_tokens is 0"):
        validate(Intent(max_loss=-1.0, prompt_tokens=0))


def test_cost_is_minimised_unless_something_else_is_said() -> None:
    validate(Intent())
    assert objective(Intent()) == "cost"
    assert objective(Intent(max_latency_s=1.0)) == "cost"
    assert objective(Intent(max_cost=1.0)) == "latency"


# --------------------------------------------------------------------------- ranking


@pytest.mark.parametrize(
    ("intent", "best"),
    [
        (Intent(), PLAIN),
        (Intent(max_loss=0.1), SMALL),
        (Intent(minimise="latency"), WIDE),
        (Intent(minimise="memory"), PLAIN),
        (Intent(minimise="memory", max_loss=0.1), SMALL),
        (Intent(precision="int4"), SMALL),
        (Intent(minimise="gpu_hours"), PLAIN),
        (Intent(max_latency_s=2.5), PLAIN),
        (Intent(max_latency_s=1.0), WIDE),
        (Intent(max_cost=2.5), PLAIN),
        (Intent(max_loss=0.01), PLAIN),
        (Intent(minimise="memory", max_loss=0.01), PLAIN),
    ],
)
def test_a_limit_is_met_first_and_then_the_other_quantity_is_minimised(
    intent: Intent, best: Estimate
) -> None:
    assert rank(ROWS, intent)[0] == best


def test_a_limit_nothing_meets_is_answered_with_the_best_there_is() -> None:
    with pytest.raises(UnmetError, match=r"tp2 pp1 full: takes 1 s, above max_latency_s 0\.5") as unmet:
        rank(ROWS, Intent(max_latency_s=0.5))
    assert unmet.value.best is not None
    assert unmet.value.best.configuration == WIDE.configuration
    with pytest.raises(UnmetError, match=r"tp1 pp1 int4: costs 1 byte seconds, above max_cost 0\.5"):
        rank(ROWS, Intent(max_cost=0.5, max_loss=0.1))


def test_the_nearest_needs_no_more_devices_than_there_are() -> None:
    with pytest.raises(UnmetError, match=r"the nearest is tp1 pp1 full: takes 2 s") as unmet:
        rank([PLAIN, WIDE], Intent(max_latency_s=0.5), 1)
    assert unmet.value.best is not None and unmet.value.best.configuration == PLAIN.configuration


def test_the_nearest_keeps_the_floor_of_quality_if_anything_does() -> None:
    with pytest.raises(UnmetError) as unmet:
        rank([SMALL, PLAIN], Intent(max_cost=0.5, max_loss=0.01))
    assert unmet.value.best is not None
    assert unmet.value.best.configuration == PLAIN.configuration


def test_an_unknown_loss_is_allowed_only_where_the_precision_is_fixed() -> None:
    unknown = row(precision="int8", loss=None, cost=0.1)
    assert rank([unknown, PLAIN], Intent()) == [PLAIN]
    assert rank([unknown, PLAIN], Intent(precision="int8")) == [unknown]
    assert rank([unknown, PLAIN], Intent(max_loss=0.5)) == [PLAIN]
    with pytest.raises(UnmetError, match="what int8 loses is not known"):
        rank([unknown, PLAIN], Intent(precision="int8", max_loss=0.5))
    with pytest.raises(UnmetError, match="what int8 loses is not known"):
        rank([unknown], Intent(max_loss=0.5))


def test_a_limit_of_latency_does_not_buy_speed_with_an_unknown_loss() -> None:
    fast = row(precision="int3", loss=None, latency=0.4, cost=0.1)
    with pytest.raises(UnmetError, match=r"tp2 pp1 full: takes 1 s, above max_latency_s 0\.5"):
        rank([fast, PLAIN, WIDE], Intent(max_latency_s=0.5))
    assert [one.refusal for one in judge([fast, PLAIN], Intent())] == [
        "",
        "what int3 loses is not known: run `instar profile --precision int3` on the model's folder and "
        "register it again, or fix precision int3",
    ]


@pytest.mark.parametrize(
    ("loss", "is_allowed"),
    [(-0.001, True), (0.0, True), (DEFAULT_MAX_LOSS, True), (1.01 * DEFAULT_MAX_LOSS, False), (None, False)],
)
def test_without_a_limit_a_known_loss_within_the_default_is_allowed(
    loss: float | None, is_allowed: bool
) -> None:
    cheap = row(precision="int4", loss=loss, cost=0.1)
    assert (rank([cheap, PLAIN], Intent())[0] == cheap) == is_allowed
    (judged,) = judge([cheap], Intent())
    assert ("above the default max_loss 1.00%" in judged.refusal) == (loss is not None and not is_allowed)


def test_a_model_nobody_measured_has_nothing_to_offer() -> None:
    with pytest.raises(UnmetError, match="nothing was measured") as unmet:
        rank([], Intent())
    assert unmet.value.best is None


def test_what_is_ruled_out_is_told_last_with_its_reason() -> None:
    judged = judge(ROWS, Intent(max_latency_s=2.5))
    assert [one.configuration for one in judged] == [one.configuration for one in (PLAIN, WIDE, SMALL)]
    assert [bool(one.refusal) for one in judged] == [False, False, True]


def test_what_is_fixed_leaves_only_the_rest_to_be_chosen() -> None:
    assert rank(ROWS, Intent(precision="full")) == [PLAIN, WIDE]
    assert rank(ROWS, Intent(tp=2)) == [WIDE]
    assert [one.refusal for one in judge(ROWS, Intent(tp=2, precision="int4"))] == [
        "the intent fixes tp 2",
        "the intent fixes tp 2, precision int4",
        "the intent fixes precision int4",
    ]
    with pytest.raises(UnmetError, match="the nearest is tp1 pp1 full: the intent fixes pp 3") as unmet:
        rank(ROWS, Intent(tp=1, pp=3, precision="full"))
    assert unmet.value.best == replace(PLAIN, refusal="the intent fixes pp 3")


def test_a_tie_goes_to_fewer_devices_then_fewer_stages_then_more_bits() -> None:
    tied = [row(precision="int4"), row(tp=2), row(pp=2), row(), row(precision="int8")]
    names = [
        (one.configuration.tp, one.configuration.pp, one.configuration.precision)
        for one in rank(tied, Intent())
    ]
    assert names == [(1, 1, "full"), (1, 1, "int8"), (1, 1, "int4"), (2, 1, "full"), (1, 2, "full")]


@given(
    values=st.lists(st.tuples(*[st.integers(1, 5)] * 4, st.sampled_from([None, 0.0, 0.1])), max_size=12),
    intent=st.sampled_from(
        [Intent(), Intent(minimise="latency"), Intent(max_latency_s=2.5), Intent(max_cost=2.5, max_loss=0.05)]
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_the_order_does_not_depend_on_the_order_of_what_came_in(
    values: list[tuple[int, int, int, int, float | None]], intent: Intent, seed: int
) -> None:
    rows = [
        row(1 + i % 3, 1 + i // 6, PRECISIONS[i // 3 % 2], latency=a, cost=b, memory=c, hours=d, loss=loss)
        for i, (a, b, c, d, loss) in enumerate(values)
    ]
    shuffled = random.Random(seed).sample(rows, len(rows))
    judged = judge(rows, intent)
    assert judged == judge(shuffled, intent)
    assert sorted(map(repr, (replace(one, refusal="") for one in judged))) == sorted(map(repr, rows))
    allowed = [one for one in judged if not one.refusal]
    values_of = {
        "cost": [one.cost.value for one in allowed],
        "latency": [one.latency_s.value for one in allowed],
    }
    minimised = values_of["latency" if objective(intent) == "latency" else "cost"]
    assert minimised == sorted(minimised)


def with_kv(one: Estimate, loss: float | None, memory: float) -> Estimate:
    shape = replace(one.configuration, kv_dtype="int8")
    known = None if loss is None else quantity(loss)
    return replace(one, configuration=shape, loss=known, memory_bytes=quantity(memory))


def test_kv_in_8_bits_is_taken_for_its_memory_where_its_loss_is_known_and_allowed() -> None:
    cheap = with_kv(PLAIN, 0.001, 3.0)
    assert rank([PLAIN, cheap], Intent(minimise="memory"))[0] == cheap
    assert rank([PLAIN, cheap], Intent(minimise="memory", max_loss=0.0005)) == [PLAIN]
    assert rank([PLAIN, with_kv(PLAIN, None, 3.0)], Intent(minimise="memory")) == [PLAIN]
    assert rank([cheap, PLAIN], Intent(minimise="latency"))[0] == PLAIN, "it is not known to be as fast"


def test_an_intent_that_fixes_the_precision_gets_kv_in_8_bits_only_if_it_says_so() -> None:
    rows = [PLAIN, with_kv(PLAIN, None, 3.0)]
    assert rank(rows, Intent(minimise="memory", precision="full")) == [PLAIN]
    fixed = rank(rows, Intent(minimise="memory", precision="full", kv_dtype="int8"))
    assert [one.configuration.kv_dtype for one in fixed] == ["int8"]
    with pytest.raises(UnmetError, match="a KV cache in int8 lose is not known"):
        rank(rows, Intent(kv_dtype="int8"))
    with pytest.raises(IntentError, match="kv_dtype is 'int4': it may be full, int8"):
        validate(Intent(kv_dtype="int4"))  # type: ignore[arg-type]
