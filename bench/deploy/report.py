"""The numbers of `bench.deploy`: what each intent minimises, for its choice and for fixed configurations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.common.results import busy_lines, say
from bus.deployments import Configuration, Intent

NUM_WORKERS: Final = 4
MAX_TP: Final = 4
FIXED: Final = {
    "maximum TP": Configuration(tp=MAX_TP),
    "maximum PP": Configuration(pp=NUM_WORKERS),
    "one worker": Configuration(),
}  # all unquantised
LEAST_SLACK: Final = 1.5  # limit of latency, over the lowest there is
SECONDS_PER_HOUR: Final = 3600.0
SLO: Final = "latency SLO"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The service's choice for an intent, and its estimate as JSON."""

    model: str
    name: str
    intent: Intent
    configuration: Configuration
    expected: Mapping[str, Any]

    @property
    def label(self) -> str:
        return label(self.configuration)


@dataclass(frozen=True, slots=True)
class DeployRun:
    """One configuration in one round: seconds of each request, cores that other programs kept busy."""

    model: str
    configuration: Configuration
    round: int
    seconds: list[float]
    memory_bytes: int
    others_cores: float
    loaded_s: float

    def __str__(self) -> str:
        return (
            f"{self.model} {label(self.configuration)}: {statistics.median(self.seconds):.3f} s a request, "
            f"{self.memory_bytes / 2**20:.1f} MiB (loaded in {self.loaded_s:.1f} s; others took "
            f"{self.others_cores:.2f} cores)"
        )


@dataclass(frozen=True, slots=True)
class ConfigurationLatency:
    """All rounds of a configuration: the median of all requests, the lowest and highest median of a round."""

    latency_s: float
    low_s: float
    high_s: float
    memory_bytes: float
    num_devices: int

    @property
    def cost(self) -> float:
        """The byte seconds of a request."""
        return self.memory_bytes * self.latency_s

    @property
    def gpu_hours(self) -> float:
        return self.num_devices * self.latency_s / SECONDS_PER_HOUR


def label(one: Configuration) -> str:
    return f"tp{one.tp} pp{one.pp} {one.precision}"


def intents_of(request: Intent, cheapest_s: float, fastest_s: float) -> dict[str, Intent]:
    """Return the intents by name.

    The limit of latency lies between the expected seconds of the cheapest and of the fastest configuration.
    """
    limit_s = max(LEAST_SLACK * fastest_s, math.sqrt(cheapest_s * fastest_s))
    return {
        "latency": replace(request, minimise="latency"),
        "cost": replace(request, minimise="cost"),
        "memory": replace(request, minimise="memory"),
        "gpu_hours": replace(request, minimise="gpu_hours"),
        SLO: replace(request, max_latency_s=limit_s),
    }


def batches(configurations: Iterable[Configuration]) -> list[list[Configuration]]:
    """Return configurations to deploy side by side, each on workers of its own.

    Groups first, which need empty ones.
    """
    found: list[list[Configuration]] = []
    for one in sorted(configurations, key=lambda one: (-one.num_devices, -one.tp, one.precision)):
        for batch in found:
            if sum(each.num_devices for each in batch) + one.num_devices <= NUM_WORKERS:
                batch.append(one)
                break
        else:
            found.append([one])
    return found


def measured(runs: Sequence[DeployRun]) -> ConfigurationLatency:
    """Summarise the runs of one model and configuration."""
    medians = [statistics.median(one.seconds) for one in runs]
    return ConfigurationLatency(
        latency_s=statistics.median(second for one in runs for second in one.seconds),
        low_s=min(medians),
        high_s=max(medians),
        memory_bytes=statistics.median(one.memory_bytes for one in runs),
        num_devices=runs[0].configuration.num_devices,
    )


def value(one: ConfigurationLatency, name: str) -> float:
    """Return what the intent minimises; for the intent with a limit, the cost."""
    values = {"latency": one.latency_s, "memory": one.memory_bytes, "gpu_hours": one.gpu_hours}
    return values.get(name, one.cost)


def is_within(one: ConfigurationLatency, intent: Intent) -> bool:
    return intent.max_latency_s is None or one.latency_s <= intent.max_latency_s


def compare(
    ours: ConfigurationLatency, fixed: ConfigurationLatency, chosen: Chosen, is_same: bool
) -> dict[str, Any]:
    """Compare a fixed configuration with the chosen one.

    `times` is how much more it takes of what is minimised.
    """
    met, fixed_met = is_within(ours, chosen.intent), is_within(fixed, chosen.intent)
    times = value(fixed, chosen.name) / value(ours, chosen.name)
    is_better = times > 1 if met == fixed_met else met
    verdict = "same" if is_same else "better" if is_better else "worse"
    return {
        "value": value(fixed, chosen.name),
        "times": round(times, 3),
        "is_met": fixed_met,
        "verdict": verdict,
    }


def report(chosen: Sequence[Chosen], runs: Sequence[DeployRun]) -> dict[str, Any]:
    by: dict[tuple[str, Configuration], list[DeployRun]] = {}
    for run in runs:
        by.setdefault((run.model, run.configuration), []).append(run)
    table = {key: measured(found) for key, found in by.items()}
    intents = [_row(one, table) for one in chosen]
    verdicts = [against["verdict"] for row in intents for against in row["fixed"].values()]
    return {
        "configurations": [
            {
                "model": model,
                "configuration": label(one),
                "latency_s": round(found.latency_s, 4),
                "latency_of_rounds_s": [round(found.low_s, 4), round(found.high_s, 4)],
                "memory_bytes": round(found.memory_bytes),
                "cost": round(found.cost),
                "gpu_hours": found.gpu_hours,
                "loaded_s": round(statistics.median(run.loaded_s for run in by[model, one]), 2),
            }
            for (model, one), found in table.items()
        ],
        "intents": intents,
        "verdicts": {name: verdicts.count(name) for name in ("better", "same", "worse")},
        "is_met": "worse" not in verdicts and "better" in verdicts and all(row["is_met"] for row in intents),
        "others_cores": round(statistics.median(run.others_cores for run in runs), 2),
    }


def _row(chosen: Chosen, table: Mapping[tuple[str, Configuration], ConfigurationLatency]) -> dict[str, Any]:
    ours = table[chosen.model, chosen.configuration]
    return {
        "model": chosen.model,
        "intent": chosen.name,
        "max_latency_s": chosen.intent.max_latency_s,
        "chosen": chosen.label,
        "value": value(ours, chosen.name),
        "is_met": is_within(ours, chosen.intent),
        "latency_s": round(ours.latency_s, 4),
        "latency_expected_s": chosen.expected["latency_s"]["value"],
        "memory_expected_bytes": chosen.expected["memory_bytes"]["value"],
        "fixed": {
            name: compare(ours, table[chosen.model, one], chosen, one == chosen.configuration)
            for name, one in FIXED.items()
        },
    }


def say_card(found: dict[str, Any]) -> None:
    for one in found["configurations"]:
        low, high = one["latency_of_rounds_s"]
        say(
            f"{one['model']:<6}{one['configuration']:<18}{one['latency_s']:8.3f} s ({low:.3f} to {high:.3f})"
            f"{one['memory_bytes'] / 2**20:9.1f} MiB{one['gpu_hours'] * SECONDS_PER_HOUR:9.3f} device s"
        )
    for row in found["intents"]:
        against = ", ".join(f"{name} {_in_words(one)}" for name, one in row["fixed"].items())
        limit = f" <= {row['max_latency_s']:.3f} s" if row["max_latency_s"] else ""
        missed = "" if row["is_met"] else f" MISSED with {row['latency_s']:.3f} s"
        say(f"{row['model']:<6}{row['intent'] + limit:<24}{row['chosen']:<18}{missed}: {against}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found["verdicts"].items())
    say(f"against fixed configurations: {counts}: {'met' if found['is_met'] else 'MISSED'}")
    for line in busy_lines(found["others_cores"]):
        say(line)


def _in_words(against: dict[str, Any]) -> str:
    if against["verdict"] == "same":
        return "is the choice itself"
    worse = " WORSE" if against["verdict"] == "worse" else ""
    return f"{against['times']:.2f} times{'' if against['is_met'] else ', misses the limit'}{worse}"
