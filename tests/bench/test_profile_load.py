"""The numbers of `bench.profiling`, of requests whose times are known."""

from __future__ import annotations

import pytest

from bench.profiling.report import LOADING, MEASURING, WHOLE, WITHOUT, ProfilingWindow, report, say_card
from instar.replay.outcomes import RequestOutcome


def outcome(ttft_s: float, tpot_s: float) -> RequestOutcome:
    first_s = 100.0 + ttft_s
    return RequestOutcome(
        0,
        100.0,
        1,
        11,
        first_s=first_s,
        last_s=first_s + 10 * tpot_s,
        longest_pause_s=2 * tpot_s,
        events=11,
    )


def window(beside: str, times: float, number: int = 0) -> ProfilingWindow:
    """TTFT of 10, 20, ... 110 ms and TPOT of a tenth of that, each so many times."""
    return ProfilingWindow(
        beside, number, [outcome(0.01 * i * times, 0.001 * i * times) for i in range(1, 12)], 0.1
    )


def test_what_runs_beside_a_profile_is_told_over_what_runs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    windows = [window(WITHOUT, 1.0), window(MEASURING, 1.5), window(LOADING, 1.1), window(WITHOUT, 1.0, 1)]
    found = report([*windows, window(WHOLE, 2.0)])
    alone = found["rows"][WITHOUT]
    assert alone["requests"] == 22
    assert alone["ttft_p50_ms"] == pytest.approx(60.0) and alone["tpot_p50_ms"] == pytest.approx(6.0)
    assert found["rows"][MEASURING]["longest_pause_p95_ms"] == pytest.approx(2 * 10.5 * 1.5)
    assert found["times"][MEASURING]["ttft_p95_ms"] == pytest.approx(1.5 * 105 / 110, abs=0.05)
    assert found["times"][WHOLE]["tpot_p50_ms"] == pytest.approx(2.0)
    assert found["rows"]["with"]["requests"] == 22, "those that took turns, and not the whole one"
    for loaded_s, told in ((120.0, "on the loaded one 120 s"), (None, "not to its end in 300 s (round 3)")):
        profiling = {"idle_s": 40.0, "limit_s": 300.0, "loaded_s": loaded_s, "progress": "round 3"}
        say_card(found | {"profiling": profiling})
        assert told in capsys.readouterr().out
    assert "round 0, without" in str(windows[0])
