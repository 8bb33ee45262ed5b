"""MorphServe's evaluation (its section 5) at this size, on one engine; docs/evaluation.md tells of it.

    python -m bench.paper [--traces DIR] [--quick] [--out DIR]        (make bench-paper TRACES=DIR)

models/demo in float32, by one real service, with little more memory for its KV cache than a third of its
weights. First, offline, what each way of serving costs in quality. Then the loads: two windows of the Azure
traces and a made-up burst, thinned to what this machine can do now, each sent to every way in turn; then a
ladder of steady rates. Between runs all layers go back to full precision.

Writes bench/results/paper.json, which has every number, the figures beside it, and docs/evaluation.md. With
--quick nothing but what --out says. Every run is kept in --runs too, for `instar bench plot`.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.paper_loads import (
    BUSIEST_S,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    WINDOWS,
    Load,
    all_loads,
    find_trace,
    requests,
    steady,
)
from bench.paper_pyramid import memory_share
from bench.paper_quality import Offline, measure
from bench.paper_report import digits, headlines, load_numbers, offline_numbers, premises, quality, row
from bench.paper_run import SLO, PaperRun, run_one
from bench.paper_service import (
    DEFAULT,
    FULL,
    INT4,
    PERFORMANCE,
    PLAN,
    PLAN_ANY,
    PaperService,
    Way,
    roomy,
    running,
    ways,
)
from bench.quality_setup import DEMO
from instar.replay import files
from instar.replay.problems import BenchProblem
from worker.profile.order import load_order

RESULTS: Final = Path(__file__).with_name("results")
RUNS: Final = Path("build/paper")
PLANS: Final = {PLAN: ("full", "int4"), PLAN_ANY: ("full", "int8", "int4", "int3")}
SPEED: Final = 2.4  # 72 s of a trace are sent in 30
BURST_SHARE: Final = 0.85  # of what all layers in INT4 can do
LEAST_OVERLOAD: Final = 1.25  # of full precision, by the burst
LADDER_WAYS: Final = (FULL, INT4, DEFAULT, PERFORMANCE)
LADDER_FROM, LADDER_TO = 0.7, 1.15  # of what full precision can do, and of what all layers in INT4 can
AT_ONCE: Final = 64  # requests, to see what a shape can do
BETWEEN_S: Final = 9.0  # for the last answers and the way back to full precision, about


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything."""

    speed: float = SPEED
    ladder_steps: int = 5
    ladder_s: float = 14.0
    ladder_drain_s: float = 20.0
    drain_s: float = 60.0
    offline_s: float = 240.0  # expected
    burst: float = 1.0  # of what it should be
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
    """What is done, and how long the rest will take."""

    def __init__(self, left_s: float) -> None:
        self._began = time.monotonic()
        self.left_s = left_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str, done_s: float = 0.0) -> None:
        """`done_s`: of the time expected, what this was."""
        self.left_s -= done_s
        minutes, seconds = divmod(round(self.seconds), 60)
        left = f"{max(0.0, self.left_s) / 60:.0f} min left"
        sys.stdout.write(f"{minutes:>2}:{seconds:02d}  {left:>11}  {text}\n")
        sys.stdout.flush()


@dataclass(slots=True)
class Evaluation:
    """The services, what is known offline, and what was found so far."""

    service: PaperService
    wide: PaperService
    offline: Offline
    size: Size
    clock: Clock
    runs_folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    ladder: list[dict[str, Any]] = field(default_factory=list)

    def calibrate(self) -> dict[str, float]:
        """Requests per second that full precision and all layers in INT4 can do now."""
        found = {}
        times = [0.0] * (AT_ONCE // 2 if self.size.is_quick else AT_ONCE)
        for way in (Way(FULL), Way(INT4, below=self.service.num_layers)):
            run = self._run(way, "calibration", "all at once", times, drain_s=60.0)
            whole = run.file.events_per_s[1:-1] or run.file.events_per_s
            found[way.name] = fmean(whole) / OUTPUT_TOKENS
        full, int4 = found[FULL], found[INT4]
        self.clock.say(f"requests/s: full precision can do {full:.2f}, all layers in INT4 {int4:.2f}")
        return found

    def replay(self, loads: list[Load]) -> None:
        """Each load to every way, beginning with another one each time."""
        order = ways(self.service.num_layers, self.offline.plans)
        for number, load in enumerate(loads):
            first = number * len(order) // len(loads)
            for way in order[first:] + order[:first]:
                run = self._run(way, load.name, load.source, load.times, self.size.drain_s)
                told = quality(run, way, self.offline, self.service.order)
                self.rows.append(row(run) | {"quality": told})
                self.clock.say(in_a_line(self.rows[-1]), load.seconds + BETWEEN_S)
        names = [load.name for load in loads], [way.name for way in order]
        self.rows.sort(key=lambda one: (names[0].index(one["load"]), names[1].index(one["way"])))

    def climb(self, rates: list[float]) -> None:
        """Throughput and TTFT at steady rates."""
        by_name = {way.name: way for way in ways(self.service.num_layers, self.offline.plans)}
        for step, rate in enumerate(rates):
            times = steady(rate, self.size.ladder_s, seed=step)
            for name in LADDER_WAYS:
                where = f"steady, {rate:.2f} requests/s"
                run = self._run(by_name[name], where, "made up", times, self.size.ladder_drain_s)
                self.ladder.append(rung(run, rate, self.size.ladder_s))
                self.clock.say(in_a_line(self.ladder[-1]), self.size.ladder_s + BETWEEN_S)

    def _run(self, way: Way, load: str, source: str, times: list[float], drain_s: float) -> PaperRun:
        """Kept in the folder of runs, too."""
        service = self.wide if way.is_roomy else self.service
        run = run_one(service, way, load, source, requests(times, self.offline.prompts), drain_s)
        folder = self.runs_folder / re.sub(r"[^a-z0-9.]+", "-", f"{load} {way.name}".lower())
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder, run.file)
        (folder / "texts.json").write_text(json.dumps(run.texts) + "\n")
        return run


def rung(run: PaperRun, rate: float, seconds: float) -> dict[str, Any]:
    """One step of the ladder. Tokens per second: while requests were due, without the first third."""
    whole = row(run)
    counted = run.file.events_per_s[int(seconds / 3) : int(seconds)]
    names = ("load", "way", "requests", "served", "ttft_s", "tpot_s", "violations", "others_cores")
    return {name: whole[name] for name in names} | {
        "rate": digits(rate),
        "tokens_per_s": digits(fmean(counted)) if counted else 0.0,
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


def ladder_rates(full: float, int4: float, steps: int) -> list[float]:
    """Requests per second, each the same factor above the one before."""
    low, high = LADDER_FROM * full, LADDER_TO * max(full, int4)
    return [low * (high / low) ** (i / max(1, steps - 1)) for i in range(steps)]


def expected_s(size: Size, num_loads: int) -> float:
    num_ways = len(ways(8, dict.fromkeys(PLANS, ())))
    loads_s = num_loads * num_ways * (72.0 / size.speed + BETWEEN_S)
    return (
        size.offline_s + 40.0 + loads_s + size.ladder_steps * len(LADDER_WAYS) * (size.ladder_s + BETWEEN_S)
    )


def evaluate(traces: Path | None, runs_folder: Path, size: Size) -> dict[str, Any]:
    """Raises BenchProblem."""
    for window in WINDOWS if traces else ():
        find_trace(traces or Path(), window)  # said now rather than after minutes
    clock = Clock(expected_s(size, 1 + (len(WINDOWS) if traces else 0)))
    clock.say("quality, offline: sensitivity of layers, perplexity, continuations")
    order = load_order(DEMO, "profile")[0]
    offline = measure(order, PLANS, is_quick=size.is_quick)
    share = memory_share(offline.kept, PROMPT_TOKENS, OUTPUT_TOKENS)
    clock.say("starting two services, the second with PyramidKV's memory", size.offline_s)
    with ExitStack() as stack:
        service = stack.enter_context(running())
        wide = stack.enter_context(roomy(service, share))
        if service.order != order:
            raise AssertionError(f"the service swaps in the order {service.order}, measured is {order}")
        clock.say(
            f"{service.blocks_at_full} KV blocks at full precision, {wide.blocks_at_full} for PyramidKV; "
            f"layers go {order}"
        )
        found = Evaluation(service, wide, offline, size, clock, runs_folder)
        capacity = found.calibrate()
        full, int4 = capacity[FULL], capacity[INT4]
        burst = max(BURST_SHARE * int4, LEAST_OVERLOAD * full) * size.burst
        loads = all_loads(traces, size.speed, burst, clock.say)
        for load in loads:
            clock.say(
                f"{load.name}: {len(load.times)} of {load.of} requests in {load.seconds:.0f} s; its busiest "
                f"{BUSIEST_S:g} s ask for {load.burst_rate / full:.2f} of full precision, the mean for "
                f"{load.mean_rate / full:.2f}",
                20.0 / len(loads),
            )
        found.replay(loads)
        found.climb(ladder_rates(full, int4, size.ladder_steps))
        blocks = {"full": service.blocks_at_full, "pyramid": wide.blocks_at_full}
    return {
        "bench": "paper",
        "quick": size.is_quick,
        "seconds": round(clock.seconds),
        "settings": {
            "speed": size.speed,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "busiest_s": BUSIEST_S,
            "ttft_limit_s": SLO.ttft_s,
            "order": order,
            "num_layers": len(order),
            "kv_blocks": blocks,
            "capacity_requests_per_s": {name: digits(rate) for name, rate in capacity.items()},
            "ladder_s": size.ladder_s,
        },
        "loads": [load_numbers(load, full) for load in loads],
        "offline": offline_numbers(offline, order),
        "runs": found.rows,
        "ladder": found.ladder,
        "headlines": headlines(found.rows, found.ladder),
        "premises": premises(found.rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder with the two Azure traces of 2023")
    parser.add_argument(
        "--quick", action="store_true", help="a pilot of some minutes; its numbers say nothing"
    )
    parser.add_argument("--out", type=Path, help="folder for paper.json and the figures [bench/results]")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder for every run [{RUNS}]")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without ending what was started
    try:
        result = evaluate(args.traces, args.runs, QUICK if args.quick else Size())
    except BenchProblem as problem:
        sys.stderr.write(f"bench.paper: {problem}\n")
        return 2
    from bench.paper_page import card

    sys.stdout.write(card(result) + "\n")
    out = args.out or (None if args.quick else RESULTS)
    if out is not None:
        keep(result, out, is_page_due=out == RESULTS)
    failed = [one for one in result["premises"] if not one["holds"]]
    sys.stdout.write(json.dumps({"bench": "paper", "seconds": result["seconds"], "failed": failed}) + "\n")
    return 1 if failed else 0


def keep(result: dict[str, Any], out: Path, *, is_page_due: bool) -> None:
    from bench.paper_page import PAGE, regenerated
    from bench.paper_picture import draw_all

    out.mkdir(parents=True, exist_ok=True)
    (out / "paper.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    written = [out / "paper.json", *draw_all(result, out)]
    if is_page_due:
        PAGE.write_text(regenerated(PAGE.read_text(), result))
        written.append(PAGE)
    sys.stdout.write("wrote " + ", ".join(str(path) for path in written) + "\n")


if __name__ == "__main__":
    sys.exit(main())
