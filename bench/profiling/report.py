"""The numbers of `bench.profiling`: what requests get beside a profile, over what they get without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.common.results import busy_lines, say
from instar.replay.outcomes import RequestOutcome
from instar.replay.statistics import percentile

WITHOUT: Final = "without"
LOADING: Final = "from the beginning"  # reads cut, embedding and head, and makes every precision
MEASURING: Final = "rounds"  # dummy requests
WHOLE: Final = "whole"  # one profile from its beginning to its end
BESIDE: Final = (LOADING, MEASURING)  # phases that take turns with the load alone
QUANTITIES: Final = ("ttft", "tpot", "longest_pause")  # seconds of each request


@dataclass(frozen=True, slots=True)
class ProfilingWindow:
    """A script that was played, and what ran beside it; `others_cores` is what other programs kept busy."""

    beside: str
    round: int
    outcomes: Sequence[RequestOutcome]
    others_cores: float

    def __str__(self) -> str:
        ms = summary([self])
        return (
            f"round {self.round}, {self.beside:<18} {len(self.outcomes):>3} requests: TTFT P50"
            f" {ms['ttft_p50_ms']:.1f} ms, P95 {ms['ttft_p95_ms']:.1f} ms, TPOT {ms['tpot_p50_ms']:.2f}"
            f" and {ms['tpot_p95_ms']:.2f} ms, others {self.others_cores:.2f} cores"
        )


def summary(windows: Sequence[ProfilingWindow]) -> dict[str, float]:
    """Return percentiles over the requests of all windows, in milliseconds."""
    outcomes = [outcome for one in windows for outcome in one.outcomes]
    found: dict[str, float] = {"requests": len(outcomes)}
    for name in QUANTITIES:
        seconds = sorted(getattr(one, f"{name}_s") for one in outcomes)
        for percent in (50, 95):
            found[f"{name}_p{percent}_ms"] = round(1e3 * percentile(seconds, percent), 3)
    return found


def report(windows: Sequence[ProfilingWindow]) -> dict[str, Any]:
    """Return `rows` by what ran beside the load, and `times`: each over that of the load alone.

    There is a row of the windows that took turns, and one of the whole profile, which was measured after
    them.
    """
    kinds = list(dict.fromkeys(one.beside for one in windows))
    rows = {kind: summary([one for one in windows if one.beside == kind]) for kind in kinds}
    by_turns = [one for one in windows if one.beside in BESIDE]
    if by_turns:
        rows["with"] = summary(by_turns)
    alone = rows[WITHOUT]
    return {
        "rows": rows,
        "times": {
            kind: {name: round(row[name] / alone[name], 3) for name in row if name != "requests"}
            for kind, row in rows.items()
            if kind != WITHOUT
        },
        "others_cores": round(statistics.median(one.others_cores for one in windows), 2),
    }


def say_card(found: dict[str, Any]) -> None:
    for kind, row in found["rows"].items():
        times = found["times"].get(kind)
        quantities = [
            f"{name.replace('_', ' ')} {row[f'{name}_p50_ms']:.2f} and {row[f'{name}_p95_ms']:.2f} ms"
            + (f" ({times[f'{name}_p50_ms']:.2f} and {times[f'{name}_p95_ms']:.2f} times)" if times else "")
            for name in QUANTITIES
        ]
        say(f"{kind:<18}{row['requests']:>5} requests, P50 and P95: {', '.join(quantities)}")
    profiling = found["profiling"]
    if profiling["idle_s"]:
        loaded = profiling["loaded_s"]
        unended = f"not to its end in {profiling['limit_s']:.0f} s ({profiling['progress']})"
        ended = f"{loaded:.0f} s" if loaded else unended
        say(f"a profile took {profiling['idle_s']:.0f} s on the idle worker, on the loaded one {ended}")
    for line in busy_lines(found["others_cores"]):
        say(line)
