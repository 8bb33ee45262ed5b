"""Mixes of bursts and long requests: the planner with all levers, in simulation."""

from __future__ import annotations

import random

from bench.planner.compare import EQUAL, mix, run
from instar.replay.schemas import Arrival


def test_a_burst_is_swapped_for_and_then_a_group_is_made_for_what_no_worker_can_hold() -> None:
    """Workers become a group with equal layers, and their reflexes give none back meanwhile."""
    rng = random.Random(1)
    burst = [Arrival(rng.uniform(0, 1), rng.randint(32, 360), rng.randint(16, 120)) for _ in range(60)]
    arrivals = [*sorted(burst, key=lambda one: one.at_s), Arrival(1.5, 3600, 100)]
    found = {name: run(name, arrivals) for name in ("swap", "merge", "planner")}
    planner = found["planner"]
    assert planner["levers"]["scale_up applied"] == 1 and "scale_up deferred" not in planner["levers"]
    assert planner["loss"] > 0
    assert planner["cost_s"] < 0.8 * min(found[name]["cost_s"] for name in ("swap", "merge"))


def test_a_long_request_that_a_swap_holds_gets_no_group() -> None:
    """A merge would serve it as soon, and be in the way of the burst that comes next."""
    arrivals = mix(63)
    planner, swapped = run("planner", arrivals), run("swap", arrivals)
    assert "scale_up applied" not in planner["levers"]
    assert planner["cost_s"] < EQUAL * swapped["cost_s"]


def test_a_swap_that_is_ordered_while_a_reflex_decides_is_not_lost() -> None:
    """Else both long requests of this mix would never be served."""
    assert run("swap", mix(58))["late"] == 0
