"""The waits that relief is weighed by: for the prompts before one's own, and for KV blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.messages import PARTS
from bus.policy import Slowdown
from bus.precisions import Precision
from worker.morph.plan import Half
from worker.morph.pricing import Waits, is_predictable, predict_waits, slowdown_of
from worker.morph.reflex import Load

HALVES = [Half(layer, part) for layer in range(4) for part in PARTS]
FULL: dict[Half, Precision] = dict.fromkeys(HALVES, "full")
INT8: dict[Half, Precision] = dict.fromkeys(HALVES, "int8")
SLOW: dict[Precision, Slowdown] = {"int8": Slowdown(1.5, 2.0)}

# 100 blocks come free in 2 s; 500 prompt tokens are computed in 1 s.
LOAD = Load(
    at_s=0.0,
    kv_blocks=100,
    kv_used=100,
    kv_needed=200,
    running=10,
    waiting=10,
    residence_s=2.0,
    prompt_tokens=500,
    prompt_rate=500.0,
)


def weighed(load: Load = LOAD, **about: Any) -> Waits:
    default: dict[str, Any] = {
        "missing": 100,
        "blocks": 60,
        "before": FULL,
        "after": INT8,
        "slowdowns": {},
        "work_s": 0.0,
    }
    return predict_waits(load, **(default | about))


def test_blocks_that_come_late_are_worth_the_work() -> None:
    assert weighed() == Waits(without_s=2.0, with_s=1.0)  # 40 blocks in 0.8 s, the prompts in 1 s
    assert weighed(blocks=40).with_s == pytest.approx(1.2)
    assert weighed(work_s=0.9).is_shorter and not weighed(work_s=1.0).is_shorter


def test_where_prompts_take_longest_more_blocks_shorten_nothing() -> None:
    busy = replace(LOAD, prompt_tokens=1000)
    assert weighed(busy) == Waits(without_s=2.0, with_s=2.0)
    assert not weighed(busy).is_shorter
    assert weighed(busy, work_s=0.1).with_s == pytest.approx(2.1)


def test_slower_steps_make_prompts_late_and_blocks_too() -> None:
    assert weighed(slowdowns=SLOW) == Waits(without_s=2.0, with_s=1.6)  # 40 blocks in 2 * 0.8 s
    prompts = weighed(blocks=100, slowdowns=SLOW)
    assert prompts.with_s == pytest.approx(1.5)
    quicker = weighed(blocks=100, slowdowns={"int8": Slowdown(0.5, 1.0)})
    assert quicker.with_s == pytest.approx(0.5)


def test_what_is_swapped_already_has_slowed_the_rate_that_is_measured() -> None:
    before = FULL | dict.fromkeys(HALVES[:4], "int8")  # 1.25 times
    found = weighed(blocks=100, before=before, slowdowns=SLOW)
    assert found.with_s == pytest.approx(1.5 / 1.25)


def test_the_slowdown_of_a_shape_is_the_mean_of_its_halves_and_what_is_unknown_slows_nothing() -> None:
    assert slowdown_of(FULL, SLOW) == Slowdown(1.0, 1.0)
    assert slowdown_of(FULL | dict.fromkeys(HALVES[:2], "int8"), SLOW) == Slowdown(1.125, 1.25)
    assert slowdown_of(FULL | dict.fromkeys(HALVES[:2], "int4"), SLOW) == Slowdown(1.0, 1.0)


def test_what_has_waited_for_blocks_already_is_taken_to_wait_longer() -> None:
    quick = replace(LOAD, residence_s=0.5)  # by those that have ended
    assert weighed(quick).without_s == 1.0  # the prompts
    assert weighed(replace(quick, waited_s=2.0)) == Waits(without_s=2.5, with_s=1.0)


def test_without_a_history_nothing_is_predicted() -> None:
    assert is_predictable(LOAD)
    assert not is_predictable(replace(LOAD, prompt_rate=0.0))
    assert not is_predictable(replace(LOAD, residence_s=0.0))
