"""The command line of the benchmarks: packages, their parts, and what the Makefile calls."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from bench.common.engines import EngineShape
from bench.common.parts import run_part
from bench.common.results import ROOT
from bench.gpu import parts as gpu_parts
from worker.engine.sequence import Limits

MAINS = sorted((ROOT / "bench").glob("*/__main__.py"))


def call_of(main: Path) -> tuple[str, list[str], str]:
    """The arguments of `run_part`: package, parts, default part."""
    (call,) = (node for node in ast.walk(ast.parse(main.read_text())) if isinstance(node, ast.Call))
    package, listed = call.args
    names = {"NAMES": gpu_parts.NAMES} if main.parent.name == "gpu" else {}
    parts = eval(compile(ast.Expression(listed), str(main), "eval"), {}, names)
    return ast.literal_eval(package), parts, next((ast.literal_eval(one.value) for one in call.keywords), "")


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.parent.name)
def test_each_part_of_a_package_is_a_module_with_a_main(main: Path) -> None:
    package, parts, default = call_of(main)
    assert package == f"bench.{main.parent.name}" and (not default or default in parts)
    for part in parts:
        tree = ast.parse((main.parent / f"{part}.py").read_text())
        assert "main" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_part_that_the_makefile_runs_exists() -> None:
    known = {package: (parts, default) for package, parts, default in map(call_of, MAINS)}
    text = (ROOT / "Makefile").read_text()
    for recipe in re.findall(r"^\t@.*(?:\n\t  .*)*", text, re.MULTILINE):
        for package, word in re.findall(r"-m (bench\.[a-z_]+)(?: (\$\$part))?", recipe):
            parts, default = known[package]
            named = re.findall(r"for part in ([a-z_ ]+);", recipe)[0].split() if word else [default]
            assert set(named) <= set(parts) and all(named), recipe
        for package, part in re.findall(r"'([a-z]+) ([a-z_]+)'", recipe if "bench.$$part" in recipe else ""):
            assert part in known[f"bench.{package}"][0], recipe


def test_without_a_part_the_parts_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    for words, status in ((["--help"], 0), ([], 2), (["nothing"], 2)):
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        with pytest.raises(SystemExit) as ended:
            run_part("bench.engine", ["offline", "single_stream"])
        assert ended.value.code == status
        assert "python -m bench.engine {offline,single_stream}" in capsys.readouterr().err


def test_a_default_part_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("bench.placement.compare.main", lambda: len(sys.argv))
    monkeypatch.setattr(sys, "argv", ["bench", "--quick"])
    with pytest.raises(SystemExit) as ended:
        run_part("bench.placement", ["compare"], default="compare")
    assert ended.value.code == 2


def test_benchmarks_have_every_limit_of_an_engine() -> None:
    """Limits are read by name, which no type checker follows."""
    assert {one.name for one in fields(Limits)} <= {one.name for one in fields(EngineShape)}
