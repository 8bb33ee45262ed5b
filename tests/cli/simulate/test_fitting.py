"""The fit of a calibration: recorded runs whose costs are known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.policy import Slowdown
from instar.cli import main
from instar.replay import files
from instar.replay.files import RunFile
from instar.replay.outcomes import RequestOutcome
from instar.replay.statistics import Slo
from instar.simulate import calibration as calibrations
from instar.simulate.calibration import EngineCalibration
from instar.simulate.fitting import fit, machine_factor, non_negative
from tests.support.simulations import SMALL

LIMITS = SMALL.limits
FACTS = {
    "model": "small",
    "num_layers": 8,
    "max_model_len": 512,
    "order": SMALL.order,
    "block_tokens": 16,
    "layer_pages": SMALL.memory.layer_pages,
    "attention_pages": SMALL.memory.attention_pages,
    "kv_blocks": 47,
    "pages": {"budget": 2112, "weights": 1681, "kv": 376, "free": 55},
    "page_bytes": 16384,
}


def recorded(precision: str = "full", seconds: int = 40, seed: int = 0, **observed: Any) -> RunFile:
    """A run of SMALL, with `precision` in all halves: a sample each second, and a request."""
    rng = random.Random(seed)
    step = SMALL.below_full.get(precision, SMALL.step)  # type: ignore[call-overload]
    total = {"steps": 100, "step_s": 5.0, "prompt_tokens": 1000, "output_tokens": 500}
    samples = []
    for second in range(seconds):
        used = rng.randint(1, 40)
        shape = {"kv_blocks": 47, "kv_used": used, "running": 4, "waiting": 0, "halves": {precision: 16}}
        shape |= {"layers_below_full": 0 if precision == "full" else 8}
        samples.append({"at_s": float(second), "instances": {"small@w0": shape | total}})
        if second % 2:  # an even second ends with as many blocks as it began with
            continue
        steps, prompt, decodes = rng.randint(50, 200), rng.randint(0, 900), rng.randint(50, 900)
        took_s = step.seconds(prompt, decodes, steps * used * 16, steps)
        total = {
            "steps": total["steps"] + steps,
            "step_s": total["step_s"] + took_s,
            "prompt_tokens": total["prompt_tokens"] + prompt,
            "output_tokens": total["output_tokens"] + decodes,
        }
        samples.append(
            {"at_s": second + 0.5, "instances": {"small@w0": shape | total}},
        )
    about = {"name": precision, "model": "small", "began_at": 0.0, "source": "", "url": ""}
    outcome = RequestOutcome(0, 0.0, 100, 10, first_s=0.02, last_s=0.1, status=200, events=10)
    outcome.spans = [(10, samples[0]["instances"]["small@w0"]["layers_below_full"])]  # type: ignore[index]
    found = {"samples": samples, "morphs": [], "instances": {"small@w0": FACTS}} | observed
    return RunFile(about, Slo(2.0, 0.1), [outcome], found)


def test_the_costs_of_a_recorded_run_are_found() -> None:
    found = fit([recorded(), recorded("int8", seed=1), recorded("int4", seed=2)], LIMITS)
    wanted = SMALL.step
    assert found.step.fixed_s == pytest.approx(wanted.fixed_s, rel=0.05)
    assert found.step.prompt_token_s == pytest.approx(wanted.prompt_token_s, rel=0.05)
    assert found.step.decode_s == pytest.approx(wanted.decode_s, rel=0.05)
    for precision, costs in SMALL.below_full.items():
        assert found.below_full[precision].fixed_s == pytest.approx(costs.fixed_s, rel=0.1)
        assert found.below_full[precision].prompt_token_s == pytest.approx(costs.prompt_token_s, rel=0.1)
        assert found.below_full[precision].decode_s == pytest.approx(costs.decode_s, rel=0.1)
    assert found.memory == SMALL.memory
    assert found.covers == calibrations.Coverage(4, 100, ["full", "int8", "int4"])
    assert found.transit_s == pytest.approx(
        0.02 - found.step.fixed_s - 100 * found.step.prompt_token_s, abs=1e-5
    )
    assert found.error < 0.01 and "times of steps" in found.source


def test_a_slower_machine_is_told_by_its_runs_and_its_steps_take_longer() -> None:
    half_as_fast = SMALL.slowed(2.0)
    assert machine_factor(recorded("int8"), SMALL) == pytest.approx(1.0, rel=0.01)
    assert machine_factor(recorded("int8"), half_as_fast) == pytest.approx(0.5, rel=0.01)
    assert half_as_fast.slowdowns == pytest.approx(SMALL.slowdowns)
    assert machine_factor(RunFile({}, Slo(2.0, 0.1), [], {}), SMALL) == 1.0


def test_precisions_without_samples_are_not_covered() -> None:
    found = fit([recorded()], LIMITS)
    assert found.covers.precisions == ["full"]
    assert found.below_full["int4"] == found.step and found.slowdowns["int4"] == Slowdown(1.0, 1.0)


def test_swaps_tell_what_a_half_costs() -> None:
    numbers = {"halves_applied": 4, "bytes_copied": 2_000_000, "copy_seconds": 0.01, "boundary_seconds": 0.02}
    morphs = [{"kind": "swap", "state": "applied", "numbers": numbers}, {"kind": "swap", "state": "failed"}]
    found = fit([recorded(morphs=morphs)], LIMITS)
    assert (found.morph.half_s, found.morph.byte_s) == pytest.approx((0.005, 5e-9))
    assert found.morph.disk_byte_s == 0.0
    numbers["disk_seconds"] = 0.002
    assert fit([recorded(morphs=morphs)], LIMITS).morph.disk_byte_s == pytest.approx(1e-9)


def without_steps(run: RunFile, num_requests: int) -> RunFile:
    """Return a run as an older version recorded it: times of requests, and what ran."""
    for sample in run.observed["samples"]:
        shape = sample["instances"]["small@w0"]
        for name in ("steps", "step_s", "halves"):
            del shape[name]
    run.outcomes = []
    for number in range(num_requests):
        at_s = float(number % 30)
        sample = min(run.observed["samples"], key=lambda one: abs(one["at_s"] - (at_s + 0.5)))
        shape = sample["instances"]["small@w0"]
        shape["running"] = 1 + number % 5
        tpot_s = SMALL.step.fixed_s + shape["running"] * SMALL.step.decode_s
        tpot_s += shape["kv_used"] * 16 * SMALL.step.kv_token_s
        first_s = at_s + 0.5 - 4.5 * tpot_s
        run.outcomes.append(
            RequestOutcome(number, at_s, 100, 10, first_s=first_s, last_s=first_s + 9 * tpot_s, events=10)
        )
    return run


def test_an_older_run_is_fitted_by_the_times_of_its_requests() -> None:
    found = fit([without_steps(recorded(), 30)], LIMITS)
    assert "TPOT and TTFT" in found.source
    per_step = found.step.fixed_s + 3 * found.step.decode_s
    assert per_step == pytest.approx(SMALL.step.fixed_s + 3 * SMALL.step.decode_s, rel=0.4)


def test_no_cost_is_below_zero_and_rows_count_by_their_relative_error() -> None:
    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(table, np.array([3.0, 2.0, 1.0]))[1] == 0.0
    assert non_negative(table, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])
    assert non_negative(np.zeros((2, 2)), np.ones(2)) == [0.0, 0.0]


def kept(run: RunFile, folder: Path) -> str:
    folder.mkdir()
    files.write(folder, run)
    return str(folder)


def test_a_calibration_is_written_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [kept(recorded(name), tmp_path / name) for name in ("full", "int8", "int4")]
    out = tmp_path / "mine.json"
    assert main(["simulate", "--calibrate", *runs, "--out", str(out)]) == 0
    assert "covers 4 sequences at once, prompts of 100 tokens" in capsys.readouterr().out
    assert isinstance(calibrations.load(out), EngineCalibration)
    assert main(["simulate", "gamma:2:1:5:20:4", "--calibration", str(out)]) == 0


def test_runs_that_cannot_be_fitted_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*argv: str) -> str:
        assert main(["simulate", "--calibrate", *argv]) == 2
        return capsys.readouterr().err

    out = "--out", str(tmp_path / "mine.json")
    short = kept(recorded(seconds=5), tmp_path / "short")
    said = refused(short, *out)
    assert "short: 1 sample in full precision, and a fit needs 20: record a longer run" in said
    blind = kept(recorded(instances={}), tmp_path / "blind")
    assert "says nothing of the instance's layers and pages" in refused(blind, *out)
    other = recorded()
    other.about["model"] = "other"
    two = kept(recorded(), tmp_path / "one"), kept(other, tmp_path / "two")
    assert "of several models (other, small)" in refused(*two, *out)
    assert "--calibrate needs --out" in refused(two[0])
    assert "there is no run in it" in refused(str(tmp_path), *out)
    (tmp_path / "mine.json").write_text("")
    assert "is there already" in refused(two[0], *out)
