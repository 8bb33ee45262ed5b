"""The numbers of `bench.estimate`."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from bench.estimate_truth import Case, Found
from bench.offline import say
from bus.deployments import Configuration, Estimate, Intent, Objective, Profile
from controller.intents.estimates import estimate_all
from controller.intents.intents import rank

MEMORY_BAR, LATENCY_BAR, CHOICE_BAR, COST_BAR = 0.05, 0.10, 0.9, 6.0
NEAR = 0.05  # of the truly best: as good a choice
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
SHAPES = [(tp, pp) for tp in (1, 2) for pp in (1, 2, 4)]  # that a whole model would be measured in, too


@dataclass(frozen=True, slots=True)
class Measured:
    """One model: what its fingerprints told, and what is true."""

    name: str
    profile: Profile
    truth: dict[Case, Found]
    whole_bytes: int  # that measuring the whole model takes at once

    def estimates(self, intent: Intent) -> list[Estimate]:
        return estimate_all(self.profile, intent)

    @property
    def intents(self) -> list[Intent]:
        return list(dict.fromkeys(intent for _, intent in self.truth))


def report(models: Sequence[Measured]) -> dict[str, Any]:
    rows = {one.name: _errors(one) for one in models}
    latency = [abs(error) for found in rows.values() for error in found["latency"].values()]
    memory = [abs(error) for found in rows.values() for error in found["memory"].values()]
    choices = [choice for one in models for choice in _choices(one)]
    good = sum(loss <= NEAR for *_, loss in choices) / len(choices)
    costs = {one.name: _cost(one) for one in models}
    cheaper = statistics.fmean(cost["times_cheaper"] for cost in costs.values())
    values = {
        "memory, mean error": (MEMORY_BAR, statistics.fmean(memory), operator.lt),
        "latency, mean error": (LATENCY_BAR, statistics.fmean(latency), operator.lt),
        "choices truly best or within 5 %": (CHOICE_BAR, good, operator.ge),
        "profiling, times cheaper than all configurations of the whole": (COST_BAR, cheaper, operator.ge),
    }
    return {
        "models": {name: {**found, **costs[name]} for name, found in rows.items()},
        "latency": {"mean": statistics.fmean(latency), "worst": max(latency)},
        "memory": {"mean": statistics.fmean(memory), "worst": max(memory)},
        "choices": [list(choice) for choice in choices],
        "bars": {
            what: {"bar": bar, "value": round(value, 4), "is_met": is_met(value, bar)}
            for what, (bar, value, is_met) in values.items()
        },
    }


def _errors(model: Measured) -> dict[str, Any]:
    """Shares of the truth, by case."""
    latency, memory = {}, {}
    for intent in model.intents:
        for one in model.estimates(intent):
            if (true := model.truth.get((one.configuration.precision, intent))) is None:
                continue
            key = (
                f"{one.configuration.precision} {intent.prompt_tokens}+{intent.output_tokens}"
                f" x{intent.batch_size}"
            )
            latency[key] = round(one.latency_s.value / true.latency_s - 1, 4)
            memory[key] = round(one.memory_bytes.value / true.memory_bytes - 1, 4)
    return {"latency": latency, "memory": memory}


def _choices(model: Measured) -> list[tuple[str, str, str, str, float]]:
    """(model, intent, chosen, truly best, how much worse the chosen is) of every objective."""
    made: list[tuple[str, str, str, str, float]] = []
    for intent in model.intents:
        true = {
            precision: _true_values(found) for (precision, of), found in model.truth.items() if of == intent
        }
        for objective in OBJECTIVES:
            chosen = rank(model.estimates(intent), replace(intent, minimise=objective))[
                0
            ].configuration.precision
            best = min(true, key=lambda precision: true[precision][objective])
            loss = true[chosen][objective] / true[best][objective] - 1
            asked = f"{objective} of {intent.prompt_tokens}+{intent.output_tokens} x{intent.batch_size}"
            made.append((model.name, asked, chosen, best, round(loss, 4)))
    return made


def _true_values(found: Found) -> dict[Objective, float]:
    return {
        "latency": found.latency_s,
        "cost": found.latency_s * found.memory_bytes,
        "memory": float(found.memory_bytes),
        "gpu_hours": found.latency_s,
    }


def _cost(model: Measured) -> dict[str, float]:
    """Device seconds. Those of the whole model on the same points, as often, in the same precisions, come of
    the estimates; of a group or of stages all devices together are taken to be busy as long as one alone."""
    points: dict[tuple[Configuration, Intent], int] = {}
    for sample in model.profile.latency:
        if sample.num_layers == 1 or model.profile.num_layers == 1:
            intent = Intent(
                prompt_tokens=sample.prompt_tokens,
                output_tokens=sample.output_tokens,
                batch_size=sample.batch_size,
            )
            points[sample.configuration, intent] = len(sample.seconds)
    longest: dict[tuple[Configuration, int, int], tuple[Intent, int]] = {}
    for (configuration, intent), times in points.items():
        key = (configuration, intent.prompt_tokens, intent.batch_size)
        if key not in longest or intent.output_tokens > longest[key][0].output_tokens:
            longest[key] = (intent, times)
    one_device = sum(
        times * _seconds_of(model, configuration, intent)
        for (configuration, _, _), (intent, times) in longest.items()
    )
    all_shapes = one_device * len(SHAPES)
    return {
        "profiling_s": model.profile.device_seconds,
        "whole_on_one_device_s": round(one_device, 2),
        "whole_all_configurations_s": round(all_shapes, 2),
        "times_cheaper_one_device": round(one_device / model.profile.device_seconds, 2),
        "times_cheaper": round(all_shapes / model.profile.device_seconds, 2),
        "profiling_peak_mib": round(model.profile.peak_bytes / 2**20, 1),
        "whole_peak_mib": round(model.whole_bytes / 2**20, 1),
    }


def _seconds_of(model: Measured, configuration: Configuration, intent: Intent) -> float:
    return next(one.latency_s.value for one in model.estimates(intent) if one.configuration == configuration)


def say_card(found: dict[str, Any]) -> None:
    for name, one in found["models"].items():
        latency, memory = list(map(abs, one["latency"].values())), list(map(abs, one["memory"].values()))
        say(
            f"{name:<18} latency {statistics.fmean(latency):6.1%} (worst {max(latency):.1%}),"
            f" memory {statistics.fmean(memory):.1%} (worst {max(memory):.1%})"
        )
        say(
            f"  profiling took {one['profiling_s']:.1f} s and {one['profiling_peak_mib']:.0f} MiB (the whole:"
            f" {one['whole_peak_mib']:.0f} MiB): {one['times_cheaper_one_device']:.1f} times cheaper than on"
            f" one device, {one['times_cheaper']:.1f} than in all configurations"
        )
    for model, asked, chosen, best, loss in found["choices"]:
        if loss > NEAR:
            say(f"{model}: for {asked} it chose {chosen}, and {best} is better: {loss:+.1%}")
    for what, bar in found["bars"].items():
        say(f"{what}: {bar['value']} (bar: {bar['bar']}): {'met' if bar['is_met'] else 'MISSED'}")
