"""Ten windows of 60 s of real traces, at their own speed, against four ways of serving.

    python -m bench.paper windows --traces DIR [--size 30M] [--only N] [--windows code:792,conv:504]
                                                           (make bench-windows TRACES=DIR)

The windows are chosen before any run, by `choose`: of the code trace the burstiest, of the conversation trace
the fullest. Requests per second of full precision and of all layers in INT4 are measured first. Each window
is thinned until nobody would wait for more than a second at the rate of INT4. If then nobody would wait for
3 s at the rate of full precision, the next window takes its place. All requests have 128 tokens and are asked
for 64. Before each run the service is idle, at full precision, and has been so for COOL_S.

The service has one worker. The model `demo` is trained; those of other sizes have random weights: the step of
a larger model is bound by memory, so that more KV blocks mean more tokens a second. The loss of a run is that
which the model's profile predicts for its shapes (or what is assumed without one), weighted by the tokens.

Every run is added to --out when it ends. At the end a table judges the runs against bars.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.common.dummy_model import CONFIGS, model_folder
from bench.common.load import VOCABULARY
from bench.common.results import DEMO, RESULTS, digits, parser, say
from bench.morph.service import BUDGET_MB, MorphService, Way
from bench.paper.choice import SECONDS, TraceWindow, choose, is_fit, thinned_for, windows_of
from bench.paper.evaluation import EVENTS, Clock
from bench.paper.loads import WINDOWS, find_trace, requests
from bench.paper.report import kv_numbers, row
from bench.paper.run import PaperRun, run_one
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE
from bench.paper.verdict import BACK_S, judge
from bench.paper.windows_plot import draw
from bus.messages import PARTS, Event, InstanceTelemetry, WorkerTelemetry
from bus.names import Names
from bus.precisions import DEFAULT_SWAP, QUANTIZED, Precision
from instar.errors import InputError
from instar.replay import files
from instar.replay.traces import Shaping, load
from worker.engine.shape import precision_of
from worker.model.config import read_config
from worker.morph.losses import Losses, losses_of
from worker.morph.plan import Half
from worker.shape.layer_order import half_losses

COOL_S: Final = 6.0
DRAIN_S: Final = 60.0
AT_ONCE: Final = 64  # requests, to see what a shape can do
STEADY_SHARE, STEADY_S = 0.7, 25.0  # of what it can do, for so long: a load for the simulator's calibration
# Memory for 50 to 70 KV blocks beside full weights, in MiB.
BUDGETS: Final = {"demo": BUDGET_MB, "30M": 125, "100M": 410}


# --------------------------------------------------------------------------- one run


def observed(service: MorphService, run: PaperRun, losses: Losses, since_s: float) -> dict[str, Any]:
    """Return what the reflex did in a run, from the bus: its decisions, the loss, and the way back."""
    began_s = run.file.about["began_at"]
    reports = [
        (report.at_ms / 1e3, report.instances[0])
        for report in service.messages(Names().telemetry, WorkerTelemetry, since_s)
    ]
    decided = [
        event
        for event in service.messages(Names().events, Event, since_s)
        if event.kind == "morph_decided" and event.morph_id.startswith("reflex-")
    ]
    numbers = {report.id: report.numbers for report in service.morphs(since_s)}
    is_first, first_blocks = True, []
    for event in decided:
        if event.cause == "ease":
            is_first = True
        elif is_first and event.morph_id in numbers:
            is_first = False
            took_s = numbers[event.morph_id].get("blocks_seconds", 0.0)
            first_blocks.append(event.numbers["waited_s"] + took_s)
    pressed = [event.at_ms / 1e3 for event in decided if event.cause != "ease"]
    pressed += [at_s for at_s, one in reports if one.kv_used > 0.85 * one.kv_blocks]
    below = [at_s for at_s, one in reports if losses.total(_halves(one)) > 0]
    return {
        "loss": digits(mean_loss([one for _, one in reports], losses)),
        "first_blocks_s": [round(value, 3) for value in first_blocks],
        "back_after_s": round(max(below) - max(pressed), 2) if below and pressed else 0.0,
        "is_back": losses.total(_halves(reports[-1][1])) == 0,
        "decisions": [
            {"at_s": round(event.at_ms / 1e3 - began_s, 2), "cause": event.cause, "reason": event.reason}
            for event in decided
        ],
    }


def mean_loss(reports: Sequence[InstanceTelemetry], losses: Losses) -> float:
    """Return the predicted loss of the shapes, weighted by the tokens that were generated in each."""
    total, tokens = 0.0, 0
    for before, after in itertools.pairwise(reports):
        made = max(0, after.generation_tokens - before.generation_tokens)
        total += made * losses.total(_halves(after))
        tokens += made
    return total / tokens if tokens else 0.0


def _halves(one: InstanceTelemetry) -> dict[Half, Precision]:
    return {Half(i, part): precision_of(layer, part) for i, layer in enumerate(one.layers) for part in PARTS}


# --------------------------------------------------------------------------- the bench


@contextmanager
def service_of(size: str) -> Iterator[MorphService]:
    """Start the service with a model of this size."""
    with ExitStack() as stack:
        folder = DEMO if size == "demo" else stack.enter_context(model_folder(size))
        service = MorphService(BUDGETS[size])
        service.model = folder
        yield stack.enter_context(service)


class Bench:
    """The service, what it can do, and the runs so far."""

    def __init__(self, service: MorphService, clock: Clock, out: Path, keep: Path | None = None) -> None:
        """keep: a folder for the runs, as `instar bench replay --out` writes them."""
        self._service, self._clock, self._out, self._keep = service, clock, out, keep
        rng = random.Random(0)
        self._prompts = [rng.choices(VOCABULARY, k=128) for _ in range(64)]
        measured = half_losses(read_config(service.model), QUANTIZED) if service.model == DEMO else {}
        self.losses = losses_of(service.num_layers, QUANTIZED, measured)
        self.rows: list[dict[str, Any]] = []
        everything: dict[Half, Precision] = dict.fromkeys(self.losses.shares, DEFAULT_SWAP)
        self.loss_of_int4 = self.losses.total(everything)

    def calibrate(self) -> tuple[float, float]:
        """Return the requests per second of full precision and of all layers in INT4.

        If the runs are kept, those of INT8 and of a load below saturation are made too, for the simulator.
        """
        num_layers = self._service.num_layers
        ways = [Way(FULL), Way(INT4, below=num_layers)]
        if self._keep:
            ways.insert(1, Way("static INT8", plan=("int8",) * num_layers))
        found = []
        for way in ways:
            run = self._send([0.0] * AT_ONCE, way, f"calibration {way.name} at once", 90.0)
            whole = run.file.events_per_s[1:-1] or run.file.events_per_s
            found.append(fmean(whole) / EVENTS)
            if self._keep:
                times = poisson(STEADY_SHARE * found[-1], STEADY_S)
                self._send(times, way, f"calibration {way.name} steady", 90.0)
        self._clock.say(
            f"requests/s: full precision can do {found[0]:.2f}, all layers in INT4 {found[-1]:.2f}"
        )
        return found[0], found[-1]

    def _send(self, times: Sequence[float], way: Way, name: str, drain_s: float) -> PaperRun:
        run = run_one(self._service, way, name, "", requests(times, self._prompts), drain_s)
        if self._keep:
            folder = self._keep / name.replace(" ", "-").replace(":", "-")
            folder.mkdir(parents=True, exist_ok=True)
            files.write(folder, run.file)
        return run

    def run(self, window: TraceWindow, times: list[float], way: Way, repeat: int) -> None:
        """Send a window to one way and keep what came of it."""
        service = self._service
        service.use(Way(FULL))
        time.sleep(COOL_S)
        since_s = time.time()
        run = self._send(times, way, f"{window.name} {way.name} {repeat}", DRAIN_S)
        time.sleep(BACK_S if way.mode != "manual" else 0.0)
        found = row(run) | kv_numbers(run) | {"load": window.name, "repeat": repeat, "mode": way.mode}
        found.pop("series")
        found |= observed(service, run, self.losses, since_s)
        self.rows.append(found)
        self._out.write_text(json.dumps({"bench": "windows", "rows": self.rows}) + "\n")
        self._clock.say(in_a_line(found), SECONDS + COOL_S + 15)


def poisson(rate: float, seconds: float) -> list[float]:
    """Return arrivals at random with this mean rate, always the same ones."""
    rng, at_s, times = random.Random(0), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        times.append(at_s)
    return times


def in_a_line(one: dict[str, Any]) -> str:
    ttft = one["ttft_s"] or {"p50": 0, "p95": 0, "max": 0}
    return (
        f"{one['load']:<10} {one['way']:<17} P50 {ttft['p50']:.2f} P95 {ttft['p95']:6.2f} s, "
        f"{one['violations']:>3} of {one['requests']:<3} over 2 s, {one['preemptions']} preemptions, "
        f"KV at most {one['kv_blocks_peak']}, loss {one['loss']:.3%}, {len(one['decisions'])} decisions"
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True, help="folder of the two Azure traces of 2023")
    options.add_argument("--size", default="30M", choices=sorted(BUDGETS), help="of the model")
    options.add_argument("--only", type=int, default=10, help="windows")
    options.add_argument("--repeats", type=int, default=1)
    options.add_argument("--ways", default="", help="of these alone, as in 'full precision,default mode'")
    options.add_argument("--windows", default="", help="these instead, as in code:792,conv:504")
    options.add_argument("--keep", type=Path, help="folder for all runs, for `bench.paper simulated`")
    options.add_argument("--out", type=Path, default=RESULTS / "windows.json")
    args = options.parse_args()
    assert args.size == "demo" or args.size in CONFIGS
    try:
        candidates = _candidates(args.traces, args.windows)
    except InputError as error:
        say(str(error))
        return 2
    num_ways = len(args.ways.split(",")) if args.ways else 4
    with service_of(args.size) as service:
        clock = Clock(args.only * args.repeats * num_ways * (SECONDS + COOL_S + 15) + 60)
        bench = Bench(service, clock, args.out, args.keep)
        full, int4 = bench.calibrate()
        loads = [(one, thinned_for(one.times, int4)) for one in candidates]
        able = loads if args.windows else [one for one in loads if is_fit(one[1], full)]
        chosen = able[: args.only]
        say(
            f"windows: {', '.join(f'{one.name} ({len(times)} of {len(one.times)})' for one, times in chosen)}"
        )
        ways = [
            Way(FULL),
            Way(INT4, below=service.num_layers),
            Way(DEFAULT, mode="default"),
            Way(PERFORMANCE, mode="performance"),
        ]
        wanted = args.ways.split(",") if args.ways else [way.name for way in ways]
        ways = [way for way in ways if way.name in wanted]
        for repeat in range(args.repeats):
            for number, (window, times) in enumerate(chosen):
                turn = (number + repeat) % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    bench.run(window, times, way, repeat)
        judged = judge(bench.rows, bench.loss_of_int4)
    result = {
        "bench": "windows",
        "size": args.size,
        "requests_per_s": {"full": digits(full), "int4": digits(int4)},
        "windows": {one.name: len(times) for one, times in chosen},
        "kv_blocks_at_full": service.blocks_at_full,
        "loss_of_int4": digits(bench.loss_of_int4),
        "bars": [{"bar": bar, "found": found, "is_met": is_met} for bar, found, is_met in judged],
        "rows": bench.rows,
    }
    args.out.write_text(json.dumps(result) + "\n")
    draw(bench.rows, args.out.with_suffix(".png"))
    for bar, found, is_met in judged:
        say(f"{'met   ' if is_met else 'missed'}  {bar}: {found}")
    return 0 if all(is_met for _, _, is_met in judged) else 1


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
