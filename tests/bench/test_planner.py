"""Mixes of bursts and long requests: the planner with all levers, in simulation."""

from __future__ import annotations

from bench.planner.compare import EQUAL, mix, run


def test_workers_with_equal_layers_below_full_precision_become_a_group() -> None:
    """A level swap comes first in this mix, and two reflexes would give layers back meanwhile."""
    arrivals = mix(7)
    planner, alone = run("planner", arrivals), run("merge", arrivals)
    assert planner["levers"]["scale_up applied"] == 1 and "scale_up deferred" not in planner["levers"]
    assert planner["loss"] > 0 and planner["cost_s"] < EQUAL * alone["cost_s"]
