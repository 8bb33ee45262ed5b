"""The decisions of the planner for the service as it is, and load that is only imagined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.deployments import WeighLevers
from bus.levers import LeverPlan
from bus.policy import Policy
from controller.morphing.groups import Group
from controller.morphing.track import Waiting
from controller.morphing.what_if import what_if
from controller.planning.lever_costs import ALONE, LeverCosts
from tests.controller.morphing.test_pressure import worker
from tests.support.parallelism_groups import group


def asked(
    *groups: Group, waiting: Waiting | None = None, policy: Policy | None = None, **order: Any
) -> list[LeverPlan]:
    there, costs = {"m": waiting} if waiting else {}, LeverCosts(speeds={1: 50.0})
    return what_if(WeighLevers(id="q", **order), groups, there, policy or Policy(), costs, 100.0)


def levers(plans: list[LeverPlan]) -> list[str]:
    return [one.lever for plan in plans for one in plan.taken]


def test_without_need_nothing_would_be_done() -> None:
    assert asked(worker("w0", 50), worker("w1", 10)) == []


def test_imagined_requests_fill_the_instance_with_most_room_first() -> None:
    there = replace(worker("w0", 90), max_tokens=1000), replace(worker("w1", 10), max_tokens=1000)
    assert asked(*there, requests=8, prompt_tokens=90, output_tokens=20) == []  # ten blocks each
    plans = asked(*there, requests=14, prompt_tokens=90, output_tokens=20)
    assert levers(plans) == ["swap", "swap"] and "requests wait for" in plans[0].need


def test_an_idle_instance_is_imagined_at_the_speed_of_a_busy_one() -> None:
    there = replace(worker("w0", 0), max_tokens=1000, tokens_per_s=0.0, layer_blocks={})
    load = WeighLevers(id="q", requests=14, prompt_tokens=90, output_tokens=20)
    for costs, speed, basis in [
        (LeverCosts(), ALONE, "assumed"),
        (LeverCosts(speeds={1: 20.0}), 20.0, "measured"),
    ]:
        (plan,) = what_if(load, [there], {}, Policy(), costs, 100.0)
        (queue,) = plan.taken
        assert (queue.lever, queue.basis) == ("queue", basis)
        assert queue.duration_s == pytest.approx(400 / speed)


def test_imagined_requests_that_no_worker_holds_need_a_group() -> None:
    there = worker("w0", 0), worker("w1", 0)
    (plan,) = asked(*there, requests=2, prompt_tokens=300, output_tokens=50)
    assert levers([plan]) == ["merge"] and plan.need.startswith("2 requests of up to 350 tokens wait")
    (both,) = asked(*there, waiting=Waiting(250, 1, 3, 99.0, 100.0), requests=2, prompt_tokens=300)
    assert both.need.startswith("3 requests of up to 364 tokens wait")


def test_what_is_there_is_weighed_too_in_manual_mode_by_the_default() -> None:
    manual = Policy(mode="manual")
    assert levers(asked(worker("w0", 95, 30), worker("w1", 10), policy=manual)) == ["move"]
    assert levers(asked(group("w0", "w1"), policy=manual)) == ["part"]
    assert asked(worker("w0", 95, 30), model="other") == []
