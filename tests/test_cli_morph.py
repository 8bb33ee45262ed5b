"""`instar morph` and what `instar status` shows of shapes: against a gateway that answers by a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from instar.cli import main
from instar.morph_flags import layer_numbers
from instar.shapes import layers_text, ranges_text
from instar.status import morphs_table, policy_text, shown_morphs

RUNNING: dict[str, Any] = {
    "id": "a1",
    "kind": "swap",
    "target": "demo@w0",
    "state": "running",
    "reason": "",
    "decided": "ordered by hand: 2 more to int4",
    "numbers": {},
    "started": 100.0,
    "ended": None,
}
APPLIED = RUNNING | {
    "state": "applied",
    "reason": "2 layers",
    "numbers": {"pages": 12, "s": 0.5},
    "ended": 100.25,
}
DEFERRED = RUNNING | {"state": "deferred", "reason": "no pages", "ended": 101.0}


@dataclass
class Script:
    """`answers`: what the gateway says, in turn, to everything but /admin/state; the last is repeated."""

    url: str
    answers: list[tuple[int, Any]] = field(default_factory=list)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    instances: list[str] = field(default_factory=lambda: ["demo@w0"])

    def run(self, *argv: str) -> int:
        return main(["morph", *argv, "--url", self.url])


@pytest.fixture
def gateway() -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path == "/admin/state":
                status, answer = 200, {"instances": [{"id": name} for name in script.instances]}
            else:
                script.asked.append((self.command, self.path, json.loads(body) if body else None))
                status, answer = script.answers.pop(0) if len(script.answers) > 1 else script.answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST = do_PUT = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        script = Script(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield script
        server.shutdown()


def test_a_swap_is_followed_to_its_end(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(202, RUNNING), (200, RUNNING), (200, APPLIED)]
    assert gateway.run("swap", "--count", "2", "--precision", "int4", "--wait", "1.5") == 0
    order = {"wait_s": 1.5, "precision": "int4", "count": 2}
    wait = ("GET", "/admin/morphs/a1?wait=true", None)
    assert gateway.asked == [("POST", "/admin/instances/demo@w0/swap", order), wait, wait]
    out = capsys.readouterr().out
    assert out == "swap a1 of demo@w0: applied in 0.25 s\n  2 layers\n  pages 12, s 0.5\n"


def test_layers_and_parts_are_named_and_the_end_not_waited_for(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(202, RUNNING)]
    argv = ["swap", "org/m@w1", "--layers", "0,4-6", "--part", "ffn", "--precision", "full"]
    assert gateway.run(*argv, "--detach", "--json") == 0
    order = {"wait_s": 0.0, "precision": "full", "layers": [0, 4, 5, 6], "parts": ["ffn"]}
    assert gateway.asked == [("POST", "/admin/instances/org%2Fm@w1/swap", order)]
    assert json.loads(capsys.readouterr().out) == RUNNING


def test_a_morph_that_was_not_applied_is_exit_status_1(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(200, DEFERRED)]
    assert gateway.run("resize", "demo@w0", "40") == 1
    assert gateway.asked[0][2] == {"wait_s": 0.0, "blocks": 40}
    assert "deferred in 1.00 s\n  no pages\n" in capsys.readouterr().out
    assert gateway.run("show", "a1") == 0  # it was shown


def test_what_the_gateway_refuses_is_told_in_its_words(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(404, {"error": {"message": "no instance 'x'; there are: demo@w0"}})]
    assert gateway.run("resize", "x", "40") == 1
    assert "instar morph resize: /admin/instances/x/resize: 404: no instance 'x'" in capsys.readouterr().err
    gateway.instances = ["a@w0", "b@w0"]
    assert gateway.run("resize", "40") == 1
    assert "say which instance; there are: a@w0, b@w0" in capsys.readouterr().err


def test_a_cancelled_morph_is_waited_for(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [
        (202, RUNNING),
        (200, RUNNING | {"state": "failed", "reason": "cancelled", "ended": 101}),
    ]
    assert gateway.run("cancel", "a1") == 0
    assert gateway.asked[0][:2] == ("DELETE", "/admin/morphs/a1")
    assert "failed in 1.00 s\n  cancelled" in capsys.readouterr().out


def test_the_policy_is_shown_and_changed(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(200, {"revision": 1, "mode": "manual", "cooldown_s": 5.0})]
    assert gateway.run("policy") == 0
    assert gateway.asked.pop()[:2] == ("GET", "/admin/policy")
    assert capsys.readouterr().out == "revision = 1\nmode = manual\ncooldown_s = 5\n"
    assert gateway.run("policy", "mode=manual", "windows=3", "kv_usage_high=0.9") == 0
    assert gateway.asked == [("PUT", "/admin/policy", {"mode": "manual", "windows": 3, "kv_usage_high": 0.9})]
    assert gateway.run("policy", "windows") == 1
    assert "write it as windows=3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["swp"], "instar morph: there is no command 'swp'; did you mean swap?"),
        (["--count", "3"], "as in `instar morph swap --count`"),
        (["swap", "--count", "0", "--precision", "int4"], "'0' must be a whole number, 1 or more"),
        (["swap", "--layers", "6-4", "--precision", "int4"], "'6-4' is no range of layers"),
        (["swap", "--layers", "a", "--precision", "int4"], "'a' is no list of layers; write it as 0,4-6"),
        (["swap", "--precision", "int4"], "one of the arguments --layers --count is required"),
        (["swap", "--count", "1", "--precision", "int5"], "invalid choice: 'int5'"),
        (
            ["resize", "9", "--waite", "3"],
            "instar morph resize: there is no flag --waite; did you mean --wait?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_answered_with_what_was_meant(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["morph", *argv])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_without_a_verb_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["morph"]) == 0
    assert "instar morph swap --count 2" in capsys.readouterr().out


def test_lists_of_layers_are_read_as_they_are_written() -> None:
    assert layer_numbers("0,4-6") == [0, 4, 5, 6] and ranges_text([0, 4, 5, 6]) == "0,4-6"
    assert ranges_text([]) == ""


# --------------------------------------------------------------------------- status


def layer(attention: str = "full", ffn: str = "full") -> dict[str, str]:
    return {"attention": attention, "ffn": ffn}


def test_layers_are_told_in_few_words() -> None:
    assert layers_text([layer()] * 32) == "32 full"
    assert layers_text([layer()] * 3 + [layer("int4", "int4")] * 2) == "3 full, 2 int4 (3-4)"
    mixed = [layer(ffn="int4"), layer(), layer("int8", "int4"), layer(), layer()]
    assert layers_text(mixed) == "3 full, 1 int4 ffn (0), 1 int8 attention + int4 ffn (2)"
    assert layers_text([]) == ""


def test_status_shows_what_is_in_flight_and_the_last_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    old = [DEFERRED | {"id": f"old{i}"} for i in range(5)]
    shown = shown_morphs([*old, RUNNING, APPLIED | {"id": "last"}])
    assert [morph["id"] for morph in shown] == ["a1", "last", "old4", "old3"]
    Console(width=160).print(morphs_table(shown))
    out = capsys.readouterr().out
    for told in ("running", "0.25 s", "ordered by hand: 2 more to int4; no pages"):
        assert told in out


def test_the_policy_is_one_sentence() -> None:
    assert policy_text({"mode": "manual"}) == "policy: manual"
    thresholds = {"kv_usage_high": 0.85, "queue_delay_high_s": 0.1, "kv_usage_low": 0.5}
    policy = thresholds | {"mode": "default", "precision": "int4", "queue_delay_low_s": 0.02}
    assert policy_text(policy) == (
        "policy: default, to int4 above 85% KV use or 0.1 s of waiting, back below 50% and 0.02 s"
    )
