"""Slips on the command line: what was meant is said, in two lines; words may stand on both sides of flags."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from instar.cli import main


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    told, where_help_is = capsys.readouterr().err.splitlines()
    assert where_help_is.startswith("See `instar") and where_help_is.endswith("--help` for usage.")
    return str(told)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["serv"], "there is no command 'serv'; did you mean serve?"),
        (["xyz"], "there is no command 'xyz'; there are serve, "),
        (["serve", "--prot", "9000"], "instar serve: there is no flag --prot; did you mean --port?"),
        (["serve", "--prot=9000"], "there is no flag --prot; did you mean --port?"),
        (["serve", "--max-queue", "3"], "INSTAR_GATEWAY__MAX_QUEUE, or gateway.max_queue in instar.toml"),
        (["complete", "a", "--max-token-count=3"], "did you mean --max-tokens?"),
        (["--port", "9000", "serve"], "as in `instar serve --port`"),
        (["--verison"], "there is no flag --verison; did you mean --version?"),
        (["status", "here"], "unexpected argument 'here'"),
        (["serve", "--port"], "--port: expected one argument"),
        (["status", "--js"], "there is no flag --js; did you mean --json?"),
        (["complete", "a", "--max-tok", "3"], "there is no flag --max-tok; did you mean --max-tokens?"),
        (["morph", "swap", "--count", "1", "--precision", "int4", "--det"], "there is no flag --det"),
        (["bench", "replay", "x", "--wind", "1:2"], "there is no flag --wind; did you mean --window?"),
        (["--vers"], "there is no flag --vers; did you mean --version?"),
        ([""], "there is no command ''; there are serve, "),
        (["drain", "w0", "--wait", "-5"], "argument --wait: '-5' must be a number, 0 or more"),
        (["complete", "a", "--temperature", "nan"], "'nan' must be a number from 0 to 2"),
        (["complete", "a", "--max-tokens", "0"], "'0' must be a whole number, 1 or more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_answered_with_what_was_meant(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refusal(capsys, *argv)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the request that `instar complete` would have sent."""
    sent: list[str] = []

    def stream_text(_: object, body: dict[str, Any]) -> Iterator[str]:
        sent.append(body["prompt"])
        yield ""

    monkeypatch.setattr("instar.commands.complete.model_names", lambda _: ["demo"])
    monkeypatch.setattr("instar.commands.complete.stream_text", stream_text)
    return sent


@pytest.mark.parametrize("argv", [["hello", "world"], ["hello", "--max-tokens", "3", "world"]])
def test_words_of_a_completion_are_joined(argv: list[str], texts: list[str]) -> None:
    assert main(["complete", *argv]) == 0
    assert texts == ["hello world"]


def test_a_completion_without_words_reads_standard_input_and_says_so_in_a_terminal(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    assert main(["complete"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stdin", Terminal("typed\n"))
    assert main(["complete"]) == 0
    assert "Ctrl-D" in capsys.readouterr().err
    assert main(["complete", ""]) == 0  # an empty text is a text: nothing is waited for
    assert texts == ["piped\n", "typed\n", ""]


def test_models_on_both_sides_of_a_flag_are_all_served(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[str] = []

    def serve(settings: Any) -> int:
        models.extend(settings.worker.models)
        return 0

    monkeypatch.setattr("instar.commands.serve.serve", serve)
    assert main(["serve", "one", "--port", "9000", "two"]) == 0
    assert models == ["one", "two"]
