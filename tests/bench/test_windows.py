"""The windows of traces and the verdict on them: what is chosen before any run, and what counts as met."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.dummy_model import config_folder, model_folder
from bench.common.results import DEMO
from bench.morph.service import Way
from bench.paper.campaign import Campaign, Clock
from bench.paper.choice import (
    SECONDS,
    TraceWindow,
    choose,
    is_fit,
    longest_wait,
    thinned_for,
    windows_of,
)
from bench.paper.kept import Job, Kept
from bench.paper.loads import thinned
from bench.paper.page import BLOCKS, PAGE, regenerated
from bench.paper.reflex import LossTable, first_blocks, lend_profiles, loss_table
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE
from bench.paper.simulated import judge as judge_simulated
from bench.paper.simulated import runs_of, window_of, with_swaps
from bench.paper.verdict import judge
from bench.paper.windows import WindowRuns, poisson
from bench.paper.windows_page import bursts
from bench.paper.windows_plot import draw
from bus.messages import Event, Histogram, InstanceTelemetry
from bus.morphs import MorphReport
from instar.errors import InputError
from instar.replay.files import RunFile
from instar.replay.statistics import Slo
from tests.support.simulations import SMALL


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


# ------------------------------------------------------------------------------------- the verdict

LOSSES = {"judged_by": "the profile of models/demo", "of_int4": 0.03}


def row(load: str, way: str, violations: int, p95_s: float, **fields: Any) -> dict[str, Any]:
    return {
        "part": "loads",
        "load": load,
        "way": way,
        "repeat": 0,
        "mode": "default" if way in (DEFAULT, PERFORMANCE) else "manual",
        "requests": 200,
        "violations": violations,
        "ttft_s": {"p95": p95_s},
        "loss": 0.001,
        "preemptions": 0,
        "first_blocks": {"seconds": [0.1], "unqueued": 0, "without_blocks": 0},
        "back_after_s": 3.0,
        "is_back": True,
        "decisions": [{"at_s": 1.0}],
        "others_cores": 0.0,
        "machine_factor": 1.05,
    } | fields


def rung(way: str, rate: float, p95_s: float, repeat: int = 0, served: int = 9) -> dict[str, Any]:
    found = {"part": "ladder", "way": way, "rate": rate, "repeat": repeat, "ttft_s": {"p95": p95_s}}
    return found | {"served": served, "requests": 9, "others_cores": 0.0}


def verdict(*rows: dict[str, Any], ladder: Sequence[dict[str, Any]] = ()) -> list[bool | None]:
    return [one.is_met for one in judge(rows, ladder, LOSSES)]


GOOD = [
    row("a", FULL, 100, 5.0),
    row("a", INT4, 0, 0.5),
    row("a", DEFAULT, 10, 1.0),
    row("a", PERFORMANCE, 0, 0.6),
]


def test_the_verdict_is_over_all_windows() -> None:
    assert verdict(*GOOD) == [True, True, True, True, None, None, True, True, True, True, True]
    bad = row("a", DEFAULT, 11, 2.0, loss=0.01, preemptions=1), row("a", PERFORMANCE, 1, 0.6)
    assert verdict(*GOOD[:2], *bad)[:9] == [False, False, False, False, None, None, True, True, False]
    late = {"seconds": [0.5], "unqueued": 0, "without_blocks": 0}
    slow = row("a", DEFAULT, 10, 1.0, first_blocks=late, back_after_s=11.0, others_cores=0.5)
    assert verdict(*GOOD[:2], slow, GOOD[3])[6:] == [False, False, True, False, True]
    for factor in (0.8, 1.2):
        assert not verdict(*GOOD, row("b", FULL, 0, 0.5, machine_factor=factor))[10]
    assert not verdict(*GOOD[:2], row("a", DEFAULT, 10, 1.0, is_back=False), GOOD[3])[7]


def test_what_has_no_runs_is_not_judged() -> None:
    assert verdict() == [None] * 11
    assert verdict(GOOD[0]) == [None] * 9 + [True, True]
    none = {"seconds": [], "unqueued": 1, "without_blocks": 1}
    found = judge([*GOOD[:2], row("a", DEFAULT, 10, 1.0, first_blocks=none)], [], LOSSES)
    assert found[6].is_met is None and "1 with nobody queued yet, and 1 that added no block" in found[6].found


def test_repeats_count_by_their_median_but_performance_mode_by_its_worst() -> None:
    again = [row("a", DEFAULT, count, 1.0, repeat=count) for count in (0, 90)]
    assert verdict(*GOOD, *again)[:2] == [True, True]
    assert verdict(*GOOD, row("a", PERFORMANCE, 1, 0.6, repeat=1))[3] is False
    assert verdict(*GOOD, row("b", FULL, 100, 5.0)) == verdict(*GOOD), "b has no run of default mode"
    assert verdict(row("a", FULL, 0, 5.0), row("a", DEFAULT, 1, 5.0))[0] is False, "full precision had none"
    told = judge([*GOOD, again[1], row("a", DEFAULT, 11, 1.0, repeat=2)], [], LOSSES)[0].found
    assert told == "100 to 11 (10 to 90), in 1 windows"


def test_the_rate_within_the_limit_is_compared_in_each_repeat() -> None:
    ways = {FULL: 2.0, DEFAULT: 3.2, PERFORMANCE: 3.4}
    ladder = [
        rung(way, rate, 0.5, repeat, served=9 if rate <= limit else 8)
        for repeat in (0, 1)
        for way, limit in ways.items()
        for rate in (2.0, 3.2, 3.4, 4.0)
    ]
    assert verdict(*GOOD, ladder=ladder)[4:6] == [True, False]
    unfinished = [rung(FULL, 2.0, 0.5, 2), rung(DEFAULT, 2.0, 0.5, 2)]
    assert verdict(*GOOD, ladder=[*ladder, *unfinished])[4:6] == [True, False]


def test_random_weights_have_measured_losses_where_layers_are_as_many() -> None:
    own = loss_table(DEMO, 8)
    assert own.source == "its own profile" and own.of_int4 > 0
    with model_folder("30M") as folder:
        assert loss_table(folder, 8).losses.assumed == ("int8", "int4", "int3")
        lend_profiles(folder)
        assert loss_table(folder, 8) == LossTable(own.losses, "the profile of models/demo")
    with config_folder("100M") as folder:
        lend_profiles(folder)
        assert loss_table(folder, 12).source == "assumed"


# ------------------------------------------------------------------------------------- first blocks


def decision(at_s: float, waited_s: float, cause: str = "queue_delay") -> Event:
    numbers = {"waited_s": waited_s}
    return Event(
        kind="morph_decided",
        source="w0",
        subject="i",
        reason="",
        at_ms=round(1000 * at_s),
        numbers=dict(numbers),
        morph_id=f"reflex-{at_s}",
        cause=cause,
    )


def ended(event: Event, blocks: int, ended_s: float = 0.0, **numbers: float) -> MorphReport:
    return MorphReport(
        id=event.morph_id,
        kind="swap" if numbers else "resize",
        target="i",
        worker="w0",
        epoch=1,
        state="applied",
        reason="",
        started_ms=event.at_ms,
        ended_ms=round(1000 * ended_s),
        numbers={"blocks_before": 10, "blocks_after": 10 + blocks} | numbers,
    )


def report(at_s: float, oldest_wait_s: float) -> tuple[float, InstanceTelemetry]:
    empty = Histogram()
    one = InstanceTelemetry(
        id="i",
        running=1,
        waiting=1,
        waiting_tokens=1,
        kv_blocks=10,
        kv_used=10,
        layers=[],
        prompt_tokens=0,
        generation_tokens=0,
        preemptions=0,
        finished={},
        queue_seconds=empty,
        step_seconds=empty,
        time_to_first_token=empty,
        time_per_output_token=empty,
        oldest_wait_seconds=oldest_wait_s,
    )
    return at_s, one


def test_first_blocks_count_from_the_first_in_the_queue_to_the_first_morph_that_added_some() -> None:
    first, second = decision(10.0, 0.1), decision(10.4, 0.5)
    morphs = [ended(first, 0, 10.3, blocks_seconds=0.0), ended(second, 5, 11.0, blocks_seconds=0.2)]
    assert first_blocks([first, second], morphs, [])["seconds"] == [0.7]
    ahead = [report(8.0, 0.5), report(9.95, 0.25)]
    assert first_blocks([first, second], morphs, ahead)["seconds"] == [0.9], (
        "one stood before it in the queue"
    )


def test_a_resize_counts_with_its_time_and_reliefs_without_queue_or_blocks_are_counted_apart() -> None:
    resize, back = decision(10.0, 0.2), decision(12.0, 0.0, "ease")
    early, none = decision(13.0, 0.0, "kv_usage"), decision(16.0, 1.0)
    morphs = [ended(resize, 3, 10.1), ended(early, 3, 13.1, blocks_seconds=0.1), ended(none, 0, 16.1)]
    found = first_blocks([resize, back, early, decision(15.0, 0.0, "ease"), none], morphs, [])
    assert found == {"seconds": [0.3], "unqueued": 1, "without_blocks": 1}


# ------------------------------------------------------------------------------------- runs that are kept


def job(way: str, repeat: int = 0, load: str = "code:1") -> Job:
    return Job("loads", load, Way(way), repeat, [0.0], 60.0, 60.0)


def test_a_second_session_goes_on_where_the_first_one_stopped(tmp_path: Path) -> None:
    jobs = [job(way, repeat) for repeat in (0, 1) for way in (FULL, DEFAULT)]
    done: list[Job] = []

    def measured(one: Job) -> dict[str, Any]:
        done.append(one)
        return row(one.load, one.way.name, len(done), 1.0)

    def session(minutes: float, **options: Any) -> bool:
        kept = Kept(tmp_path / "runs.json", {"size": "30M"}, **options)
        service: Any = None
        return Campaign(service, [], kept, tmp_path, Clock(minutes)).do(jobs[:limit], {"loads": measured})

    limit = 3
    assert session(0.0) and [one.key for one in done] == [one.key for one in jobs[:3]]
    limit = 4
    assert not session(0.5), "a run takes longer than the session has"
    assert len(done) == 3
    assert session(0.0) and done[3:] == jobs[3:]
    rows = json.loads((tmp_path / "runs.json").read_text())["rows"]
    assert [one["violations"] for one in rows] == [1, 2, 3, 4]
    rows[1]["others_cores"] = 1.5
    (tmp_path / "runs.json").write_text(json.dumps({"plan": {"size": "30M"}, "rows": rows}))
    assert session(0.0, redo_disturbed=True) and done[4:] == [jobs[1]]
    rows[2]["machine_factor"] = 1.2
    (tmp_path / "runs.json").write_text(json.dumps({"plan": {"size": "30M"}, "rows": rows}))
    assert session(0.0, redo_disturbed=True) and done[5:] == [jobs[1], jobs[2]]
    with pytest.raises(InputError, match="holds runs with size 30M, asked for is demo"):
        Kept(tmp_path / "runs.json", {"size": "demo"})


def test_windows_that_do_not_fit_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    def choose_of(full: float, int4: float, num: int) -> WindowRuns:
        campaign: Any = SimpleNamespace(rates=(full, int4))
        losses: Any = None
        runs = WindowRuns(campaign, [], losses, SMALL)
        runs.choose(
            [TraceWindow("code", 0.0, evenly(600)), TraceWindow("code", 60.0, evenly(60))],
            num,
            are_named=False,
        )
        return runs

    with pytest.raises(InputError, match=r"none of 2 windows saturates full precision, which serves 20.00"):
        choose_of(20.0, 40.0, 2)
    assert [window.name for window, _ in choose_of(5.0, 8.0, 2).chosen] == ["code:0"]
    assert "only 1 of the 2 windows that were asked for are fit" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- pages and pictures


def test_the_page_has_every_window_and_says_whose_losses_they_are() -> None:
    rows = [*GOOD, row("a", DEFAULT, 20, 3.0, repeat=1), rung(FULL, 2.0, 9.0)]
    losses = {"judged_by": "assumed", "of_int4": 0.03}
    found = {
        "plan": {"size": "100M"},
        "wanted": 10,
        "sessions": [{"commit": "abc", "full_requests_per_s": rate} for rate in (2.0, 2.2)],
        "windows": {"a": [200, 800]},
        "kv_blocks_at_full": 55,
        "requests_per_s": {FULL: 2.0, INT4: 4.0},
        "losses": losses,
        "bars": [one.as_json() for one in judge(rows[:-1], rows[-1:], losses)],
        "rows": rows,
    }
    none = dict.fromkeys(("paper", "paper-100M", "windows", "simulated"))
    page = regenerated(PAGE.read_text(), BLOCKS[PAGE], none | {"windows": found})
    assert "sessions 2.10 (2.00 to 2.20) at full precision)" in page and "Measured at abc." in page
    assert "Only 1 of 10 windows have runs" in page and "losses that are assumed" in page
    assert bursts(found) == (
        "in 1 runs of 1 windows of 60 s, 10 of 200 requests over 2 s TTFT instead of 100; P95 TTFT 5.00 to "
        "5.00 times lower; predicted loss of perplexity at most 0.10 %"
    )
    assert "| a | 200 of 800 | 5.00 s; 100" in page
    assert "2.00 (1.00 to 3.00) s; 15 (10 to 20)" in page
    assert "| full precision | below the first rung |" in page


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
    calm = compared("c", 1.0, 0.0) | {"swaps": {"simulated": 0.0, "measured": 0.0}}
    assert [is_met for _, _, is_met in judge_simulated([calm], DEFAULT)] == [True, True]


def test_the_cost_of_a_half_is_that_of_the_swaps_in_other_windows() -> None:
    def swapped(window: str, way: str, copy_s: float) -> RunFile:
        numbers = {
            "halves_applied": 2,
            "bytes_copied": 1000,
            "copy_seconds": copy_s,
            "boundary_seconds": 0.05,
            "awaited_seconds": 0.01,
        }
        morphs = [{"kind": "swap", "state": "applied", "numbers": numbers}]
        about = {"name": way, "source": f"{window} {way} 0"}
        return RunFile(about, Slo(2.0, 0.1), [], {"morphs": morphs})

    runs = [swapped("code:1", DEFAULT, 9.0), swapped("code:2", DEFAULT, 1.0), swapped("code:2", FULL, 5.0)]
    assert window_of(runs[0]) == "code:1"
    found = with_swaps(SMALL, runs, "code:1").morph
    assert (found.byte_s, found.share) == (0.001, SMALL.morph.share)
    assert found.half_s == pytest.approx(0.02)
    assert with_swaps(SMALL, runs[:1], "code:1") == SMALL  # nothing was swapped elsewhere


def test_runs_without_calibrations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds 0 runs to calibrate with, and 0 of windows"):
        runs_of(tmp_path)


def test_arrivals_at_random_are_the_same_each_time_and_of_the_wanted_rate() -> None:
    times = poisson(10.0, 100.0)
    assert times == sorted(times) == poisson(10.0, 100.0)
    assert 900 < len(times) < 1100 and times[-1] < 100.0
