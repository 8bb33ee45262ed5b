"""The numbers of `bench.estimate`, of models whose truth is a formula."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.estimate_report import Measured, report
from bench.estimate_truth import Found
from bus.deployments import Configuration, Intent
from tests.known_truths import SPEED, Truth, profile_of

INTENTS = [
    Intent(prompt_tokens=128, output_tokens=32),
    Intent(prompt_tokens=300, output_tokens=16, batch_size=2),
]


def measured(truth: Truth, found: Truth | None = None) -> Measured:
    """found: what the whole model really is, where that is not what its fingerprints tell."""
    found = found or truth
    single = {precision: Configuration(precision=precision) for precision in SPEED}
    cases = {
        (precision, intent): Found(found.latency(one, intent), found.memory(one, intent), 2)
        for precision, one in single.items()
        for intent in INTENTS
    }
    profile = profile_of(truth, configurations=list(single.values()))
    return Measured("m", replace(profile, device_seconds=2.0, peak_bytes=2**20), cases, 2**30)


def test_what_grows_by_the_layer_is_estimated_without_error() -> None:
    found = report([measured(Truth())])
    assert found["memory"]["worst"] == pytest.approx(0.0, abs=1e-3)
    assert found["latency"]["worst"] < 0.02
    assert {loss for *_, loss in found["choices"]} == {0.0}
    bars = {what: bar["is_met"] for what, bar in found["bars"].items()}
    assert list(bars.values()) == [True] * 4, bars


def test_errors_are_shares_of_the_truth_and_a_worse_choice_is_counted() -> None:
    told, real = Truth(), Truth(other=4e-3, layer=8e-4, per_token=4e-6, per_sequence=4e-5, per_context=2e-8)
    found = report([measured(told, real)])
    assert found["latency"]["mean"] == pytest.approx(0.5, abs=0.01)
    one = measured(told)
    slow = {
        case: replace(each, latency_s=each.latency_s * (4 if case[0] == "int4" else 1))
        for case, each in one.truth.items()
    }
    choices = report([replace(one, truth=slow)])["choices"]
    assert {(chosen, best) for _, asked, chosen, best, _ in choices if asked.startswith("latency")} == {
        ("int4", "int8")
    }


def test_profiling_is_held_against_the_whole_model_on_the_same_points() -> None:
    truth = Truth(layers=64)
    one = measured(truth)
    cost = report([one])["models"]["m"]
    points = [(64, 1), (256, 1), (64, 4), (256, 4)]
    whole = sum(
        truth.seconds(64, Configuration(precision=precision), *point, 33)
        for precision in SPEED
        for point in points
    )
    assert cost["whole_on_one_device_s"] == pytest.approx(whole, rel=0.02)
    assert cost["times_cheaper"] == pytest.approx(6 * whole / 2.0, rel=0.02)
