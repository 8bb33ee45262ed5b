"""Runs one after the other, each on an idle and cooled down service; progress with the time left."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.common.results import MAX_OTHERS_CORES, digits, say
from bench.morph.service import MorphService, Way
from bench.paper.kept import Job, Kept, Row, commit, is_of_another_speed
from bench.paper.ladder import is_needed
from bench.paper.loads import OUTPUT_TOKENS, requests
from bench.paper.run import SLO, PaperRun, run_one
from bench.paper.service import FULL, INT4
from bus.settings import WorkerSettings
from instar.errors import InputError
from instar.replay import files
from instar.replay.card import errors_text
from instar.replay.files import RunFile
from instar.simulate.calibrate import calibration_of
from instar.simulate.calibration import EngineCalibration

COOL_S: Final = 6.0  # at rest before a run
AROUND_S: Final = 14.0  # cooling, the last answers, orders, and reading what happened
AT_ONCE: Final = 64  # requests, to see what a shape can do
CALIBRATION_S: Final = 60.0  # expected, of a session's start and its first measurements
EVENTS: Final = OUTPUT_TOKENS + 1  # of a request: one for each token, and its usage


class Clock:
    """Counts the minutes of a session, which may have an end."""

    def __init__(self, minutes: float = 0.0) -> None:
        """minutes: after which no run begins; 0: no end."""
        self._began, self._minutes = time.monotonic(), minutes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def has(self, seconds: float) -> bool:
        """Return whether so many seconds are left."""
        return not self._minutes or self.seconds + seconds <= 60 * self._minutes

    def say(self, text: str, left_s: float = 0.0) -> None:
        """Print a line with the time so far, and the time left if it is known."""
        minutes, seconds = divmod(round(self.seconds), 60)
        left = f"at most {left_s / 60:.0f} min left" if left_s else ""
        say(f"{minutes:>3}:{seconds:02d}  {left:<20}  {text}")


class Campaign:
    """A service, the prompts of its requests, and the runs so far."""

    def __init__(
        self, service: MorphService, prompts: Sequence[list[int]], kept: Kept, folder: Path, clock: Clock
    ) -> None:
        """folder: of all runs, as `instar bench replay --out` writes them."""
        self.service, self.kept, self.clock = service, kept, clock
        self._prompts, self._folder = prompts, folder

    # ------------------------------------------------------------------------------- what it can do

    def calibrate(
        self, shapes: Sequence[Way] = (), steady: Callable[[float], list[float]] | None = None
    ) -> None:
        """Measure the requests per second of full precision and of all layers in INT4, in the first session.

        Later sessions measure full precision again, to warm up and to tell whether the machine is the same.
        shapes: other ways to measure. steady: returns a load for a rate, which is sent too.
        """
        is_first = "requests_per_s" not in self.kept.found
        ways = [Way(FULL), *shapes, Way(INT4, below=self.service.num_layers)] if is_first else [Way(FULL)]
        rates = {}
        for way in ways:
            name = f"calibration {way.name}" if is_first else "warm-up"
            run = self.send(way, f"{name} at once", [0.0] * AT_ONCE, 90.0)
            whole = run.file.events_per_s[1:-1] or run.file.events_per_s
            rates[way.name] = fmean(whole) / EVENTS
            if is_first and steady:
                self.send(way, f"{name} steady", steady(rates[way.name]), 90.0)
        if is_first:
            self.kept.found["requests_per_s"] = {name: rates[name] for name in (FULL, INT4)}
        session = {"commit": commit(), "full_requests_per_s": digits(rates[FULL])}
        self.kept.found["sessions"].append(session)
        self.kept.write()
        self.clock.say(f"requests/s: {', '.join(f'{name} {rate:.2f}' for name, rate in rates.items())}")

    def calibration(self) -> EngineCalibration:
        """Return the costs of steps in the first measurements. Raises InputError without their runs."""
        return calibration_of(calibration_runs(self._folder), WorkerSettings(), None)

    @property
    def rates(self) -> tuple[float, float]:
        """The requests per second of full precision and of all layers in INT4, in the first session."""
        found = self.kept.found["requests_per_s"]
        return found[FULL], found[INT4]

    # ------------------------------------------------------------------------------- runs

    def do(self, jobs: Sequence[Job], measured: Mapping[str, Callable[[Job], Row]]) -> bool:
        """Do what is not kept yet, each job as its part says. Returns False if the time was up first.

        A way does not climb beyond the rung of the ladder where it exceeded the limit.
        """
        for place, job in enumerate(jobs):
            if not self._is_due(job):
                continue
            if not self.clock.has(expected_s([job])):
                self.clock.say("the time is up; the same command goes on from here")
                return False
            self.kept.add(job, measured[job.part](job))
            left = [one for one in jobs[place + 1 :] if self._is_due(one)]
            self.clock.say(in_a_line(self.kept.rows[-1]), expected_s(left))
        return True

    def _is_due(self, job: Job) -> bool:
        return not self.kept.has(job) and (job.part != "ladder" or is_needed(job, self.kept))

    def send(
        self,
        way: Way,
        name: str,
        times: Sequence[float],
        drain_s: float,
        source: str = "",
        service: MorphService | None = None,
    ) -> PaperRun:
        """Send a load to an idle service and keep the run. Raises InputError if nothing was served."""
        arrivals = requests(times, self._prompts)
        run = run_one(service or self.service, way, name, source, arrivals, drain_s, COOL_S)
        folder = self._folder / re.sub(r"[^a-z0-9.]+", "-", name.lower())
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder, run.file)
        (folder / "texts.json").write_text(json.dumps(run.texts) + "\n")
        if not run.file.summary["served"]:
            errors = errors_text(run.file.summary["errors"])
            raise InputError(f"{name}: no request was served ({errors}); it is in {folder}")
        return run


def calibration_runs(folder: Path) -> list[RunFile]:
    """Return the runs that `Campaign.calibrate` made and kept in `folder`, full precision first."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [files.read(path) for path in paths if path.is_dir() and path.name.startswith("calibration")]
    return sorted(found, key=lambda run: run.name != FULL)


def expected_s(jobs: Sequence[Job]) -> float:
    return sum(job.seconds + AROUND_S for job in jobs)


def in_a_line(one: Row) -> str:
    p95 = f"{one['ttft_s']['p95']:6.2f} s" if one["ttft_s"] else "none"
    more = f", loss {one['loss']:.3%}" if one.get("loss") else ""
    if one["others_cores"] > MAX_OTHERS_CORES:
        more += f", OTHERS TOOK {one['others_cores']:.2f} CORES"
    if is_of_another_speed(one):
        more += f", STEPS TOOK {one['machine_factor']:.2f} TIMES AS LONG AS AT FIRST"
    return (
        f"{one['load']:<24} {one['way']:<21} #{one['repeat']} P95 TTFT {p95}, {one['violations']:>3} of "
        f"{one['requests']:<3} over {SLO.ttft_s:g} s{more}"
    )
