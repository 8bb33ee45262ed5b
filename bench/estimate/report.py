"""The numbers of `bench.estimate`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from bench.common.results import bar, say, say_bars
from bench.estimate.truth import Case, Found
from bus.deployments import Configuration, Estimate, Intent, Objective, Profile
from controller.planning.estimates import estimate_all
from controller.planning.intent import preference

MEMORY_BAR, LATENCY_BAR, CHOICE_BAR, COST_BAR = 0.05, 0.10, 0.9, 6.0
NEAR = 0.05  # distance from the truly best that is as good a choice
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
Choice = tuple[str, str, str, str, float]  # model, what for, chosen, truly best, how much worse the chosen is


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """One model: the profile of its fingerprints, and what is true."""

    name: str
    profile: Profile
    truth: dict[Case, Found]
    whole_bytes: int  # bytes that measuring the whole model takes at once, on one device

    def estimates(self, intent: Intent) -> list[Estimate]:
        """Return the estimates of all configurations that were run for this intent."""
        return [one for one in self._all(intent) if (one.configuration, intent) in self.truth]

    def of_shapes(self, intent: Intent) -> list[Estimate]:
        """Return the estimates of all shapes that were run for any intent."""
        run = {_shape(configuration) for configuration, _ in self.truth}
        return [one for one in self._all(intent) if _shape(one.configuration) in run]

    def _all(self, intent: Intent) -> list[Estimate]:
        run = [configuration for configuration, _ in self.truth]
        return estimate_all(
            self.profile,
            intent,
            degrees=sorted({one.tp for one in run}),
            max_stages=max(one.pp for one in run),
        )

    @property
    def intents(self) -> list[Intent]:
        return list(dict.fromkeys(intent for _, intent in self.truth))


@dataclass(frozen=True, slots=True)
class Error:
    """The errors of one case, as shares of the truth."""

    configuration: Configuration
    intent: Intent
    latency: float
    memory: float

    @property
    def name(self) -> str:
        return f"{_name(self.configuration)} {_requests(self.intent)}"


def report(models: Sequence[MeasuredModel]) -> dict[str, Any]:
    errors = {one.name: _errors(one) for one in models}
    all_errors = [error for found in errors.values() for error in found]
    choices = [choice for one in models for choice in _choices(one)]
    costs = {one.name: _cost(one) for one in models}
    latency, memory = (
        _spread(error.latency for error in all_errors),
        _spread(error.memory for error in all_errors),
    )
    good = sum(loss <= NEAR for *_, loss in choices) / len(choices)
    cheaper = statistics.fmean(cost["times_cheaper"] for cost in costs.values())
    bars = {
        "memory, mean error": bar(MEMORY_BAR, memory["mean"], memory["mean"] < MEMORY_BAR),
        "latency, mean error": bar(LATENCY_BAR, latency["mean"], latency["mean"] < LATENCY_BAR),
        "choices truly best or within 5 %": bar(CHOICE_BAR, good, good >= CHOICE_BAR),
    }
    shapes = _by_shape(all_errors)
    if len(shapes) > 1:  # else there is nothing that could be called all configurations
        what = "profiling, times cheaper than all configurations of the whole"
        bars[what] = bar(COST_BAR, cheaper, cheaper >= COST_BAR)
    return {
        "models": {
            name: {
                "latency": {error.name: round(error.latency, 4) for error in found},
                "memory": {error.name: round(error.memory, 4) for error in found},
                **costs[name],
            }
            for name, found in errors.items()
        },
        "latency": latency,
        "memory": memory,
        "shapes": shapes,
        "choices": [list(choice) for choice in choices],
        "bars": bars,
    }


def _errors(model: MeasuredModel) -> list[Error]:
    found = []
    for intent in model.intents:
        for one in model.estimates(intent):
            true = model.truth[one.configuration, intent]
            latency = one.latency_s.value / true.latency_s - 1
            memory = one.memory_bytes.value / true.memory_bytes - 1
            found.append(Error(one.configuration, intent, latency, memory))
    return found


def _by_shape(errors: Iterable[Error]) -> dict[str, Any]:
    """Return the errors of each degree and number of stages."""
    shapes: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        shapes[_shape_name(error.configuration)].append(error)
    return {
        shape: {
            "latency": _spread(error.latency for error in found),
            "memory": _spread(error.memory for error in found),
            "num_cases": len(found),
        }
        for shape, found in shapes.items()
    }


def _spread(errors: Iterable[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"mean": round(statistics.fmean(sizes), 4), "worst": round(max(sizes), 4)}


def _choices(model: MeasuredModel) -> list[Choice]:
    """Return the choice for every objective, of all configurations that were run."""
    made: list[Choice] = []
    for intent in model.intents:
        true = {one: _true_values(one, found) for (one, of), found in model.truth.items() if of == intent}
        for objective in OBJECTIVES:
            wanted = replace(intent, minimise=objective)
            first = min(model.estimates(intent), key=partial(preference, intent=wanted))  # whatever it loses
            chosen, best = first.configuration, min(true, key=lambda one: true[one][objective])
            loss = true[chosen][objective] / true[best][objective] - 1
            asked = f"{objective} of {_requests(intent)}"
            made.append((model.name, asked, _name(chosen), _name(best), round(loss, 4)))
    return made


def _true_values(configuration: Configuration, found: Found) -> dict[Objective, float]:
    return {
        "latency": found.latency_s,
        "cost": found.latency_s * found.memory_bytes,
        "memory": float(found.memory_bytes),
        "gpu_hours": configuration.num_devices * found.latency_s,
    }


# --------------------------------------------------------------------------- what it costs


def _cost(model: MeasuredModel) -> dict[str, Any]:
    """Return device seconds of profiling, and of measuring the whole model on the same points as often.

    All devices of a configuration are held as long as it is measured. Seconds of the whole model are the
    estimates, times what the runs took for each estimated second.
    """
    points = _points(model.profile)
    pace = _pace(model)
    by_shape: dict[str, float] = defaultdict(float)
    for intent, repetitions in points.items():
        for one in model.of_shapes(intent):
            times = repetitions.get(one.configuration.precision, 0) * one.configuration.num_devices
            seconds = one.latency_s.value * pace[one.configuration]
            by_shape[_shape_name(one.configuration)] += times * seconds
    profiling_s = model.profile.device_seconds
    return {
        "profiling_s": profiling_s,
        "runs_s": round(sum(one.num_devices * found.latency_s for (one, _), found in model.truth.items()), 2),
        "whole_s": {shape: round(seconds, 2) for shape, seconds in by_shape.items()},
        "times_cheaper_one_device": round(by_shape[_shape_name(Configuration())] / profiling_s, 2),
        "times_cheaper": round(sum(by_shape.values()) / profiling_s, 2),
        "profiling_peak_mib": round(model.profile.peak_bytes / 2**20, 1),
        "whole_peak_mib": round(model.whole_bytes / 2**20, 1),
    }


def _points(profile: Profile) -> dict[Intent, dict[str, int]]:
    """Return the requests that fingerprints answered on one device, and how often in each precision.

    Of the two output lengths only the longer counts: a run of the longer shows both.
    """
    longest: dict[tuple[int, int], int] = {}
    for sample in profile.latency:
        point = (sample.prompt_tokens, sample.batch_size)
        longest[point] = max(longest.get(point, 0), sample.output_tokens)
    points: dict[Intent, dict[str, int]] = defaultdict(dict)
    for sample in profile.latency:
        point = (sample.prompt_tokens, sample.batch_size)
        if sample.configuration.num_devices == 1 and sample.output_tokens == longest[point]:
            intent = Intent(prompt_tokens=point[0], batch_size=point[1], output_tokens=sample.output_tokens)
            points[intent][sample.configuration.precision] = len(sample.seconds)
    return points


def _pace(model: MeasuredModel) -> dict[Configuration, float]:
    """Return the seconds of the runs for each second that was estimated."""
    run: dict[Configuration, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for intent in model.intents:
        for one in model.estimates(intent):
            sums = run[one.configuration]
            sums[0] += model.truth[one.configuration, intent].latency_s
            sums[1] += one.latency_s.value
    return {configuration: true / estimated for configuration, (true, estimated) in run.items()}


# --------------------------------------------------------------------------- words


def say_card(found: dict[str, Any]) -> None:
    for name, one in found["models"].items():
        latency, memory = _spread(one["latency"].values()), _spread(one["memory"].values())
        say(f"{name:<18} {_in_words(latency, memory)}")
        say(
            f"  profiling took {one['profiling_s']:.1f} s and {one['profiling_peak_mib']:.0f} MiB (the whole:"
            f" {one['whole_peak_mib']:.0f} MiB): {one['times_cheaper_one_device']:.1f} times cheaper than on"
            f" one device, {one['times_cheaper']:.1f} than in all configurations"
        )
    for shape, one in found["shapes"].items():
        say(f"{shape:<18} {_in_words(one['latency'], one['memory'])}, {one['num_cases']} cases")
    for model, asked, chosen, best, loss in found["choices"]:
        if loss > NEAR:
            say(f"{model}: for {asked} it chose {chosen}, and {best} is better: {loss:+.1%}")
    say_bars(found["bars"])


def _in_words(latency: dict[str, float], memory: dict[str, float]) -> str:
    return (
        f"latency {latency['mean']:6.1%} (worst {latency['worst']:.1%}),"
        f" memory {memory['mean']:.1%} (worst {memory['worst']:.1%})"
    )


def _shape(configuration: Configuration) -> tuple[int, int]:
    return configuration.tp, configuration.pp


def _shape_name(configuration: Configuration) -> str:
    return f"tp{configuration.tp} pp{configuration.pp}"


def _name(configuration: Configuration) -> str:
    return f"{_shape_name(configuration)} {configuration.precision}"


def _requests(intent: Intent) -> str:
    return f"{intent.prompt_tokens}+{intent.output_tokens} x{intent.batch_size}"
