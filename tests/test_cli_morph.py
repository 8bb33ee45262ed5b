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
from instar.client import GatewayProblem
from instar.morph_flags import layer_numbers
from instar.morph_workers import workers_for
from instar.shapes import layers_text, ranges_text
from instar.status import instances_table, morphs_table, policy_text, shape_lines, shown_morphs

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
    state: dict[str, Any] | None = None  # all of it, in place of `instances`

    def run(self, *argv: str) -> int:
        return main(["morph", *argv, "--url", self.url])


@pytest.fixture
def gateway() -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path == "/admin/state":
                named = {"instances": [{"id": name} for name in script.instances]}
                status, answer = 200, script.state or named
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


def test_a_change_of_degree_is_told_layer_by_layer(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    running = RUNNING | {"kind": "transform"}
    numbers = [{"layers_done": done, "layers": 8, "tp_before": 1, "tp_after": 2} for done in (1, 1, 5)]
    gateway.answers = [(202, running), *((200, running | {"numbers": one}) for one in numbers)]
    gateway.answers += [(200, running | {"state": "applied", "ended": 100.5, "numbers": {"layers_done": 8}})]
    argv = ["tp", "2", "--workers", "w1,w0", "--layers-per-step", "2", "--wait", "1"]
    assert gateway.run(*argv) == 0
    order = {"workers": ["w1", "w0"], "tp": 2, "layers_per_step": 2, "wait_s": 1.0}
    assert gateway.asked[0] == ("POST", "/admin/instances/transform", order)
    assert set(gateway.asked[1:]) == {("GET", "/admin/morphs/a1", None)}
    told = capsys.readouterr()
    assert told.err == "  1 of 8 layers at tp 2\n  5 of 8 layers at tp 2\n"
    assert told.out == "transform a1 of demo@w0: applied in 0.50 s\n  layers_done 8\n"


def test_workers_that_are_not_named_are_found(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(202, RUNNING | {"kind": "transform"})]
    gateway.state = cluster(instance("w0"), instance("w1"))
    assert gateway.run("tp", "2", "--detach") == 0
    assert gateway.asked[0][2] == {"workers": ["w0", "w1"], "tp": 2, "model": "demo", "wait_s": 0.0}
    assert gateway.run("tp", "4") == 1
    assert "has 1 other instance of demo at that degree" in capsys.readouterr().err


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
        (["tp", "two"], "'two' must be a whole number, 1 or more"),
        (["tp", "2", "--workers", "w0,,w1"], "'w0,,w1' is no list of workers; write it as w0,w1"),
        (["tp", "2", "--wrokers", "w0"], "there is no flag --wrokers; did you mean --workers?"),
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


# --------------------------------------------------------------------------- workers of a group


def instance(*workers: str, model: str = "demo", running: int | None = 0, **fields: Any) -> dict[str, Any]:
    counts = {"running": running, "waiting": running}
    named = {"id": f"{model}@{workers[0]}", "model": model, "workers": list(workers), "tp": len(workers)}
    return named | counts | {"state": "serving"} | fields


def cluster(*instances: dict[str, Any], **hosts: str) -> dict[str, Any]:
    """`hosts`: of workers that are not on "here"."""
    names = sorted({worker for one in instances for worker in one["workers"]})
    return {
        "instances": list(instances),
        "workers": [{"id": name, "host": hosts.get(name, "here")} for name in names],
    }


def test_the_least_loaded_of_one_host_become_a_group() -> None:
    busy = cluster(*(instance(f"w{n}", running=load) for n, load in enumerate([3, 1, None, 2])))
    assert workers_for(busy, 2) == (["w1", "w3"], "demo")
    assert workers_for(busy, 2, "demo@w2") == (["w1", "w2"], "demo")
    assert workers_for(busy, 4) == (["w0", "w1", "w2", "w3"], "demo")
    apart = cluster(*busy["instances"], w3="there")
    assert workers_for(apart, 2) == (["w0", "w1"], "demo")


def test_groups_become_larger_groups_or_part() -> None:
    pairs = cluster(instance("w0", "w1"), instance("w2", "w3"))
    assert workers_for(pairs, 4)[0] == ["w0", "w1", "w2", "w3"]
    assert workers_for(pairs, 1, "demo@w2")[0] == ["w2", "w3"]
    assert workers_for(cluster(instance("w3", "w1", "w0", "w2")), 2)[0] == ["w3", "w1", "w0", "w2"]


def test_what_is_so_already_may_be_ordered() -> None:
    assert workers_for(cluster(instance("w0"), instance("w1")), 1) == (["w0"], "demo")
    assert workers_for(cluster(instance("w0", "w1")), 2) == (["w0", "w1"], "demo")


def test_a_model_may_be_named_where_there_are_several() -> None:
    both = cluster(*(instance(name, model=model) for name in ("w0", "w1") for model in ("a", "b")))
    assert workers_for(both, 2, model="b") == (["w0", "w1"], "b")
    with pytest.raises(GatewayProblem, match="no instance of c serves; there are: a@w0"):
        workers_for(both, 2, model="c")


@pytest.mark.parametrize(
    ("state", "tp", "named", "told"),
    [
        (cluster(instance("w0", "w1"), instance("w2")), 2, "demo@w9", "no instance demo@w9 serves"),
        (cluster(instance("w0", "w1"), instance("w2", "w3")), 1, None, "say which instance"),
        (cluster(instance("w0", model="a"), instance("w1", model="b")), 2, None, "a@w0 (tp 1), b@w1 (tp 1)"),
        (cluster(instance("w0"), instance("w1"), w1="far"), 2, None, "has 0 other instances"),
        (cluster(instance("w0"), instance("w1", state="draining")), 2, None, "has 0 other instances"),
        (cluster(), 2, None, "no instance of any model serves; there are: none"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_it_is_not_clear_who_is_meant_it_asks(
    state: dict[str, Any], tp: int, named: str | None, told: str
) -> None:
    with pytest.raises(GatewayProblem) as problem:
        workers_for(state, tp, named)
    assert told in str(problem.value)


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


def test_status_shows_groups_and_layers_between_two_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    group = instance("w2", "w0", layer_tp=[1] * 5 + [2] * 3)
    Console(width=160).print(instances_table([group]))
    assert "tp2" in capsys.readouterr().out
    assert shape_lines([group]) == [
        "demo@w2: shards on w2, w0, in this order",
        "demo@w2: layers 0-4 at tp1, 5-7 at tp2",
    ]
    assert shape_lines([instance("w0", layer_tp=[1] * 8)]) == []


def test_the_policy_is_one_sentence() -> None:
    assert policy_text({"mode": "manual"}) == "policy: manual"
    thresholds = {"kv_usage_high": 0.85, "queue_delay_high_s": 0.1, "kv_usage_low": 0.5}
    policy = thresholds | {"mode": "default", "precision": "int4", "queue_delay_low_s": 0.02}
    assert policy_text(policy) == (
        "policy: default, to int4 above 85% KV use or 0.1 s of waiting, back below 50% and 0.02 s"
    )
