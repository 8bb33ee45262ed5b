"""The runs of the paper's evaluation: every load to every way, then a ladder of steady rates, in repeats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.morph.service import MorphService, Way
from bench.paper.campaign import Campaign
from bench.paper.kept import Job, Row, turned
from bench.paper.ladder import RUNG_S, RUNGS, rates_of, rung_numbers, rungs_of
from bench.paper.loads import Load
from bench.paper.quality import Offline
from bench.paper.reflex import LossTable, observed
from bench.paper.report import quality, row
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE, STATIC_2

LADDER_WAYS: Final = (FULL, INT4, STATIC_2, DEFAULT, PERFORMANCE)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of an evaluation."""

    speed: float = 1.0  # 2: 72 s of a trace are sent in 36
    rungs: int = RUNGS
    rung_s: float = RUNG_S
    drain_s: float = 60.0
    repeats: int = 3
    burst: float = 1.0  # times the usual burst
    is_quick: bool = False


QUICK: Final = Size(speed=14.4, rungs=2, rung_s=4.0, drain_s=20.0, repeats=1, burst=0.5, is_quick=True)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The ways, and what is known before their runs. `offline` and `wide`: of the demo model alone."""

    campaign: Campaign
    ways: Sequence[Way]
    losses: LossTable
    size: Size
    offline: Offline | None = None
    wide: MorphService | None = None  # with the memory that PyramidKV would save

    def do(self, loads: Sequence[Load], parts: Sequence[str], repeats: int) -> bool:
        """Do what is not kept yet. Returns False if the time was up first."""
        jobs = self.jobs(loads, parts, repeats or self.size.repeats)
        return self.campaign.do(jobs, {"loads": self.measured, "ladder": self.climbed})

    def jobs(self, loads: Sequence[Load], parts: Sequence[str], repeats: int) -> list[Job]:
        """Return all runs, repeat by repeat: each load to all ways, every time from another one; rungs."""
        size, found = self.size, list[Job]()
        climbers = [way for way in self.ways if way.name in LADDER_WAYS]
        rates = rates_of(*self.campaign.rates, size.rungs)
        for repeat in range(repeats):
            if "loads" in parts:
                found += [
                    Job("loads", load.name, way, repeat, load.times, load.seconds, size.drain_s, load.source)
                    for number, load in enumerate(loads)
                    for way in turned(self.ways, number * len(self.ways) // len(loads) + repeat)
                ]
            if "ladder" in parts:
                found += rungs_of(climbers, rates, repeat, size.rung_s)
        return found

    def measured(self, job: Job) -> Row:
        """Send a load to one way and return what came of it; only the first repeat has series."""
        service, since_s = self.wide if job.way.is_roomy else None, time.time()
        name = f"{job.load} {job.way.name} {job.repeat}"
        run = self.campaign.send(job.way, name, job.times, job.drain_s, job.source, service)
        seen = observed(service or self.campaign.service, run, self.losses, since_s)
        found = row(run) | {name: seen[name] for name in ("loss", "first_blocks")}
        if job.repeat:
            found.pop("series")
        if self.offline:
            order = self.campaign.service.order
            found["quality"] = quality(run, job.way, self.offline, order, seen["loss"])
        return found

    def climbed(self, job: Job) -> Row:
        """Send one rung of the ladder to one way."""
        name = f"ladder {job.rate:.2f} {job.way.name} {job.repeat}"
        run = self.campaign.send(job.way, name, job.times, job.drain_s)
        return rung_numbers(job, row(run), run.file.events_per_s)
