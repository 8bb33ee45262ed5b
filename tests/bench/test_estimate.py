"""The numbers of `bench.estimate`, of models whose truth is a formula."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from bench.estimate.measure import fits
from bench.estimate.report import MeasuredModel, report
from bench.estimate.truth import Case, Found
from bus.deployments import Configuration, Intent
from tests.support.known_truths import PAIR, SINGLE, SPEED, STAGED, Truth, profile_of

INTENTS = [
    Intent(prompt_tokens=128, output_tokens=32),
    Intent(prompt_tokens=300, output_tokens=16, batch_size=2),
]
SHAPES = {"tp1 pp1": SINGLE, "tp2 pp1": PAIR, "tp1 pp2": STAGED}
LINKED = Truth(hop=1e-4, all_reduce=1e-5)


def measured(truth: Truth, found: Truth | None = None) -> MeasuredModel:
    """found: what the whole model really is, where that is not what its fingerprints tell. In stages only the
    requests that come alone were run."""
    found = found or truth
    configurations = [
        replace(shape, precision=precision) for shape, precision in itertools.product(SHAPES.values(), SPEED)
    ]
    cases = {
        (one, intent): Found(found.latency(one, intent), found.memory(one, intent), 2)
        for one, intent in itertools.product(configurations, INTENTS)
        if one.pp == 1 or intent.batch_size == 1
    }
    profile = profile_of(truth, configurations=configurations)
    return MeasuredModel("m", replace(profile, device_seconds=2.0, peak_bytes=2**20), cases, 2**30)


def slowed(one: MeasuredModel, configuration: Configuration, times: float) -> MeasuredModel:
    def latency(case: Case, found: Found) -> float:
        return found.latency_s * (times if case[0] == configuration else 1.0)

    slow = {case: replace(found, latency_s=latency(case, found)) for case, found in one.truth.items()}
    return replace(one, truth=slow)


def test_what_grows_by_the_layer_is_estimated_without_error() -> None:
    found = report([measured(LINKED)])
    assert found["memory"]["worst"] == pytest.approx(0.0, abs=1e-3)
    assert found["latency"]["worst"] < 0.02
    assert {loss for *_, loss in found["choices"]} == {0.0}
    bars = {what: bar["is_met"] for what, bar in found["bars"].items()}
    assert list(bars.values()) == [True] * 4, bars


def test_errors_are_told_of_each_shape_that_was_run() -> None:
    shapes = report([measured(Truth())])["shapes"]
    assert {name: shape["num_cases"] for name, shape in shapes.items()} == {
        "tp1 pp1": 6,
        "tp2 pp1": 6,
        "tp1 pp2": 3,
    }
    one = measured(Truth())
    for precision in SPEED:
        one = slowed(one, Configuration(tp=2, precision=precision), 2.0)
    found = report([one])
    assert found["shapes"]["tp2 pp1"]["latency"]["mean"] == pytest.approx(0.5, abs=0.01)
    assert found["shapes"]["tp1 pp1"]["latency"]["worst"] < 0.02


def test_errors_are_shares_of_the_truth_and_a_worse_choice_is_counted() -> None:
    told, real = Truth(), Truth(other=4e-3, layer=8e-4, per_token=4e-6, per_sequence=4e-5, per_context=2e-8)
    found = report([measured(told, real)])
    assert found["latency"]["mean"] == pytest.approx(0.5, abs=0.01)
    slow = slowed(measured(told), Configuration(tp=2, precision="int4"), 4.0)
    choices = [choice for choice in report([slow])["choices"] if choice[1].startswith("latency")]
    assert {(chosen, best) for _, _, chosen, best, _ in choices} == {("tp2 pp1 int4", "tp2 pp1 int8")}
    assert all(loss > 0.05 for *_, loss in choices)


def test_profiling_is_held_against_the_whole_model_on_the_same_points_in_what_was_run() -> None:
    """All devices of a configuration are held while it is measured, for as long as its runs show."""
    truth = Truth(layers=64)
    points = [(64, 1), (256, 1), (64, 4), (256, 4)]

    def held(shape: Configuration) -> float:
        return shape.num_devices * sum(
            truth.seconds(64, replace(shape, precision=precision), *point, 33)
            for precision, point in itertools.product(SPEED, points)
        )

    one = measured(truth)
    cost = report([one])["models"]["m"]
    assert cost["whole_s"]["tp1 pp1"] == pytest.approx(held(SINGLE), rel=0.02)
    assert cost["whole_s"]["tp2 pp1"] == pytest.approx(held(PAIR), rel=0.02)
    assert cost["times_cheaper"] == pytest.approx(sum(cost["whole_s"].values()) / 2.0, rel=0.01)
    for precision in SPEED:
        one = slowed(one, Configuration(tp=2, precision=precision), 2.0)
    slower = report([one])["models"]["m"]["whole_s"]
    assert slower["tp2 pp1"] == pytest.approx(2 * held(PAIR), rel=0.02)
    assert slower["tp1 pp1"] == pytest.approx(cost["whole_s"]["tp1 pp1"])


def test_more_devices_at_once_than_cores_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    alone, many = Intent(batch_size=1), Intent(batch_size=8)
    four = Configuration(pp=4)
    assert [fits(shape, alone, 1) for shape in (SINGLE, PAIR, STAGED, four)] == [True] * 4
    assert [fits(shape, many, 1) for shape in (SINGLE, PAIR, STAGED, four)] == [True, True, True, False]
    assert not fits(PAIR, alone, 2)
