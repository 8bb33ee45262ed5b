"""`instar simulate`: from the trace and the calibration to the table, the file and the picture."""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Final

from bus.policy import Policy
from bus.precisions import PRECISIONS
from bus.settings import Settings
from instar.client import settings_of
from instar.errors import InputError
from instar.output.progress import progress_line
from instar.output.tables import trimmed
from instar.replay import files, plots
from instar.replay.files import RunFile
from instar.replay.statistics import Slo
from instar.replay.traces import Shaping, Workload, load
from instar.simulate import calibration as calibrations
from instar.simulate.calibration import EngineCalibration
from instar.simulate.cluster import SimulatedCluster, Unmeasured
from instar.simulate.report import SimulatedRun, compare, comparison_table, table_of

PICTURE: Final = "run.png"
BESIDE: Final = "beside.png"
EVERY_S: Final = 0.2  # between two progress lines
MOST_WORKERS: Final = 1_000_000
BUSIEST_S: Final = 6.0
BURST: Final = 1.5  # times the mean rate


def simulate(args: argparse.Namespace) -> int:
    """Return 1 if no request was served. Raises InputError."""
    settings = settings_of(args)
    if args.trace is None:
        raise InputError("name a trace, or runs to --calibrate")
    if args.workers > MOST_WORKERS:
        raise InputError(f"--workers is {args.workers}; at most {MOST_WORKERS} can be simulated")
    calibration = calibrations.load(args.calibration)
    if degrees := ", ".join(map(str, calibration.transform.degrees)):
        raise InputError(
            f"{args.calibration}: transform.degrees has {degrees}, "
            "and this command simulates workers without groups: remove them, or use "
            "instar.simulate.grouped.GroupedCluster"
        )
    replay = files.read(args.beside) if args.beside else None
    _check_model(calibration, args.model, replay)
    start_s, length_s = args.window
    shaping = Shaping(start_s, length_s, args.keep_zero, args.limit, args.scale, args.scale_lengths)
    workload = load(args.trace, args.format, shaping, args.seed)
    policy = Policy(mode=args.mode, precision=args.precision)
    times = [one.at_s for one in workload.arrivals]
    notes = [
        *workload.notes,
        *burst_note(times, workload.seconds),
        *_check_covered(calibration, workload, policy, args.extrapolate),
    ]
    if args.out is not None:
        files.prepare(args.out, len(workload.arrivals), workload.seconds + args.drain, draws=_draws(args))
    slo = Slo(args.slo_ttft or settings.slo.ttft_s, args.slo_tpot or settings.slo.tpot_s)
    simulated = _run(args, settings, calibration, workload, policy, slo, notes)
    run = simulated.as_run(args.out.name if args.out else "simulation")
    _show(args, run, replay)
    if not any(one.is_served for one in run.outcomes):
        sys.stderr.write(f"{args.prog}: none of {len(run.outcomes)} requests was served\n")
        return 1
    return 0


def _check_model(calibration: EngineCalibration, wanted: str | None, replay: RunFile | None) -> None:
    """Refuse a calibration for another model. Raises InputError."""
    for who, model in (("--model", wanted), ("the run --beside", replay and replay.about.get("model"))):
        if model and model != calibration.model:
            raise InputError(
                f"the calibration is for the model {calibration.model!r}, and {who} is of {model!r}: "
                f"name another with --calibration; {calibrations.MADE_BY}"
            )


def _check_covered(
    calibration: EngineCalibration, workload: Workload, policy: Policy, extrapolates: bool
) -> list[str]:
    """Refuse what was not measured, or return it as notes. Raises InputError."""
    context = calibration.limits.max_model_len
    requests = workload.arrivals
    fitting = [one.prompt_tokens for one in requests if one.prompt_tokens + one.output_tokens <= context]
    below = PRECISIONS[1 : PRECISIONS.index(policy.precision) + 1] if policy.mode != "manual" else ()
    precisions = [name for name in below if name in calibration.variants]
    missing = calibrations.not_covered(calibration, max(fitting, default=0), precisions)
    refuse_unless(extrapolates, missing)
    notes = [f"beyond the calibration: {text}" for text in missing]
    if too_long := len(requests) - len(fitting):
        notes.append(
            f"{too_long} of {len(requests)} requests are longer than the model's context of {context} "
            "tokens, and are refused: --scale-lengths makes them shorter"
        )
    return notes


def burst_note(times: Sequence[float], seconds: float) -> list[str]:
    """Return a note if no part of the load is much busier than the mean, [] otherwise."""
    if len(times) < 2 or seconds < 2 * BUSIEST_S:
        return []
    most = max(bisect_left(times, at_s + BUSIEST_S) - i for i, at_s in enumerate(times))
    ratio = most / BUSIEST_S / (len(times) / seconds)
    if ratio >= BURST:
        return []
    return [f"the trace has no burst: its busiest {BUSIEST_S:g} s ask for {ratio:.2g} times the mean"]


def refuse_unless(extrapolates: bool, missing: list[str]) -> None:
    """Raise InputError for what was not measured, unless it may be extrapolated."""
    if missing and not extrapolates:
        raise InputError(
            f"the calibration does not cover {'; '.join(missing)}: calibrate with a run that does, or add "
            "--extrapolate"
        )


def _run(
    args: argparse.Namespace,
    settings: Settings,
    calibration: EngineCalibration,
    workload: Workload,
    policy: Policy,
    slo: Slo,
    notes: list[str],
) -> SimulatedRun:
    most = None if args.extrapolate else calibration.covers.running
    cluster = SimulatedCluster(calibration, args.workers, policy, monitor=settings.monitor, most_running=most)
    began = time.monotonic()
    with progress_line("interrupted: nothing is kept") as line:
        ends_s = workload.arrivals[-1].at_s
        try:
            record = cluster.run(workload.arrivals, args.drain, _progress(line.show, ends_s))
        except Unmeasured as error:
            refuse_unless(False, [f"{error}, and at most {most} were measured"])
            raise
    took_s = time.monotonic() - began
    sys.stderr.write(
        f"simulated {record.seconds:.1f} s of {args.workers} workers in {took_s:.1f} s: "
        f"{record.tally.steps} steps\n"
    )
    if record.tally.most_running > calibration.covers.running:
        notes = [
            *notes,
            f"beyond the calibration: {record.tally.most_running} sequences at once, and at most "
            f"{calibration.covers.running} were measured",
        ]
    return SimulatedRun(workload, calibration, record, slo, args.workers, policy.mode, args.seed, notes)


def _progress(show: Callable[[str], None], ends_s: float) -> Callable[[float, int], None]:
    shown_s = 0.0

    def progress(at_s: float, num_open: int) -> None:
        nonlocal shown_s
        if (now_s := time.monotonic()) >= shown_s + EVERY_S:
            shown_s = now_s
            show(f"{at_s:.0f} of {ends_s:.0f} s simulated, {num_open} requests open")

    return progress


def _draws(args: argparse.Namespace) -> bool:
    return not args.no_plot and find_spec("matplotlib") is not None


def _show(args: argparse.Namespace, run: RunFile, replay: RunFile | None) -> None:
    """Print the run, keep it, and compare it with the replay."""
    rows = compare(run, replay) if replay else []
    if args.json:
        beside = {
            row.name: {"simulated": row.simulated, "measured": row.measured, "error": row.error}
            for row in rows
        }
        found = run.summary | {"simulated": run.about["simulated"]} | ({"beside": beside} if rows else {})
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        with trimmed() as console:
            console.print(table_of(run))
            if rows:
                console.print(comparison_table(rows))
    if args.out is None:
        return
    files.write(args.out, run)
    if _draws(args):
        plots.draw([run], args.out / PICTURE)
        if replay:
            plots.draw(files.with_unique_names([run, replay]), args.out / BESIDE)
    elif not args.no_plot:
        sys.stderr.write("note: no picture: matplotlib is not installed (pip install 'instar[bench]')\n")
    sys.stderr.write(f"wrote {args.out}\n")
