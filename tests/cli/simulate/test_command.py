"""`instar simulate` as it is typed: what it prints and keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from instar.cli import main
from instar.replay import files
from instar.simulate import calibration as calibrations
from instar.simulate.calibration import Degree, EngineCalibration, StepCosts, TransformCosts
from instar.simulate.run import burst_note
from tests.support.paths import TRACES
from tests.support.simulations import SMALL

BURST = "gamma:8:2.5:10:60:30"


def written(folder: Path, **changes: Any) -> str:
    path = folder / "small.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(SMALL, **changes)))
    return str(path)


def err(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr().err
    assert found.count("\n") == 1, found
    return found


def test_the_calibration_of_the_demo_model_is_whole_and_covers_all_its_precisions() -> None:
    found = calibrations.load(None)
    assert found.model == "demo" and found.covers.precisions == found.variants
    assert found.step.fixed_s > 0 and found.step.prompt_token_s > 0 and found.step.decode_s > 0


def test_a_simulation_prints_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", BURST, "--workers", "2", "--calibration", written(tmp_path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    for word in ("TTFT", "TPOT", "violations", "preemptions", "morphs", "below full", "loss", "2 simulated"):
        assert word in out
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"]["workers"] == 2
    assert found["requests"] == found["served"] > 0


def test_a_simulation_is_kept_as_a_run_and_compared_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["simulate", BURST, "--calibration", written(tmp_path), "--no-plot"]
    assert main([*argv, "--out", str(tmp_path / "a")]) == 0
    run = files.read(tmp_path / "a")
    assert run.about["simulated"]["workers"] == 1
    assert run.observed["samples"][0]["instances"].keys() == {"small@w0"}
    assert main([*argv, "--beside", str(tmp_path / "a"), "--mode", "manual", "--json"]) == 0
    beside = json.loads(capsys.readouterr().out.splitlines()[-1])["beside"]
    assert beside.keys() >= {"TTFT p95, s", "TPOT p50, s", "swaps"}
    assert beside["TTFT p95, s"]["measured"] == run.summary["ttft_s"]["p95"]
    assert main([*argv, "--beside", str(tmp_path / "a")]) == 0
    assert "+0%" in capsys.readouterr().out


@pytest.mark.slow  # matplotlib takes seconds
def test_a_picture_beside_that_of_a_replay_is_drawn(tmp_path: Path) -> None:
    argv = ["simulate", BURST, "--calibration", written(tmp_path)]
    assert main([*argv, "--out", str(tmp_path / "a")]) == 0
    assert main([*argv, "--out", str(tmp_path / "b"), "--beside", str(tmp_path / "a")]) == 0
    for name in ("a/run.png", "b/run.png", "b/beside.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_recorded_trace_is_simulated(tmp_path: Path) -> None:
    trace = str(TRACES / "azure-2023.csv")
    assert main(["simulate", trace, "--calibration", written(tmp_path), "--scale-lengths", "0.02"]) == 0


def test_a_load_without_bursts_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steady = [n / 5 for n in range(300)]
    assert "no burst: its busiest 6 s ask for 1 times the mean" in burst_note(steady, 60.0)[0]
    assert burst_note([*steady, *(60 + n / 50 for n in range(300))], 66.0) == []
    assert burst_note([0.0], 0.0) == []
    calm = ["simulate", "gamma:5:0.2:30:40:10", "--calibration", written(tmp_path)]
    assert main(calm) == 0
    assert "has no burst" in " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------------------------------- refusals


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["simulate", *argv]) == 2
    return err(capsys)


def test_a_trace_that_cannot_be_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert "is empty: it has no request" in refused(capsys, str(empty))
    empty.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    assert "has no request" in refused(capsys, str(empty))
    assert "cannot be read" in refused(capsys, str(tmp_path / "none.csv"))
    assert "name a trace" in refused(capsys)


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_number_of_workers_below_one_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", BURST, f"--workers={count}"])
    assert f"--workers: '{count}' must be a whole number, 1 or more" in capsys.readouterr().err


def test_too_many_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--workers is 2000000; at most 1000000" in refused(capsys, BURST, "--workers", "2000000")


def test_a_calibration_for_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, BURST, "--calibration", written(tmp_path), "--model", "llama")
    assert "is for the model 'small', and --model is of 'llama': name another with --calibration" in said
    assert main(["simulate", BURST, "--out", str(tmp_path / "demo"), "--no-plot"]) == 0
    capsys.readouterr()
    beside = "--calibration", written(tmp_path), "--beside", str(tmp_path / "demo")
    assert "and the run --beside is of 'demo'" in refused(capsys, BURST, *beside)


def test_what_a_calibration_does_not_cover_is_refused_unless_it_may_be_extrapolated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    covers = calibrations.Coverage(running=2, prompt_tokens=20, precisions=["full"])
    path = written(tmp_path, covers=covers)
    said = refused(capsys, BURST, "--calibration", path)
    assert "prompts of " in said and "the longest measured has 20" in said
    assert "layers in int8 and int4, and measured are full" in said and "add --extrapolate" in said
    assert "prompts" not in refused(capsys, "gamma:50:1:4:3:40", "--calibration", path)
    said = refused(capsys, "gamma:50:1:4:3:40", "--calibration", path, "--mode", "manual")
    assert "3 sequences at once" in said and "at most 2 were measured" in said
    assert main(["simulate", BURST, "--calibration", path, "--extrapolate"]) == 0
    assert "beyond the calibration" in capsys.readouterr().out


BROKEN: dict[str, tuple[Any, str]] = {
    "not JSON": ("{", "is not JSON"),
    "another version": ({"version": 9}, "its version is 9"),
    "a list": ([], "its version is None"),
    "a run": ({"version": calibrations.VERSION, "about": {}}, "is not a calibration"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_calibration_is_refused(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, expected = BROKEN[what]
    path = tmp_path / "broken.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    said = refused(capsys, BURST, "--calibration", str(path))
    assert expected in said and "instar simulate --calibrate RUN_DIR --out FILE" in said
    assert "cannot be read" in refused(capsys, BURST, "--calibration", str(tmp_path / "none.json"))


def replaced(what: str, **changes: Any) -> EngineCalibration:
    return msgspec.structs.replace(SMALL, **{what: msgspec.structs.replace(getattr(SMALL, what), **changes)})


@pytest.mark.parametrize(
    ("calibration", "expected"),
    [
        (msgspec.structs.replace(SMALL, order=[0, 1]), "order is [0, 1], not one of 8 layers"),
        (replaced("memory", attention_pages={"full": 49}), "must have the same precisions"),
        (msgspec.structs.replace(SMALL, below_full={}), "below_full lacks int8"),
        (
            msgspec.structs.replace(SMALL, below_full=SMALL.below_full | {"int4": StepCosts(0, 0, 0, 0)}),
            "below_full of int4: a step takes no time; one of its four costs must be above 0",
        ),
        (replaced("limits", max_model_len=4096), "47 KV blocks of 16 tokens hold no sequence of 4096 tokens"),
        (
            msgspec.structs.replace(SMALL, losses={"int8": {"ffn": [0.1]}}),
            "losses in int8 of the attention needs 8",
        ),
    ],
)
def test_a_calibration_that_contradicts_itself_is_refused(
    calibration: EngineCalibration, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(msgspec.json.encode(calibration))
    assert expected in refused(capsys, BURST, "--calibration", str(path))


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = BURST, "--calibration", written(tmp_path), "--out", str(tmp_path / "a"), "--no-plot"
    assert main(["simulate", *argv]) == 0
    capsys.readouterr()
    assert "holds a run already" in refused(capsys, *argv)


def test_a_calibration_with_groups_is_not_simulated_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = TransformCosts(degrees={2: Degree(1.5, 4096)})
    assert main(["simulate", BURST, "--calibration", written(tmp_path, transform=costs)]) == 2
    assert "transform.degrees has 2" in err(capsys)
