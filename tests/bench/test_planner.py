"""Bursts and long requests: the planner with all levers, in simulation."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bench.planner import compare
from bench.planner.compare import EQUAL, LONG, POLICIES, SECONDS, mix, run
from instar.replay.schemas import Arrival


def burst(begins_s: float, count: int, seed: int = 1) -> list[Arrival]:
    """So many requests within a second."""
    rng = random.Random(seed)
    return [
        Arrival(begins_s + rng.uniform(0, 1), rng.randint(32, 360), rng.randint(16, 120))
        for _ in range(count)
    ]


def in_order(*arrivals: Arrival) -> list[Arrival]:
    return sorted(arrivals, key=lambda one: one.at_s)


def test_mixes_that_are_kept_are_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seeds = []

    def compared(seed: int) -> dict[str, Any]:
        seeds.append(seed)
        each = {"cost_s": 1.0, "priced_s": 1.0, "late": 0, "loss": 0.0}
        return {"seed": seed, "best": "queue", "ratio": 1.0, "priced_ratio": 1.0} | dict.fromkeys(
            POLICIES, each
        )

    monkeypatch.setattr(compare, "compared", compared)
    for first, mixes in ((3, 2), (2, 4)):
        argv = ["compare", "--first", str(first), "--mixes", str(mixes), "--keep", str(tmp_path / "rows")]
        monkeypatch.setattr("sys.argv", argv)
        compare.main()
    assert seeds == [3, 4, 2, 5]
    assert len((tmp_path / "rows").read_text().splitlines()) == 4


@pytest.mark.parametrize("seed", [0, 1, 107])
def test_a_mix_has_a_long_request_within_a_burst(seed: int) -> None:
    arrivals = mix(seed)
    assert arrivals == mix(seed) and 0 <= arrivals[0].at_s <= arrivals[-1].at_s <= SECONDS + 2
    long = [one for one in arrivals if one.prompt_tokens >= LONG[0]]
    assert 1 <= len(long) <= 3
    near = [sum(abs(other.at_s - one.at_s) < 3 for other in arrivals) for one in long]
    assert max(near) >= 15


def test_a_burst_is_swapped_for_and_then_a_group_is_made_for_what_no_worker_can_hold() -> None:
    """Workers become a group with equal layers, and their reflexes give none back meanwhile."""
    arrivals = in_order(*burst(0, 60), Arrival(1.5, 3600, 100))
    found = {name: run(name, arrivals) for name in ("swap", "merge", "planner")}
    planner = found["planner"]
    assert planner["levers"]["scale_up applied"] == 1 and "scale_up deferred" not in planner["levers"]
    assert planner["loss"] > 0
    assert planner["cost_s"] < 0.8 * min(found[name]["cost_s"] for name in ("swap", "merge"))


def test_a_long_request_that_a_swap_holds_gets_no_group() -> None:
    """A merge would serve it as soon, and be in the way of the burst that comes next."""
    arrivals = in_order(*burst(0, 30), Arrival(3.0, 1800, 100), *burst(4, 80, seed=2))
    planner, swapped = run("planner", arrivals), run("swap", arrivals)
    assert "scale_up applied" not in planner["levers"]
    assert planner["cost_s"] < EQUAL * swapped["cost_s"]


def test_a_swap_that_is_ordered_while_a_reflex_decides_is_not_lost() -> None:
    """Else the long requests would never be served."""
    arrivals = in_order(*burst(0, 60), Arrival(0.9, 2400, 50), Arrival(1.0, 2300, 50))
    assert run("swap", arrivals)["late"] == 0


def test_a_long_request_is_served_after_a_group_was_made_that_is_too_small_for_it() -> None:
    """The group stayed while something waited, so that the other could never be served."""
    arrivals = [Arrival(0.3, 3300, 100), Arrival(6.0, 3700, 100)]
    found = run("merge", arrivals)
    assert found["levers"]["scale_up applied"] == 2 and found["cost_s"] < 30
