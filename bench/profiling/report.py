"""The numbers of `bench.profiling`: what requests get beside a profile, over what they get without it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.engine.offline import say
from bench.morph.load import Stream
from instar.replay.statistics import percentile

WITHOUT: Final = "without"
LOADING: Final = "from the beginning"  # cut, embedding and head are read, and made in every precision
MEASURING: Final = "rounds"  # dummy requests
WHOLE: Final = "whole"  # one profile from its beginning to its end
BESIDE: Final = (LOADING, MEASURING)  # what takes turns with the load alone
QUANTITIES: Final = ("ttft", "tpot", "longest_pause")  # seconds of each request
MOST_OTHERS_CORES: Final = 0.2  # that other programs may take


@dataclass(frozen=True, slots=True)
class Window:
    """A script that was played, and what ran beside it. `others_cores`: what programs other than the service
    and its client kept busy."""

    beside: str
    round: int
    streams: Sequence[Stream]
    others_cores: float

    def __str__(self) -> str:
        told = summary([self])
        return (
            f"round {self.round}, {self.beside:<18} {len(self.streams):>3} requests: TTFT P50"
            f" {told['ttft_p50_ms']:.1f} ms, P95 {told['ttft_p95_ms']:.1f} ms, TPOT {told['tpot_p50_ms']:.2f}"
            f" and {told['tpot_p95_ms']:.2f} ms, others {self.others_cores:.2f} cores"
        )


def summary(windows: Sequence[Window]) -> dict[str, float]:
    """Milliseconds over the requests of all of them."""
    streams = [stream for one in windows for stream in one.streams]
    found: dict[str, float] = {"requests": len(streams)}
    for name in QUANTITIES:
        seconds = sorted(getattr(stream, f"{name}_s") for stream in streams)
        for percent in (50, 95):
            found[f"{name}_p{percent}_ms"] = round(1e3 * percentile(seconds, percent), 3)
    return found


def report(windows: Sequence[Window]) -> dict[str, Any]:
    """`rows` by what ran beside the load, `times` that of the load alone: of windows that took turns, and of
    the whole profile, which came behind them."""
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
        told = [
            f"{name.replace('_', ' ')} {row[f'{name}_p50_ms']:.2f} and {row[f'{name}_p95_ms']:.2f} ms"
            + (f" ({times[f'{name}_p50_ms']:.2f} and {times[f'{name}_p95_ms']:.2f} times)" if times else "")
            for name in QUANTITIES
        ]
        say(f"{kind:<18}{row['requests']:>5} requests, P50 and P95: {', '.join(told)}")
    profiling = found["profiling"]
    if profiling["idle_s"]:
        loaded = profiling["loaded_s"]
        unended = f"not to its end in {profiling['limit_s']:.0f} s ({profiling['progress']})"
        ended = f"{loaded:.0f} s" if loaded else unended
        say(f"a profile took {profiling['idle_s']:.0f} s on the idle worker, on the loaded one {ended}")
    if found["others_cores"] > MOST_OTHERS_CORES:
        say(f"other programs took {found['others_cores']} cores: run it on an idle machine")
