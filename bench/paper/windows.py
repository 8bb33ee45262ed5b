"""Ten windows of 60 s of real traces, at their own speed, against four ways of serving; a ladder of rates.

    python -m bench.paper windows --traces DIR [--minutes N] [--size 30M] [--only N]
                                  [--windows code:792,conv:504]      (make bench-windows TRACES=DIR)

The windows are chosen before any run, by `choose`: of the code trace the burstiest, of the conversation trace
the fullest. Requests per second of full precision and of all layers in INT4 are measured first. Each window
is thinned until nobody would wait for more than a second at the rate of INT4. If then nobody would wait for
3 s at the rate of full precision, the next window takes its place. All requests have 128 tokens and are asked
for 64. Each repeat is a pass over all windows, every window sent to all ways in turn, then a ladder of steady
rates of 60 s each, which a way climbs until its P95 TTFT exceeds the limit. Before each run the service is
idle, at full precision, and has been so for COOL_S.

The service has one worker. The model `demo` is trained; those of other sizes have random weights: the step of
a larger model is bound by memory, so that more KV blocks mean more tokens a second. A dummy with as many
layers as `demo` has its profiles, since random weights have no quality of their own. The loss of a run is
predicted for its shapes, weighted by the tokens; --out says by which profile, or that it is assumed.

A machine that is shared does not keep its speed. The steps of the first measurements give a calibration, and
each run says how many times as long as by that its steps took. Loads are thinned for the speed of the first
measurements: --redo-disturbed repeats the runs on a machine more than a tenth slower or faster.

Every run is added to --out when it ends. The same command goes on with what is missing, also with more
windows or repeats. At the end of each session the bars are judged by the runs so far, and the page written.
"""

from __future__ import annotations

import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench.common.dummy_model import model_folder
from bench.common.load import VOCABULARY
from bench.common.results import DEMO, RESULTS, digits, parser, say
from bench.morph.service import BUDGET_MB, MorphService, Way
from bench.paper.campaign import Campaign, Clock
from bench.paper.choice import (
    NUM_CODE,
    NUM_CONVERSATION,
    SECONDS,
    TraceWindow,
    choose,
    is_fit,
    thinned_for,
    windows_of,
)
from bench.paper.kept import Job, Kept, Row, turned
from bench.paper.ladder import rates_of, rung_numbers, rungs_of
from bench.paper.loads import OUTPUT_TOKENS, PROMPT_TOKENS, WINDOWS, find_trace
from bench.paper.reflex import LossTable, lend_profiles, loss_table, observed
from bench.paper.report import row
from bench.paper.run import PaperRun
from bench.paper.service import DEFAULT, FULL, INT4, INT8, PERFORMANCE, STATIC_2
from bench.paper.verdict import BACK_S, Verdict, judge
from bench.paper.windows_plot import draw
from instar.errors import InputError
from instar.replay.traces import Shaping, load
from instar.simulate.calibration import EngineCalibration
from instar.simulate.fitting import machine_factor

DRAIN_S: Final = 60.0
STEADY_SHARE, STEADY_S = 0.7, 25.0  # of what it can do, for so long: a load for the simulator's calibration
NUM_WINDOWS: Final = NUM_CODE + NUM_CONVERSATION
NUM_PROMPTS: Final = 1024  # more than any window has requests, so that none finds another's prefix
# Memory for 50 to 70 KV blocks beside full weights, in MiB.
BUDGETS: Final = {"demo": BUDGET_MB, "30M": 125, "100M": 410}


# --------------------------------------------------------------------------- the bench


@contextmanager
def service_of(size: str) -> Iterator[MorphService]:
    """Start the service with a model of this size."""
    with ExitStack() as stack:
        folder = DEMO
        if size != "demo":
            folder = stack.enter_context(model_folder(size))
            lend_profiles(folder)
        service = MorphService(BUDGETS[size])
        service.model = folder
        yield stack.enter_context(service)


def ways_of(num_layers: int) -> list[Way]:
    return [
        Way(FULL),
        Way(INT4, below=num_layers),
        Way(STATIC_2, below=num_layers // 2),
        Way(DEFAULT, mode="default"),
        Way(PERFORMANCE, mode="performance"),
    ]


def random_prompts(num: int) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(VOCABULARY, k=PROMPT_TOKENS) for _ in range(num)]


def poisson(rate: float, seconds: float) -> list[float]:
    """Return arrivals at random with this mean rate, always the same ones."""
    rng, at_s, times = random.Random(0), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        times.append(at_s)
    return times


class WindowRuns:
    """The windows that fit what the service can do, and their runs."""

    def __init__(
        self, campaign: Campaign, ways: Sequence[Way], losses: LossTable, calibration: EngineCalibration
    ) -> None:
        """calibration: of the machine when the loads were chosen."""
        self.campaign, self.ways, self.losses, self._calibration = campaign, ways, losses, calibration
        self.chosen: list[tuple[TraceWindow, list[float]]] = []

    def choose(self, candidates: Sequence[TraceWindow], num: int, *, are_named: bool) -> None:
        """Take the first windows that fit, or that the caller named. Raises InputError if there are none."""
        full, int4 = self.campaign.rates
        loads = [(one, thinned_for(one.times, int4)) for one in candidates]
        fit = loads if are_named else [one for one in loads if is_fit(one[1], full)]
        self.chosen = fit[:num]
        if not self.chosen:
            raise InputError(
                f"none of {len(loads)} windows saturates full precision, which serves {full:.2f} requests/s; "
                f"all layers in INT4 serve {int4:.2f}, and windows are thinned to that: with these traces "
                "the model is too fast or gains too little; take a larger --size"
            )
        if len(self.chosen) < num:
            say(f"only {len(self.chosen)} of the {num} windows that were asked for are fit")
        told = ", ".join(f"{one.name} ({len(times)} of {len(one.times)})" for one, times in self.chosen)
        say(f"windows: {told}")

    def jobs(self, parts: Sequence[str], repeats: int) -> list[Job]:
        """Return all runs, repeat by repeat: each window to all ways, every time from another one; rungs."""
        senders = [way for way in self.ways if way.name != STATIC_2]
        rates, found = rates_of(*self.campaign.rates), list[Job]()
        for repeat in range(repeats):
            if "loads" in parts:
                found += [
                    Job("loads", window.name, way, repeat, times, SECONDS + BACK_S, DRAIN_S, window.name)
                    for number, (window, times) in enumerate(self.chosen)
                    for way in turned(senders, number + repeat)
                ]
            if "ladder" in parts:
                found += rungs_of(self.ways, rates, repeat)
        return found

    def measured(self, job: Job) -> Row:
        """Send a window to one way and return what came of it."""
        service, since_s = self.campaign.service, time.time()
        run = self.campaign.send(job.way, f"{job.load} {job.way.name} {job.repeat}", job.times, job.drain_s)
        time.sleep(BACK_S if job.way.mode != "manual" else 0.0)
        found = row(run) | {"mode": job.way.mode}
        found.pop("series")
        return found | self._speed(run) | observed(service, run, self.losses, since_s)

    def climbed(self, job: Job) -> Row:
        """Send one rung of the ladder to one way."""
        name = f"ladder {job.rate:.2f} {job.way.name} {job.repeat}"
        run = self.campaign.send(job.way, name, job.times, job.drain_s)
        return rung_numbers(job, row(run), run.file.events_per_s) | self._speed(run)

    def _speed(self, run: PaperRun) -> Row:
        return {"machine_factor": digits(machine_factor(run.file, self._calibration))}


def options() -> Namespace:
    found = parser(__doc__)
    found.add_argument("--traces", type=Path, required=True, help="folder of the two Azure traces of 2023")
    found.add_argument("--size", default="30M", choices=sorted(BUDGETS), help="of the model [30M]")
    found.add_argument("--only", type=int, default=NUM_WINDOWS, help=f"so many windows [{NUM_WINDOWS}]")
    found.add_argument("--repeats", type=int, default=3, help="of each run [3]")
    found.add_argument("--ways", default="", help="these alone, as in 'full precision,default mode'")
    found.add_argument("--windows", default="", help="these instead, as in code:792,conv:504")
    found.add_argument("--parts", default="loads,ladder", help="loads or ladder alone [loads,ladder]")
    found.add_argument("--minutes", type=float, default=0.0, help="no run begins after these [no end]")
    found.add_argument(
        "--redo-disturbed",
        action="store_true",
        help="repeat runs on a machine that was busy or of another speed",
    )
    found.add_argument("--keep", type=Path, help="folder for all runs [build/windows-SIZE]")
    found.add_argument("--out", type=Path, help="the results [bench/results/windows.json]")
    return found.parse_args()


def main() -> int:
    args = options()
    try:
        return measure(args)
    except InputError as error:
        sys.stderr.write(f"bench.paper windows: {error}\n")
        return 2


def measure(args: Namespace) -> int:
    """Run what is missing, judge it, and write JSON, picture and page. Raises InputError."""
    candidates = _candidates(args.traces, args.windows)
    out = args.out or RESULTS / "windows.json"
    plan = {"size": args.size, "windows": args.windows}
    kept = Kept(out, plan, redo_disturbed=args.redo_disturbed)
    clock = Clock(args.minutes)
    with service_of(args.size) as service:
        ways = _chosen_ways(service.num_layers, args.ways)
        losses = loss_table(service.model, service.num_layers)
        folder = args.keep or Path("build") / f"windows-{args.size}"
        campaign = Campaign(service, random_prompts(NUM_PROMPTS), kept, folder, clock)
        campaign.calibrate(
            [Way(INT8, plan=("int8",) * service.num_layers)],
            lambda rate: poisson(STEADY_SHARE * rate, STEADY_S),
        )
        runs = WindowRuns(campaign, ways, losses, campaign.calibration())
        runs.choose(candidates, args.only, are_named=bool(args.windows))
        kept.found |= {
            "bench": "windows",
            "wanted": args.only,
            "windows": kept.found.get("windows", {})
            | {one.name: [len(times), len(one.times)] for one, times in runs.chosen},
            "kv_blocks_at_full": service.blocks_at_full,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "losses": {"judged_by": losses.source, "of_int4": digits(losses.of_int4)},
        }
        jobs = runs.jobs(args.parts.split(","), args.repeats)
        is_done = campaign.do(jobs, {"loads": runs.measured, "ladder": runs.climbed})
    verdicts = conclude(kept)
    return 0 if is_done and all(one.is_met for one in verdicts) else 1


def conclude(kept: Kept) -> list[Verdict]:
    """Judge the runs so far, and write them, their picture and the page."""
    verdicts = judge(kept.of("loads"), kept.of("ladder"), kept.found["losses"])
    kept.found["bars"] = [one.as_json() for one in verdicts]
    kept.write()
    if kept.of("loads"):
        draw(kept.of("loads"), kept.path.with_suffix(".png"))
    if kept.path.parent == RESULTS:
        from bench.paper.page import write_pages

        write_pages()
    for one in verdicts:
        say(f"{one.word:<12}  {one.bar}: {one.found}")
    return verdicts


def _chosen_ways(num_layers: int, names: str) -> list[Way]:
    """Return the ways of these names, or all. Raises InputError."""
    ways = {way.name: way for way in ways_of(num_layers)}
    wanted = names.split(",") if names else list(ways)
    if unknown := [name for name in wanted if name not in ways]:
        raise InputError(f"--ways {unknown[0]}: there are {', '.join(ways)}")
    return [ways[name] for name in wanted]


def _candidates(folder: Path, wanted: str) -> list[TraceWindow]:
    """Return the windows in the order of the rule, or the wanted ones. Raises InputError."""
    all_times = {}
    for trace, window in zip(("code", "conv"), WINDOWS, strict=True):
        path = find_trace(folder, window)
        all_times[trace] = [one.at_s for one in load(str(path), "auto", Shaping()).arrivals]
    if not wanted:
        return choose(windows_of("code", all_times["code"]), windows_of("conv", all_times["conv"]))
    found = []
    for name in wanted.split(","):
        trace, _, start = name.partition(":")
        try:
            start_s = float(start)
            of = all_times[trace]
        except (ValueError, KeyError):
            raise InputError(f"{name}: a window is written as code:SECONDS or conv:SECONDS") from None
        times = [at_s - start_s for at_s in of if start_s <= at_s < start_s + SECONDS]
        if len(times) < 2:
            raise InputError(f"{name}: the trace has {len(times)} requests there; it ends at {of[-1]:.0f} s")
        found.append(TraceWindow(trace, start_s, times))
    return found
