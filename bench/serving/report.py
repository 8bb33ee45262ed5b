"""The numbers of `bench.serving`: of each way, ratios, bars and the card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from bench.common.results import Bar, bar, bar_lines, busy_lines, digits, quantile
from bench.serving.load import LoadServed, ServingLoad
from bus.morphs import MorphReport

BAR: Final = 1.26  # Gyges §6.2.4: 26.1 % to 39.2 % more throughput than both
OURS, ROUND_ROBIN, LEAST_LOAD = "transformation-aware", "round-robin", "least-load-first"
TTFT_LIMIT_S: Final = 10.0  # Gyges §3.1
TPOT_LIMIT_S: Final = 1.0  # ten times the paper's: two cores are slower than eight GPUs


@dataclass(frozen=True, slots=True)
class ServingShape:
    """A transform that was applied, `at_s` after the beginning of the run."""

    at_s: float
    tp: int
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServingRun:
    """One way under the load.

    `samples_differ` are the requests whose text was not the oracle's, of `num_samples` that ended;
    `others_cores` is what other programs kept busy.
    """

    way: str
    served: list[LoadServed]
    shapes_at_first: tuple[int, ...]
    shapes: list[ServingShape]
    unapplied: list[str]  # the reasons of transforms that were not applied
    recomputed_tokens: int
    preemptions: int
    num_samples: int
    samples_differ: list[int]
    others_cores: float


@dataclass(frozen=True, slots=True)
class ServingOutcome:
    """Seconds and tokens per second.

    TTFT and TPOT are of requests that were due in the window; a request without a first token counts with the
    time it has waited.
    """

    tokens_per_s: float
    in_time_tokens_per_s: float  # tokens of short requests within the limits, and of ended long ones
    short_ttft_p95_s: float | None
    long_ttft_p95_s: float | None
    short_tpot_p95_s: float | None
    long_tpot_p95_s: float | None
    num_up: int
    num_down: int
    num_unapplied: int
    num_short: int
    num_short_ended: int
    num_long: int
    num_long_ended: int
    num_refused: int
    num_errors: int
    recomputed_tokens: int
    num_preemptions: int  # the reason of recomputed tokens unless a transform failed
    num_samples: int
    num_samples_differ: int
    others_cores: float


def outcome(run: ServingRun, load: ServingLoad) -> ServingOutcome:
    begin_s, end_s, last_s = load.warm_up_s, load.seconds, load.seconds + load.drain_s
    due = [one for one in run.served if one.arrival.at_s >= begin_s]
    short, long = ([one for one in due if one.arrival.is_long == is_long] for is_long in (False, True))
    in_time = [one for one in run.served if is_in_time(one)]
    taken = [one for one in long if not one.refused]
    return ServingOutcome(
        tokens_per_s=_sum(run.served, begin_s, end_s) / (end_s - begin_s),
        in_time_tokens_per_s=_sum(in_time, begin_s, end_s) / (end_s - begin_s),
        short_ttft_p95_s=quantile([one.ttft_s(last_s) for one in short], 0.95),
        long_ttft_p95_s=quantile([one.ttft_s(last_s) for one in taken], 0.95),
        short_tpot_p95_s=quantile([one.tpot_s for one in short if one.is_whole], 0.95),
        long_tpot_p95_s=quantile([one.tpot_s for one in long if one.is_whole], 0.95),
        num_up=sum(is_up for is_up in _directions(run)),
        num_down=sum(not is_up for is_up in _directions(run)),
        num_unapplied=len(run.unapplied),
        num_short=len(short),
        num_short_ended=sum(one.is_whole for one in short),
        num_long=len(long),
        num_long_ended=sum(one.is_whole for one in long),
        num_refused=sum(bool(one.refused) for one in run.served),
        num_errors=sum(bool(one.error) for one in run.served),
        recomputed_tokens=run.recomputed_tokens,
        num_preemptions=run.preemptions,
        num_samples=run.num_samples,
        num_samples_differ=len(run.samples_differ),
        others_cores=run.others_cores,
    )


def is_in_time(one: LoadServed) -> bool:
    if not one.is_whole:
        return False
    return one.arrival.is_long or (one.ttft_s(0.0) <= TTFT_LIMIT_S and one.tpot_s <= TPOT_LIMIT_S)


def _sum(served: Sequence[LoadServed], begin_s: float, end_s: float) -> float:
    return sum(one.tokens_between(begin_s, end_s) for one in served)


def _directions(run: ServingRun) -> list[bool]:
    """Return for each transform whether it went up."""
    degrees = {f"w{i}": tp for tp, i in _workers(run.shapes_at_first)}
    found = []
    for shape in run.shapes:
        found.append(shape.tp > degrees[shape.workers[0]])
        degrees |= dict.fromkeys(shape.workers, shape.tp)
    return found


def grouped(run: ServingRun, end_s: float) -> list[tuple[float, int]]:
    """Return pairs of seconds and the number of workers in groups from then on, to the end."""
    degrees = {f"w{i}": tp for tp, i in _workers(run.shapes_at_first)}
    steps = [(0.0, sum(tp > 1 for tp in degrees.values()))]
    for shape in run.shapes:
        degrees |= dict.fromkeys(shape.workers, shape.tp)
        steps.append((shape.at_s, sum(tp > 1 for tp in degrees.values())))
    return [*steps, (end_s, steps[-1][1])]


def grouped_share(run: ServingRun, load: ServingLoad) -> float:
    """Return the share of the workers' time in the window that they were in groups."""
    steps = grouped(run, load.seconds)
    spent = sum(
        max(0.0, min(later[0], load.seconds) - max(now[0], load.warm_up_s)) * now[1]
        for now, later in pairwise(steps)
    )
    return spent / (sum(run.shapes_at_first) * (load.seconds - load.warm_up_s))


def _workers(shapes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the degree and number of every worker."""
    return [(tp, i) for i, tp in enumerate(tp for tp in shapes for _ in range(tp))]


def shapes_of(reports: Sequence[MorphReport], began_s: float) -> list[ServingShape]:
    """Return the transforms that were applied and changed anything.

    The run began at `began_s` (time.time()).
    """
    found = []
    for one in reports:
        numbers = one.numbers
        if one.state == "applied" and numbers.get("tp_after") != numbers.get("tp_before"):
            at_s = (one.ended_ms or one.started_ms) / 1e3 - began_s
            found.append(ServingShape(round(at_s, 2), int(numbers["tp_after"]), tuple(one.workers)))
    return found


# ------------------------------------------------------------------------------------- all ways


def bars(outcomes: Mapping[str, ServingOutcome]) -> dict[str, Bar]:
    """Return the bar of ours to each of the others that ran, if ours ran."""
    if OURS not in outcomes:
        return {}
    ours = outcomes[OURS]
    found = {}
    for other in (ROUND_ROBIN, LEAST_LOAD):
        if other in outcomes:
            ratio = _ratio(ours.tokens_per_s, outcomes[other].tokens_per_s)
            found[f"throughput to {other}"] = bar(BAR, ratio, ratio >= BAR)
    return found


def ratios(outcomes: Mapping[str, ServingOutcome]) -> dict[str, dict[str, float]]:
    """Return the ratios of ours to every other way."""
    if OURS not in outcomes:
        return {}
    ours = outcomes[OURS]
    return {
        name: {
            "tokens_per_s": _ratio(ours.tokens_per_s, one.tokens_per_s),
            "in_time_tokens_per_s": _ratio(ours.in_time_tokens_per_s, one.in_time_tokens_per_s),
        }
        for name, one in outcomes.items()
        if name != OURS
    }


def _ratio(ours: float, other: float) -> float:
    return round(ours / max(other, 1e-9), 3)


Column = tuple[str, Callable[[ServingOutcome], str]]
COLUMNS: Final[tuple[Column, ...]] = (
    ("tokens/s", lambda one: f"{one.tokens_per_s:.0f}"),
    ("in time", lambda one: f"{one.in_time_tokens_per_s:.0f}"),
    ("P95 TTFT short", lambda one: _number(one.short_ttft_p95_s, "s", 1)),
    ("long", lambda one: _number(one.long_ttft_p95_s, "s", 1)),
    ("P95 TPOT short", lambda one: _number(one.short_tpot_p95_s, "s", 2)),
    ("long", lambda one: _number(one.long_tpot_p95_s, "s", 2)),
    ("up/down", lambda one: f"{one.num_up}/{one.num_down}"),
    ("short ended", lambda one: f"{one.num_short_ended} of {one.num_short}"),
    ("long ended", lambda one: f"{one.num_long_ended} of {one.num_long}"),
    ("refused", lambda one: str(one.num_refused)),
    ("errors", lambda one: str(one.num_errors)),
    ("recomputed", lambda one: str(one.recomputed_tokens)),
    ("preempted", lambda one: str(one.num_preemptions)),
    ("unlike oracle", lambda one: f"{one.num_samples_differ} of {one.num_samples}"),
    ("others' cores", lambda one: f"{one.others_cores:.1f}"),
)
WIDTH: Final = 22  # width of a way's name
HEAD: Final = " " * WIDTH + "  ".join(f"{title:>10}" for title, _ in COLUMNS)


def row(name: str, one: ServingOutcome) -> str:
    cells = [f"{tell(one):>{max(10, len(title))}}" for title, tell in COLUMNS]
    return f"{name:<{WIDTH}}" + "  ".join(cells)


def card(outcomes: Mapping[str, ServingOutcome], judged: Mapping[str, Bar]) -> str:
    compared = [
        f"ours to {name}: {one['tokens_per_s']:.2f} times the tokens/s, "
        f"{one['in_time_tokens_per_s']:.2f} times in time"
        for name, one in ratios(outcomes).items()
    ]
    busy = busy_lines(max(one.others_cores for one in outcomes.values()))
    rows = [row(name, one) for name, one in outcomes.items()]
    return "\n".join([HEAD, *rows, *compared, *bar_lines(judged), *busy])


def as_json(run: ServingRun, load: ServingLoad) -> dict[str, Any]:
    """Return the numbers of one way, what happened, and every request in short."""
    return {
        "way": run.way,
        "outcome": {key: _rounded(value) for key, value in asdict(outcome(run, load)).items()},
        "grouped_share": round(grouped_share(run, load), 3),
        "shapes_at_first": run.shapes_at_first,
        "transforms": [asdict(shape) for shape in run.shapes],
        "unapplied": run.unapplied,
        "samples_differ": run.samples_differ,
        "errors": [one.error for one in run.served if one.error][:10],
        "requests": [
            {
                "due_s": _rounded(one.arrival.at_s),
                "is_long": one.arrival.is_long,
                "ttft_s": _rounded(one.ttft_s(0.0)) if one.token_s else None,
                "tpot_s": _rounded(one.tpot_s) if one.is_whole else None,
            }
            for one in run.served
        ],
    }


def _rounded(value: float | None) -> float | None:
    return value if isinstance(value, int) else digits(value)


def _number(value: float | None, unit: str, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f} {unit}"
