"""The windows of traces and the verdict on them: what is chosen before any run, and what counts as met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.paper.choice import (
    SECONDS,
    TraceWindow,
    choose,
    is_fit,
    longest_wait,
    thinned_for,
    windows_of,
)
from bench.paper.loads import thinned
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE
from bench.paper.simulated import judge as judge_simulated
from bench.paper.simulated import runs_of
from bench.paper.verdict import judge
from bench.paper.windows import poisson
from bench.paper.windows_plot import draw
from instar.errors import InputError


def evenly(num: int, begin_s: float = 0.0, seconds: float = SECONDS) -> list[float]:
    return [begin_s + i * seconds / num for i in range(num)]


def test_windows_slide_over_the_whole_trace_and_thin_ones_are_left_out() -> None:
    times = [*evenly(100), *evenly(10, 60.0), *evenly(100, 120.0), 181.0]
    found = windows_of("code", times)
    assert [(one.name, len(one.times)) for one in found] == [("code:0", 100), ("code:120", 100)]
    assert min(found[1].times) >= 0 and max(found[1].times) < SECONDS


def test_the_burstiest_of_code_and_the_fullest_of_conversation_without_overlaps() -> None:
    bursty = TraceWindow("code", 30.0, [*evenly(50), *evenly(50, 10.0, 5.0)])
    worse = TraceWindow("code", 60.0, [*evenly(60), *evenly(40, 10.0, 5.0)])
    apart = TraceWindow("code", 90.0, evenly(100))
    few, many = TraceWindow("conv", 0.0, evenly(70)), TraceWindow("conv", 300.0, evenly(90))
    assert choose([apart, worse, bursty], [few, many]) == [bursty, apart, many, few]


def test_the_wait_is_that_of_a_queue_with_one_server() -> None:
    assert longest_wait([0.0, 0.0, 0.0, 10.0], rate=2.0) == 1.0
    assert longest_wait([0.0, 1.0, 2.0], rate=1.0) == 0.0


def test_a_window_is_thinned_until_static_int4_holds_it_and_is_fit_if_full_precision_does_not() -> None:
    times = sorted([*evenly(60), *evenly(80, 20.0, 8.0)])
    left = thinned_for(times, rate=8.0)
    assert 60 < len(left) < len(times)
    assert longest_wait(left, 8.0) <= 1.0 < longest_wait(thinned(times, len(left) + 1), 8.0) + 0.1
    assert is_fit(left, full=4.0) and not is_fit(left, full=7.0)


def row(load: str, way: str, violations: int, p95_s: float, **fields: Any) -> dict[str, Any]:
    return {
        "load": load,
        "way": way,
        "mode": "default" if way in (DEFAULT, PERFORMANCE) else "manual",
        "violations": violations,
        "ttft_s": {"p95": p95_s},
        "loss": 0.001,
        "preemptions": 0,
        "first_blocks_s": [0.1],
        "back_after_s": 3.0,
        "is_back": True,
    } | fields


def verdict(*rows: dict[str, Any]) -> list[bool]:
    return [is_met for _, _, is_met in judge(rows, loss_of_int4=0.03)]


def test_the_verdict_is_over_all_windows() -> None:
    good = [
        row("a", FULL, 100, 5.0),
        row("a", INT4, 0, 0.5),
        row("a", DEFAULT, 10, 1.0),
        row("a", PERFORMANCE, 0, 0.6),
    ]
    assert all(verdict(*good))
    bad = row("a", DEFAULT, 11, 2.0, loss=0.01, preemptions=1), row("a", PERFORMANCE, 1, 0.6)
    assert verdict(*good[:2], *bad) == [False, False, False, False, True, True, False]
    late = row("a", DEFAULT, 10, 1.0, first_blocks_s=[0.5], back_after_s=11.0)
    assert verdict(*good[:2], late, good[3])[4:6] == [False, False]
    assert not verdict(*good[:2], row("a", DEFAULT, 10, 1.0, is_back=False), good[3])[5]


def test_the_picture_has_every_window_and_way(tmp_path: Path) -> None:
    rows = [row(load, way, 1, 0.5, requests=10) for load in ("a", "b") for way in (FULL, DEFAULT)]
    draw(rows, path := tmp_path / "windows.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_simulation_is_held_against_the_mean_of_the_repeats() -> None:
    def compared(window: str, p95_s: float, swaps: float) -> dict[str, Any]:
        return {
            "window": window,
            "way": DEFAULT,
            "p95_s": {"simulated": p95_s, "measured": 1.0},
            "swaps": {"simulated": swaps, "measured": 10.0},
        }

    rows = [compared("a", 0.8, 10.0), compared("a", 1.2, 10.0), compared("b", 1.1, 12.0)]
    assert [is_met for _, _, is_met in judge_simulated(rows, DEFAULT)] == [True, False]
    assert [is_met for _, _, is_met in judge_simulated(rows, FULL)] == [False, False], "there are no runs"


def test_runs_without_calibrations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no runs that"):
        runs_of(tmp_path)


def test_arrivals_at_random_are_the_same_each_time_and_of_the_wanted_rate() -> None:
    times = poisson(10.0, 100.0)
    assert times == sorted(times) == poisson(10.0, 100.0)
    assert 900 < len(times) < 1100 and times[-1] < 100.0
