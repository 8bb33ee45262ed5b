"""The outcome of a simulation: as a run, whose card and picture are those of a replay, and as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from instar.output.tables import ABSENT, make_table, plural, short
from instar.replay.card import seconds_text
from instar.replay.files import RunFile
from instar.replay.statistics import Slo
from instar.replay.traces import Workload
from instar.simulate.calibration import EngineCalibration
from instar.simulate.cluster import Record

LATENCIES = {"TTFT": "ttft_s", "TPOT": "tpot_s"}
COLUMNS = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A simulation: its input and its record."""

    workload: Workload
    calibration: EngineCalibration
    record: Record
    slo: Slo
    num_workers: int
    mode: str
    seed: int
    notes: Sequence[str] = ()

    def as_run(self, name: str) -> RunFile:
        """Return the run, as `instar bench plot` reads it."""
        record = self.record
        about = {
            "name": name,
            "source": self.workload.source,
            "format": self.workload.format,
            "url": f"{plural(self.num_workers, 'simulated worker')}, mode {self.mode}",
            "model": self.calibration.model,
            "seed": self.seed,
            "zero_rows": self.workload.zero_rows,
            "arrivals_sha256": self.workload.digest,
            "began_at": 0.0,
            "was_interrupted": False,
            "notes": list(self.notes),
            "simulated": self.numbers(),
        }
        morphs = [
            {
                "id": one.id,
                "kind": one.kind,
                "state": one.state,
                "target": one.target,
                "reason": one.reason,
                "started": one.started_ms / 1e3,
                "ended": (one.ended_ms or 0) / 1e3,
                "numbers": one.numbers,
            }
            for one in record.morphs
        ]
        observed = {"samples": record.samples, "missed": 0, "morphs": morphs, "counted": {}}
        events = [record.events_in[second] for second in range(max(record.events_in, default=-1) + 1)]
        outcomes = [one.rounded() for one in record.outcomes]
        return RunFile(about, self.slo, outcomes, observed, events)

    def numbers(self) -> dict[str, Any]:
        """Return what a replay does not have, or counts in another way."""
        record, tally = self.record, self.record.tally
        instance_s = max(record.seconds * self.num_workers, 1e-9)
        return {
            "workers": self.num_workers,
            "mode": self.mode,
            "calibration": self.calibration.source,
            "seconds": round(record.seconds, 6),
            "steps": tally.steps,
            "steps_scheduled": tally.scheduled,
            "most_running": tally.most_running,
            "preemptions": record.preemptions,
            "morphs": {
                f"{lever.replace('_', ' ')} {state}": count
                for (lever, state), count in sorted(record.levers.items())
            },
            "below_full_s": round(record.below_s, 3),
            "below_full_share": round(record.below_s / instance_s, 6),
            "predicted_loss": round(tally.lost_quality / max(tally.tokens, 1), 6),
            "is_loss_assumed": not self.calibration.losses,
        }


def table_of(run: RunFile) -> RenderableType:
    """Return the numbers of a simulation on one screen."""
    found, numbers = run.summary, run.about["simulated"]
    latencies = make_table([""], [f"{name.upper()}\ns" for name in COLUMNS])
    for name, key in LATENCIES.items():
        if found[key] is not None:
            latencies.add_row(name, *(seconds_text(found[key][column]) for column in COLUMNS))
    lines = Table.grid(padding=(0, 2))
    for name, text in _lines(run, found, numbers):
        lines.add_row(name, Text(text))
    heading = f"{run.about['source']} on {run.about['url']} ({run.about['model']}), {found['seconds']:.1f} s"
    return Group(Text(heading, style="bold"), latencies, lines)


def _lines(run: RunFile, found: dict[str, Any], numbers: dict[str, Any]) -> list[tuple[str, str]]:
    bad, slo = found["violations"], run.slo
    how = "assumed without a profile" if numbers["is_loss_assumed"] else "by the profile"
    morphs = ", ".join(f"{count} {kind}" for kind, count in numbers["morphs"].items())
    return [
        ("requests", f"{found['requests']} sent, {found['served']} served"),
        (
            "violations",
            f"{bad['ttft']['count']} ({bad['ttft']['share']:.1%}) of TTFT {slo.ttft_s:g} s, "
            f"{bad['tpot']['count']} ({bad['tpot']['share']:.1%}) of TPOT {slo.tpot_s:g} s",
        ),
        ("errors", ", ".join(f"{count} x {kind}" for kind, count in found["errors"].items()) or "none"),
        ("preemptions", str(numbers["preemptions"])),
        ("morphs", morphs or "none"),
        (
            "below full",
            f"{short(numbers['below_full_s'])} s of workers, {numbers['below_full_share']:.2%} of their time",
        ),
        ("loss", f"{numbers['predicted_loss']:.3%} of perplexity on average over tokens, {how}"),
        (
            "engine",
            f"{numbers['steps']} steps, at most {plural(numbers['most_running'], 'sequence')} in one of them",
        ),
        *(("note", note) for note in run.about["notes"]),
    ]


@dataclass(frozen=True, slots=True)
class ComparedNumber:
    """One number of a simulation and of a replay."""

    name: str
    simulated: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """The relative error; None without a measured value above 0."""
        if self.simulated is None or not self.measured:
            return None
        return self.simulated / self.measured - 1


def compare(simulated: RunFile, replay: RunFile) -> list[ComparedNumber]:
    """Return the numbers of both."""

    def latency(run: RunFile, key: str, column: str) -> float | None:
        values = run.summary[key]
        return None if values is None else float(values[column])

    rows = [
        ComparedNumber(f"{name} {column}, s", latency(simulated, key, column), latency(replay, key, column))
        for name, key in LATENCIES.items()
        for column in ("p50", "p95")
    ]
    rows.append(ComparedNumber("TTFT violations", *(_violations(run) for run in (simulated, replay))))
    rows.append(ComparedNumber("swaps", *(float(len(_swaps(run))) for run in (simulated, replay))))
    return [*rows, ComparedNumber("first blocks of a swap, s", *map(_first_blocks_s, (simulated, replay)))]


def _violations(run: RunFile) -> float:
    return float(run.summary["violations"]["ttft"]["count"])


def _swaps(run: RunFile) -> list[dict[str, Any]]:
    morphs = run.observed.get("morphs", [])
    return [one for one in morphs if one["kind"] == "swap" and one["state"] == "applied"]


def _first_blocks_s(run: RunFile) -> float | None:
    """Return the mean time from the beginning of a swap until it brought KV blocks; None without any."""
    times = [seconds for one in _swaps(run) if (seconds := (one.get("numbers") or {}).get("blocks_seconds"))]
    return fmean(times) if times else None


def comparison_table(rows: Sequence[ComparedNumber]) -> Table:
    """Return simulated and measured numbers, and the error in per cent."""
    table = make_table([""], ["simulated", "measured", "error"])
    for row in rows:
        values = (ABSENT if value is None else short(value) for value in (row.simulated, row.measured))
        table.add_row(row.name, *values, ABSENT if row.error is None else f"{row.error:+.0%}")
    return table
