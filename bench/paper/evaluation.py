"""The evaluation as it runs: every load to every way, then a ladder of steady rates."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.common.results import digits
from bench.morph.service import MorphService, Way
from bench.paper.loads import OUTPUT_TOKENS, Load, requests, steady
from bench.paper.quality import Offline
from bench.paper.report import quality, row
from bench.paper.run import SLO, PaperRun, run_one
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE, ways
from instar.errors import InputError
from instar.replay import files
from instar.replay.card import errors_text

SPEED: Final = 2.4  # 72 s of a trace are sent in 30
LADDER_WAYS: Final = (FULL, INT4, DEFAULT, PERFORMANCE)
EVENTS: Final = OUTPUT_TOKENS + 1  # of a request: one for each token, and its usage
AT_ONCE: Final = 64  # requests, to see what a shape can do
BETWEEN_S: Final = 9.0  # for the last answers and the way back to full precision, about


@dataclass(frozen=True, slots=True)
class Size:
    """The size of an evaluation."""

    speed: float = SPEED
    ladder_steps: int = 6
    ladder_s: float = 14.0
    ladder_drain_s: float = 20.0
    drain_s: float = 60.0
    offline_s: float = 200.0  # expected
    burst: float = 1.0  # times the usual burst
    is_quick: bool = False


QUICK: Final = Size(
    speed=14.4,
    ladder_steps=2,
    ladder_s=4.0,
    ladder_drain_s=8.0,
    offline_s=40.0,
    burst=0.5,
    is_quick=True,
)


class Clock:
    """Reports what is done, and how long the rest will take."""

    def __init__(self, left_s: float) -> None:
        self._began = time.monotonic()
        self.left_s = left_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str, done_s: float = 0.0) -> None:
        """Print a line; `done_s` of the expected time is over."""
        self.left_s -= done_s
        minutes, seconds = divmod(round(self.seconds), 60)
        left = f"{max(0.0, self.left_s) / 60:.0f} min left"
        sys.stdout.write(f"{minutes:>2}:{seconds:02d}  {left:>11}  {text}\n")
        sys.stdout.flush()


@dataclass(slots=True)
class Evaluation:
    """The services, the offline quality, and the results so far."""

    service: MorphService
    wide: MorphService
    offline: Offline
    size: Size
    clock: Clock
    runs_folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    ladder: list[dict[str, Any]] = field(default_factory=list)

    def calibrate(self) -> dict[str, float]:
        """Return the requests per second that full precision and all layers in INT4 can do now."""
        found = {}
        times = [0.0] * (AT_ONCE // 2 if self.size.is_quick else AT_ONCE)
        for way in (Way(FULL), Way(INT4, below=self.service.num_layers)):
            run = self._run(way, "calibration", "all at once", times, drain_s=60.0)
            whole = run.file.events_per_s[1:-1] or run.file.events_per_s
            found[way.name] = fmean(whole) / EVENTS
        full, int4 = found[FULL], found[INT4]
        self.clock.say(f"requests/s: full precision can do {full:.2f}, all layers in INT4 {int4:.2f}")
        return found

    def replay(self, loads: list[Load]) -> None:
        """Send each load to every way, each time beginning with another way."""
        order = ways(self.service.num_layers, self.offline.plans)
        for number, load in enumerate(loads):
            first = number * len(order) // len(loads)
            for way in order[first:] + order[:first]:
                run = self._run(way, load.name, load.source, load.times, self.size.drain_s)
                found = quality(run, way, self.offline, self.service.order)
                self.rows.append(row(run) | {"quality": found})
                self.clock.say(in_a_line(self.rows[-1]), load.seconds + BETWEEN_S)
        names = [load.name for load in loads], [way.name for way in order]
        self.rows.sort(key=lambda one: (names[0].index(one["load"]), names[1].index(one["way"])))

    def climb(self, rates: list[float]) -> None:
        """Measure throughput and TTFT at steady rates."""
        by_name = {way.name: way for way in ways(self.service.num_layers, self.offline.plans)}
        for step, rate in enumerate(rates):
            times = steady(rate, self.size.ladder_s, seed=step)
            for name in LADDER_WAYS:
                where = f"steady, {rate:.2f} requests/s"
                run = self._run(by_name[name], where, "made up", times, self.size.ladder_drain_s)
                self.ladder.append(rung(run, rate, self.size.ladder_s))
                self.clock.say(in_a_line(self.ladder[-1]), self.size.ladder_s + BETWEEN_S)

    def _run(self, way: Way, load: str, source: str, times: list[float], drain_s: float) -> PaperRun:
        """Run a load and keep it in the folder of runs. Raises InputError if nothing was served."""
        service = self.wide if way.is_roomy else self.service
        run = run_one(service, way, load, source, requests(times, self.offline.prompts), drain_s)
        folder = self.runs_folder / re.sub(r"[^a-z0-9.]+", "-", f"{load} {way.name}".lower())
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder, run.file)
        (folder / "texts.json").write_text(json.dumps(run.texts) + "\n")
        if not run.file.summary["served"]:
            errors = errors_text(run.file.summary["errors"])
            raise InputError(f"{load}, {way.name}: no request was served ({errors}); it is in {folder}")
        return run


def rung(run: PaperRun, rate: float, seconds: float) -> dict[str, Any]:
    """Return one step of the ladder; tokens per second while requests were due, without the first third."""
    whole = row(run)
    counted = run.file.events_per_s[int(seconds / 3) : int(seconds)]
    names = ("load", "way", "requests", "served", "ttft_s", "tpot_s", "violations", "others_cores")
    return {name: whole[name] for name in names} | {
        "rate": digits(rate),
        "tokens_per_s": digits(fmean(counted) * OUTPUT_TOKENS / EVENTS) if counted else 0.0,
    }


def in_a_line(one: dict[str, Any]) -> str:
    p95 = f"{one['ttft_s']['p95']:6.2f} s" if one["ttft_s"] else "none"
    tpot = f"{1e3 * one['tpot_s']['mean']:.1f} ms" if one["tpot_s"] else "none"
    more = ""
    if "quality" in one:
        like = one["quality"]["against_full"]
        more = f", KV at most {one['kv_blocks_peak']}, F1 {like['f1']:.1f}, {len(one['morphs'])} morphs"
    return (
        f"{one['load']:<24} {one['way']:<21} P95 TTFT {p95}, {one['violations']:>3} of {one['requests']:<3} "
        f"over {SLO.ttft_s:g} s, TPOT {tpot}{more}"
    )
