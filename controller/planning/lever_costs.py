"""The costs of levers on these devices: means over the reports of morphs, else assumptions. Pure.

What a morph that was ordered took is compared with its predicted cost. The mean lateness is added to later
predictions of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from bus.levers import CostBasis
from bus.morphs import HALF_S, MorphReport

Kind = Literal["resize", "kv", "swap", "merge", "part", "load"]

WEIGHT: Final = 0.3  # of the newest morph
HALVES: Final = 4  # a swap of so many weighs as much as a morph: one half at leisure says little of more
ALONE: Final = 448.0  # tokens/s of one worker, all of whose requests are short (Gyges, Table 1)
# Throughput of a group against one worker (the same table; 8 by its trend).
GROUP_SPEED: Final[Mapping[int, float]] = {1: 1.0, 2: 670 / ALONE, 4: 767 / ALONE, 8: 1.8}
HOLD_S: Final = 30.0  # that a group is kept, until groups have parted here
CONNECT_S: Final = 2.0  # until workers that are no neighbours have a communicator (NCCL on one host)
LEAST_SHARE: Final = 0.04  # of a busy worker's time for morphs (the default of `worker.morph_share`)
LEAST_S: Final = 0.1  # errors are relative to this at least: a prediction of 10 ms is not wrong at 20
MOST_MISSED: Final = 3.0  # one morph that hangs says no more than this
MOST_PREDICTED: Final = 100  # predictions that are kept for morphs whose end was never reported
MOVE_S: Final = 0.1  # until a queued request is at another instance: a poll of the gateway and two messages


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCost:
    """The cost of a morph, or of a half of a swap: seconds until it is applied, and of pauses.

    A load takes so long for `nbytes`, and others in proportion. A half takes so long if all of the worker's
    time is given to it. disk_s: what the disk takes for it, beside that, whatever the share.
    """

    duration_s: float
    stalled_s: float
    disk_s: float = 0.0
    nbytes: float = 0.0
    basis: CostBasis = "assumed"


ASSUMED_COSTS: Final[Mapping[Kind, KindCost]] = {
    "resize": KindCost(duration_s=0.1, stalled_s=0.005),
    "kv": KindCost(duration_s=0.2, stalled_s=0.1),
    "swap": KindCost(duration_s=HALF_S, stalled_s=0.002),
    "merge": KindCost(duration_s=1.0, stalled_s=0.3),
    "part": KindCost(duration_s=1.0, stalled_s=0.3),
    "load": KindCost(duration_s=10.0, stalled_s=0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverCosts:
    """Exponentially weighted means.

    speeds: tokens per second of busy instances by degree. missed: by kind, how late morphs are, as a share of
    what they cost. predicted: durations of morphs under way, by id.
    """

    kinds: Mapping[Kind, KindCost] = field(default_factory=lambda: dict(ASSUMED_COSTS))
    speeds: Mapping[int, float] = field(default_factory=dict)
    hold_s: float = HOLD_S
    merged_s: Mapping[str, float] = field(default_factory=dict)  # groups by leader: when they were made
    missed: Mapping[Kind, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, kind: Kind, units: float = 1.0, share: float = 1.0) -> float:
        """Return the predicted duration, with the usual lateness on top.

        units: halves of a swap. share: of the worker's time that the morph gets.
        """
        cost = self.kinds[kind]
        certain_s = units * max(cost.duration_s / max(share, LEAST_SHARE), cost.disk_s)
        return certain_s * (1 + self.missed.get(kind, 0.0))

    def load_s(self, nbytes: int) -> float:
        """Return the predicted duration of loading a model of so many bytes; 0: of a usual one."""
        usual = self.kinds["load"].nbytes
        return self.seconds("load", nbytes / usual if nbytes and usual else 1.0)

    def speed(self, tp: int) -> tuple[float, CostBasis]:
        """Return the throughput of a group against one worker, measured if both were busy here."""
        alone, group = self.speeds.get(1), self.speeds.get(tp)
        if alone and group:
            return group / alone, "measured"
        return GROUP_SPEED.get(tp, GROUP_SPEED[8]), "assumed"

    def tokens_per_s(self, tp: int) -> tuple[float, CostBasis]:
        """Return the throughput of a busy instance, measured if one of this degree was busy here."""
        if seen := self.speeds.get(tp):
            return seen, "measured"
        return self.speeds.get(1, ALONE) * self.speed(tp)[0], "assumed"


def predict(costs: LeverCosts, morph_id: str, seconds: float) -> LeverCosts:
    """Remember what was predicted for a morph that is ordered now."""
    kept = list(costs.predicted.items())[1 - MOST_PREDICTED :]
    return replace(costs, predicted={**dict(kept), morph_id: seconds})


def observe_cost(costs: LeverCosts, report: MorphReport) -> LeverCosts:
    """Take note of a morph that was applied and changed something."""
    kind = _kind_of(report)
    if report.state == "running" or report.ended_ms is None:
        return costs
    costs = _compared(costs, report, kind)
    if report.state != "applied" or kind is None:
        return costs
    numbers, units = report.numbers, 1.0
    if kind == "swap":
        units = float(numbers.get("halves_applied", 0))
    elif kind in ("kv", "merge", "part") and numbers.get("layers_done") != numbers.get("layers"):
        units = 0.0
    if units <= 0:
        return costs
    duration_s = _took_s(report)
    if kind == "swap":  # what it worked: how long that takes depends on the share of the time
        duration_s = report.worked_s
    stalled_s = float(numbers.get("boundary_seconds", 0.0)) + float(numbers.get("moving_seconds", 0.0))
    nbytes = float(numbers.get("bytes_copied", 0) or numbers.get("bytes_exchanged", 0))
    seen = KindCost(
        duration_s=duration_s / units,
        stalled_s=min(stalled_s, duration_s) / units,
        disk_s=float(numbers.get("disk_seconds", 0.0)) / units,
        nbytes=nbytes / units,
        basis="measured",
    )
    kinds = {**costs.kinds, kind: _mean(costs.kinds[kind], seen, units if kind == "swap" else None)}
    return _held(replace(costs, kinds=kinds), report, kind)


def _compared(costs: LeverCosts, report: MorphReport, kind: Kind | None) -> LeverCosts:
    """Compare a morph that ended with what was predicted for it."""
    if report.id not in costs.predicted:
        return costs
    left = {name: one for name, one in costs.predicted.items() if name != report.id}
    missed = costs.missed
    if kind and report.state == "applied":
        before = missed.get(kind, 0.0)
        certain_s = costs.predicted[report.id] / (1 + before)
        late_s = max(0.0, _took_s(report) - certain_s)
        error = min(MOST_MISSED, late_s / max(LEAST_S, certain_s))
        missed = {**missed, kind: before + WEIGHT * (error - before)}
    return replace(costs, predicted=left, missed=missed)


def _took_s(report: MorphReport) -> float:
    """Return the duration of a morph without its waits for pages."""
    took_s = ((report.ended_ms or report.started_ms) - report.started_ms) / 1000
    return max(0.0, took_s - report.numbers.get("wait_seconds", 0.0))


def observe_speed(costs: LeverCosts, tp: int, tokens_per_s: float) -> LeverCosts:
    """Take note of the throughput of an instance in which requests wait."""
    if tokens_per_s <= 0:
        return costs
    before = costs.speeds.get(tp, tokens_per_s)
    return replace(costs, speeds={**costs.speeds, tp: before + WEIGHT * (tokens_per_s - before)})


def _kind_of(report: MorphReport) -> Kind | None:
    if report.kind == "swap" or report.kind == "resize" or report.kind == "kv":
        return report.kind
    if report.kind == "deploy":
        return "load"
    before, after = report.numbers.get("tp_before", 0), report.numbers.get("tp_after", 0)
    if report.kind != "transform" or report.steps or before == after:
        return None
    return "merge" if after > before else "part"


def _mean(before: KindCost, seen: KindCost, halves: float | None) -> KindCost:
    """Return the new mean. halves: of a swap, whose assumed cost counts too; others begin with `seen`."""
    weight = 1 - (1 - WEIGHT) ** (halves / HALVES) if halves else WEIGHT
    if before.basis == "assumed" and not halves:
        return seen

    def mixed(one: float, other: float) -> float:
        return one + weight * (other - one)

    return KindCost(
        duration_s=mixed(before.duration_s, seen.duration_s),
        stalled_s=mixed(before.stalled_s, seen.stalled_s),
        disk_s=mixed(before.disk_s, seen.disk_s),
        nbytes=mixed(before.nbytes, seen.nbytes),
        basis="measured",
    )


def _held(costs: LeverCosts, report: MorphReport, kind: Kind) -> LeverCosts:
    """Note how long groups are kept."""
    at_s, leader = (report.ended_ms or 0) / 1000, report.target
    if kind == "merge":
        return replace(costs, merged_s={**costs.merged_s, leader: at_s})
    if kind != "part" or leader not in costs.merged_s:
        return costs
    held_s = max(0.0, at_s - costs.merged_s[leader])
    left = {name: moment for name, moment in costs.merged_s.items() if name != leader}
    return replace(costs, merged_s=left, hold_s=costs.hold_s + WEIGHT * (held_s - costs.hold_s))
