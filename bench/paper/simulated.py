"""Windows of real traces simulated with the code that serves, beside the runs that `windows` kept.

    python -m bench.paper windows --traces DIR
    python -m bench.paper simulated [--runs build/windows-30M] [--out FILE]     (seconds; needs no service)

The calibration is fitted to the runs at full precision, INT8 and INT4 that `windows` makes before its
windows. In those nothing is swapped: what a half of a layer costs is measured in the other windows, none of
which is the one that is simulated. A shared machine is not equally fast all the time: its speed changes by a
quarter within minutes. So steps are taken to be as much slower or faster as those of the run itself were, by
one factor from the times of its steps; queues, decisions and swaps are predicted. Then every run of full
precision and of a mode is simulated, and its P95 TTFT and its number of swaps are held against those that
were measured. The time per token and the time until a swap brought its first blocks are compared too, to see
where an error comes from.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import structs

from bench.common.plots import picture
from bench.common.results import RESULTS, digits, parser, say
from bench.paper.campaign import calibration_runs
from bench.paper.service import DEFAULT, FULL, MODES
from bench.paper.windows import DRAIN_S
from bus.policy import Policy
from bus.settings import WorkerSettings
from instar.errors import InputError
from instar.replay import files
from instar.replay.files import RunFile
from instar.replay.schemas import Arrival
from instar.replay.traces import Workload
from instar.simulate.calibrate import calibration_of
from instar.simulate.calibration import EngineCalibration
from instar.simulate.cluster import SimulatedCluster
from instar.simulate.fitting import machine_factor, morph_costs
from instar.simulate.report import ComparedNumber, SimulatedRun, compare

WITHIN, IN_WINDOWS = 0.15, 0.8
TRACES: Final = ("code", "conv")  # the names of windows begin so
COMPARED: Final[dict[str, str]] = {"p95_s": "TTFT p95, s", "swaps": "swaps"}
SEEN: Final[dict[str, str]] = {"tpot_s": "TPOT p95, s", "blocks_s": "first blocks of a swap, s"}

Pair = dict[str, float]


def runs_of(folder: Path) -> tuple[list[RunFile], list[RunFile]]:
    """Return the runs to calibrate with, full precision first, and the others. Raises InputError."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    calibrations = calibration_runs(folder)
    windows = [files.read(path) for path in paths if path.is_dir() and path.name.startswith(TRACES)]
    if not calibrations or not windows:
        raise InputError(
            f"--runs {folder}: holds {len(calibrations)} runs to calibrate with, and {len(windows)} of "
            "windows; `python -m bench.paper windows` makes both"
        )
    return calibrations, windows


def simulated(run: RunFile, calibration: EngineCalibration) -> RunFile:
    """Simulate the load of a run, in its mode."""
    arrivals = [Arrival(one.due_s, one.prompt_asked, one.output_asked) for one in run.outcomes]
    mode: Any = MODES.get(run.name, "manual")
    record = SimulatedCluster(calibration, 1, Policy(mode=mode)).run(arrivals, DRAIN_S)
    workload = Workload(str(run.about["source"]), "", arrivals, arrivals[-1].at_s)
    return SimulatedRun(workload, calibration, record, run.slo, 1, mode, seed=0).as_run(run.name)


def window_of(run: RunFile) -> str:
    """Return the window that was sent, as in `code:792`."""
    return str(run.about["source"]).partition(f" {run.name}")[0]


def with_swaps(calibration: EngineCalibration, runs: Sequence[RunFile], window: str) -> EngineCalibration:
    """Return a calibration with the costs of halves in all windows but one."""
    found = morph_costs(run for run in runs if run.name in MODES and window_of(run) != window)
    if found is None:
        return calibration
    return structs.replace(calibration, morph=structs.replace(found, share=calibration.morph.share))


def rows_of(runs: Sequence[RunFile], calibration: EngineCalibration) -> list[dict[str, Any]]:
    """Return what was simulated and measured, for each window and way."""
    rows = []
    for run in runs:
        if run.name != FULL and run.name not in MODES:
            continue  # layers are in fewer bits from the start
        window, factor = window_of(run), machine_factor(run, calibration)
        found_of = simulated(run, with_swaps(calibration.slowed(factor), runs, window))
        numbers = {one.name: one for one in compare(found_of, run)}
        found = {key: _pair(numbers[name]) for key, name in (COMPARED | SEEN).items()}
        rows.append({"window": window, "way": run.name, "machine_factor": digits(factor)} | found)
        texts = [f"{name} {_text(found[key])}" for key, name in (COMPARED | SEEN).items()]
        say(f"{window:<10} {run.name:<17} {', '.join(texts)}")
    return rows


def _pair(one: ComparedNumber) -> Pair:
    return {"simulated": one.simulated or 0.0, "measured": one.measured or 0.0}


def _text(pair: Pair) -> str:
    return f"{pair['simulated']:6.2f} simulated, {pair['measured']:6.2f} measured"


def judge(rows: Sequence[Mapping[str, Any]], way: str) -> list[tuple[str, str, bool]]:
    """Return in how many windows the simulation comes near, by the means of repeats."""
    by_window = defaultdict(list)
    for row in rows:
        if row["way"] == way:
            by_window[row["window"]].append(row)
    found = []
    for key, name in COMPARED.items():
        errors = [_error([row[key] for row in of]) for of in by_window.values()]
        near = sum(abs(error) <= WITHIN for error in errors)
        found.append(
            (
                f"{way}: {name} within {WITHIN:.0%} of the replay in {IN_WINDOWS:.0%} of the windows",
                f"in {near} of {len(errors)}: {', '.join(f'{error:+.0%}' for error in errors)}",
                bool(errors) and near >= IN_WINDOWS * len(errors),
            )
        )
    return found


def _error(pairs: Sequence[Pair]) -> float:
    measured, simulated = (fmean(pair[name] for pair in pairs) for name in ("measured", "simulated"))
    if not measured:
        return math.inf if simulated else 0.0
    return simulated / measured - 1


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw measured against simulated numbers."""
    with picture(path, 1, 2, figsize=(10, 4.5)) as (_, panels):
        for panel, (key, name) in zip(panels, COMPARED.items(), strict=True):
            for way in (FULL, *MODES):
                points = [(row[key]["measured"], row[key]["simulated"]) for row in rows if row["way"] == way]
                if points:
                    panel.scatter(*zip(*points, strict=True), label=way, s=18)
            most = max((value for row in rows for value in row[key].values()), default=0.0) or 1.0
            panel.plot([0, most], [0, most], color="grey", lw=0.8)
            panel.set_xlabel(f"{name}, measured")
            panel.set_ylabel(f"{name}, simulated")
            panel.legend()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--runs", type=Path, default=Path("build/windows-30M"), help="folder of the windows")
    options.add_argument("--profiles", type=Path, help="the model's folder, if it has profiles")
    options.add_argument("--out", type=Path, default=RESULTS / "simulated.json")
    args = options.parse_args()
    try:
        calibrations, runs = runs_of(args.runs)
        calibration = calibration_of(calibrations, WorkerSettings(), args.profiles)
    except (InputError, OSError) as error:
        say(str(error))
        return 2
    rows = rows_of(runs, calibration)
    judged = judge(rows, DEFAULT)
    result = {
        "bench": "simulated",
        "calibration_error": calibration.error,
        "bars": [{"bar": bar, "found": found, "is_met": is_met} for bar, found, is_met in judged],
        "rows": rows,
    }
    args.out.write_text(json.dumps(result) + "\n")
    draw(rows, args.out.with_suffix(".png"))
    if args.out.parent == RESULTS:
        from bench.paper.page import write_pages

        write_pages()
    for bar, found, is_met in judged:
        say(f"{'met   ' if is_met else 'missed'}  {bar}: {found}")
    return 0 if all(is_met for _, _, is_met in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
