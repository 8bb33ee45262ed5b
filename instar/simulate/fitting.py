"""The fit of a calibration to recorded runs, by least absolute errors.

In each second of a run the server reports how many steps it took, how long they were in all, and how many
tokens of prompts and outputs they made. The time is fitted as a sum of their costs. Older runs lack those
numbers: then the times per output token and to the first token of single requests are fitted instead, against
what ran in the second that they fell in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from msgspec import structs

from bus.precisions import PRECISIONS, Precision
from instar.errors import InputError
from instar.output.tables import plural
from instar.replay.files import RunFile
from instar.replay.statistics import percentile
from instar.simulate.calibration import (
    VERSION,
    CalibratedMemory,
    Coverage,
    EngineCalibration,
    EngineLimits,
    MorphCosts,
    StepCosts,
)
from instar.simulate.recorded_work import Work, work_of, work_of_requests

FEWEST: Final = 20  # seconds or requests of a fit of four numbers
MORE_THAN_ZERO: Final = 1e-12
ROUNDS: Final = 30  # rounds of least squares
LEAST_ERROR: Final = 1e-3  # relative: smaller ones count alike

Matrix = npt.NDArray[np.float64]


def fit(runs: Sequence[RunFile], limits: EngineLimits) -> EngineCalibration:
    """Return the calibration of one model by runs of it. Raises InputError."""
    models = {str(run.about.get("model")) for run in runs}
    if len(models) > 1:
        raise InputError(f"the runs are of several models ({', '.join(sorted(models))}): name runs of one")
    facts = _facts(runs)
    work = [one for run in runs for one in work_of(run)]
    how = "times of steps"
    if len(work) < FEWEST:
        work, how = (
            [one for run in runs for one in work_of_requests(run, facts["block_tokens"])],
            "TPOT and TTFT of requests",
        )
    full = [one for one in work if not one.shares]
    if len(full) < FEWEST:
        raise InputError(
            f"{_names(runs)}: {plural(len(full), 'sample')} in full precision, and a fit needs {FEWEST}: "
            "record a longer run, with `instar bench replay --out`, and the admin key if the server has one"
        )
    step = _step_costs(full)
    below_full, measured = _costs_below(work, step, list(facts["layer_pages"]))
    found = EngineCalibration(
        version=VERSION,
        model=models.pop(),
        source=f"{how} in {_names(runs)}",
        num_layers=facts["num_layers"],
        order=facts["order"],
        limits=limits,
        memory=_memory(facts, runs),
        step=step,
        below_full=below_full,
        morph=morph_costs(runs)
        or MorphCosts(half_s=TYPICAL_HALF_S, byte_s=TYPICAL_BYTE_S, share=MORPH_SHARE),
        covers=_coverage(runs, measured),
        transit_s=_transit(runs, step),
    )
    return structs.replace(found, error=error_of(work, found))


def _names(runs: Sequence[RunFile]) -> str:
    return ", ".join(Path(run.folder).name or run.name for run in runs)


def _facts(runs: Sequence[RunFile]) -> dict[str, Any]:
    """Return what the runs say of their instance. Raises InputError."""
    needed = ("num_layers", "order", "layer_pages", "attention_pages", "pages", "page_bytes", "block_tokens")
    for run in runs:
        for facts in run.observed.get("instances", {}).values():
            if all(facts.get(name) for name in needed):
                return {**facts, "layer_pages": _by_precision(facts["layer_pages"])}
    raise InputError(
        f"{_names(runs)}: says nothing of the instance's layers and pages: record it again with this "
        "version's `instar bench replay --out`, and the admin key if the server has one"
    )


def _by_precision(pages: dict[str, int]) -> dict[Precision, int]:
    return {name: pages[name] for name in PRECISIONS if name in pages}


def _memory(facts: dict[str, Any], runs: Sequence[RunFile]) -> CalibratedMemory:
    """Return the pages and blocks in full precision: those of the run's beginning, less what swaps gained."""
    layers, pages = facts["layer_pages"], facts["pages"]
    reserve = max((count for name, count in layers.items() if name != "full"), default=0)
    per_block = pages["kv"] / facts["kv_blocks"]
    blocks = min(
        shape["kv_blocks"]
        for run in runs
        for sample in run.observed["samples"]
        for shape in sample["instances"].values()
        if shape.get("kv_blocks") and not shape.get("layers_below_full")
    )
    return CalibratedMemory(
        page_bytes=facts["page_bytes"],
        kv_pages=round(blocks * per_block),
        kv_blocks=blocks,
        spare_pages=max(0, pages["free"] - reserve),
        layer_pages=layers,
        attention_pages=_by_precision(facts["attention_pages"]),
    )


# ------------------------------------------------------------------------------------- least squares


def _step_costs(work: Sequence[Work]) -> StepCosts:
    """Return the costs of a step in the precision of this work, none below 0."""
    table = np.array([[one.steps, one.prompt_tokens, one.decodes, one.kv_tokens] for one in work], np.float64)
    seconds = np.array([one.seconds for one in work], np.float64)
    return StepCosts(*non_negative(table, seconds))


def non_negative(table: Matrix, wanted: Matrix) -> list[float]:
    """Return the factors >= 0 of the columns of `table` [rows, columns] that come nearest to `wanted` [rows].

    The sum of relative errors is least: a second in which other programs had the machine counts no more than
    another. By least squares, repeated with each row divided by the root of its last error. A column whose
    factor is below 0 is left out, the worst one first.
    """
    scale = np.maximum(wanted, MORE_THAN_ZERO)
    left = [column for column in range(table.shape[1]) if np.any(table[:, column])]
    found = np.zeros(table.shape[1])
    while left:
        sizes = np.linalg.norm(table[:, left] / scale[:, None], axis=0)
        rows, target = table[:, left] / scale[:, None] / sizes, wanted / scale
        weights = np.ones(len(wanted))
        for _ in range(ROUNDS):
            factors = np.linalg.lstsq(rows * weights[:, None], target * weights, rcond=None)[0]
            weights = 1 / np.sqrt(np.maximum(np.abs(rows @ factors - target), LEAST_ERROR))
        if factors.min() >= 0:
            found[left] = factors / sizes
            break
        del left[int(factors.argmin())]
    return [float(one) for one in found]


def _costs_below(
    work: Sequence[Work], full: StepCosts, variants: Sequence[Precision]
) -> tuple[dict[Precision, StepCosts], list[Precision]]:
    """Return the costs in each precision below full, and the precisions that were measured.

    KV costs the same in all of them. Those that were not measured are taken to cost what full precision does.
    """
    found: dict[Precision, StepCosts] = {}
    measured: list[Precision] = ["full"]
    for precision in variants:
        if precision == "full":
            continue
        found[precision] = full
        own = [one for one in work if list(one.shares) == [precision]]
        if len(own) < FEWEST:
            continue
        table, wanted = [], []
        for one in own:
            share = one.shares[precision]
            rest_s = (1 - share) * _seconds(one, full) + share * one.kv_tokens * full.kv_token_s
            table.append([share * one.steps, share * one.prompt_tokens, share * one.decodes])
            wanted.append(max(0.0, one.seconds - rest_s))
        fixed, prompt, decode = non_negative(np.array(table), np.array(wanted))
        found[precision] = StepCosts(fixed, prompt, decode, full.kv_token_s)
        measured.append(precision)
    return found, measured


def _seconds(one: Work, costs: StepCosts) -> float:
    return costs.seconds(one.prompt_tokens, one.decodes, one.kv_tokens, one.steps)


def machine_factor(run: RunFile, calibration: EngineCalibration) -> float:
    """Return how many times as long as by the calibration the steps of a run took; 1.0 without any."""
    work = list(work_of(run))
    predicted_s = sum(_seconds(one, calibration.step_of(one.shares)) for one in work)
    return sum(one.seconds for one in work) / predicted_s if predicted_s else 1.0


def error_of(work: Sequence[Work], calibration: EngineCalibration) -> float:
    """Return the median relative error of the times."""
    errors = [
        abs(_seconds(one, calibration.step_of(one.shares)) - one.seconds) / max(one.seconds, MORE_THAN_ZERO)
        for one in work
    ]
    return round(float(np.median(errors)), 4)


# ------------------------------------------------------------------------------------- the rest


def morph_costs(runs: Iterable[RunFile]) -> MorphCosts | None:
    """Return the costs of halves by the swaps that were applied; None without any."""
    swaps = [
        one.get("numbers") or {}
        for run in runs
        for one in run.observed.get("morphs", [])
        if one.get("kind") == "swap" and one.get("state") == "applied"
    ]
    halves = sum(one.get("halves_applied", 0) for one in swaps)
    nbytes = sum(one.get("bytes_copied", 0) for one in swaps)
    if not halves or not nbytes:
        return None
    copy_s = sum(one.get("copy_seconds", 0.0) for one in swaps)
    boundary_s = sum(one.get("boundary_seconds", 0.0) - one.get("awaited_seconds", 0.0) for one in swaps)
    disk_s = sum(one.get("disk_seconds", 0.0) for one in swaps)
    return MorphCosts(
        half_s=boundary_s / halves, byte_s=copy_s / nbytes, share=MORPH_SHARE, disk_byte_s=disk_s / nbytes
    )


# Of models/demo: a swap of a layer by an idle worker takes 6 to 16 ms (docs/evaluation.md).
TYPICAL_HALF_S: Final = 0.002
TYPICAL_BYTE_S: Final = 1e-9
MORPH_SHARE: Final = 0.02  # half of `worker.morph_share` of a CPU, for copies and for work between steps


def _coverage(runs: Sequence[RunFile], measured: list[Precision]) -> Coverage:
    running = [
        shape.get("running") or 0
        for run in runs
        for sample in run.observed["samples"]
        for shape in sample["instances"].values()
    ]
    prompts = [one.prompt_asked for run in runs for one in run.outcomes if one.is_served]
    return Coverage(max(running, default=0), max(prompts, default=0), measured)


def _transit(runs: Sequence[RunFile], step: StepCosts) -> float:
    """Return the time to the first token that the quickest twentieth of requests spent outside of steps."""
    spare = sorted(
        max(0.0, one.ttft_s - step.fixed_s - one.prompt_asked * step.prompt_token_s)
        for run in runs
        for one in run.outcomes
        if one.is_served and one.ttft_s is not None and all(not below for _, below in one.spans)
    )
    return round(percentile(spare, 5), 6) if spare else 0.0
