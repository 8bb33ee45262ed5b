"""`instar model`, `plan`, `deploy` and `retire`, against a gateway that answers by a script."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bus.levers import NEVER_S
from bus.precisions import PRECISIONS
from bus.settings import GatewaySettings, Settings, WorkerSettings
from instar.commands import deploy
from instar.commands.serve import ready_to_start
from instar.output.deployments import deployment_line
from instar.output.plan_table import SHOWN, marked, plan_table, reasons_of, spread, wide_lines
from tests.support.cli_gateway import Script, be_watched

pytest_plugins = ["tests.support.cli_fixtures"]

CARD: dict[str, Any] = {
    "name": "chat",
    "path": "/models/chat",
    "num_layers": 8,
    "state": "profiled",
    "reason": "measured on cpu",
    "progress": "",
}
PROFILING = CARD | {"state": "profiling", "reason": "", "progress": "on w0: 3 of 8 requests"}
WAITING: dict[str, Any] = {
    "id": "a1",
    "model": "chat",
    "state": "waiting",
    "reason": "",
    "instance": "",
    "stages": [],
    "expected": None,
    "configuration": None,
    "kv": None,
}
KV = {"blocks": 4096, "tokens": 65536, "bytes": 512 << 20}


def quantity(value: float, basis: str = "extrapolated", spread: float = 0.0) -> dict[str, Any]:
    return {"value": value, "low": value * (1 - spread), "high": value * (1 + spread), "basis": basis}


def estimate(tp: int = 1, precision: str = "full", **fields: Any) -> dict[str, Any]:
    numbers = {
        "memory_bytes": quantity(64 << 20),
        "latency_s": quantity(0.123456, spread=0.08),
        "cost": quantity(12345678.0, "assumed"),
        "gpu_hours": quantity(3.4e-5),
        "loss": quantity(0.0, "measured"),
        "refusal": "",
    }
    return numbers | {"configuration": {"tp": tp, "pp": 1, "precision": precision}} | fields


SERVING = WAITING | {
    "state": "serving",
    "instance": "chat@w0",
    "stages": [{"workers": ["w0"], "first": 0, "end": 8}],
    "expected": estimate(),
    "configuration": estimate()["configuration"],
}
STAYS = (
    "it stays queued, and is loaded when there is room: `instar deployments a1` shows it, `instar retire a1` "
    "ends it (--wait S: how long to wait for one)"
)
NO_ROOM = "needs 5 bytes; to make room: retire deployment b2 (7 bytes)"
PLAN = {
    "model": "chat",
    "intent": {"cost": "memory_seconds"},
    "unmet": "",
    "estimates": [estimate(), estimate(precision="int4", loss=None), estimate(2, refusal=NO_ROOM)],
}


def test_a_model_is_added_and_waited_for(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    be_watched(monkeypatch)
    gateway.answers = [(201, PROFILING), (200, PROFILING), (200, CARD)]
    assert gateway.main("model", "add", str(tmp_path), "--name", "chat") == 0
    assert gateway.asked[0] == ("POST", "/admin/models", {"path": str(tmp_path), "name": "chat"})
    assert gateway.asked[1] == ("GET", "/admin/models/chat", None)
    told = capsys.readouterr()
    assert told.out == "chat: profiled (measured on cpu)\n"
    assert "profiling: on w0: 3 of 8 requests" in told.err


def test_a_model_that_cannot_be_measured_is_exit_status_1(gateway: Script, tmp_path: Path) -> None:
    gateway.answers = [(201, CARD | {"state": "failed"})]
    assert gateway.main("model", "add", str(tmp_path)) == 1


def test_models_are_listed_and_removed(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(200, {"models": [CARD]})]
    assert gateway.main("model", "list") == 0
    assert "profiled" in capsys.readouterr().out
    gateway.answers = [(200, {"models": []})]
    assert gateway.main("model", "list") == 0
    assert "`instar model add DIR`" in capsys.readouterr().out
    gateway.answers = [(200, CARD)]
    assert gateway.main("model", "remove", "org/chat") == 0
    assert gateway.asked[-1] == ("DELETE", "/admin/models/org%2Fchat", None)


def test_a_plan_shows_every_configuration_with_what_its_numbers_rest_on(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(200, CARD), (200, PLAN)]
    argv = ["plan", "chat", "--max-latency", "0.5", "--max-loss", "1%", "--prompt-tokens", "1000"]
    assert gateway.main(*argv) == 0
    query = "max_latency_s=0.5&max_loss=0.01&prompt_tokens=1000"
    assert gateway.asked[-1] == ("GET", f"/admin/models/chat/plan?{query}", None)
    out = capsys.readouterr().out
    assert "tp1 pp1 int4" in out and "64~" in out and "0.123~ ±8%" in out and "no (1)" in out
    assert "11.8?" in out  # MiB s
    assert "(1) needs 5 bytes" in out
    assert "~ extrapolated, ? assumed" in out
    assert "the KV of 1 request of 256+64 tokens; a deployment takes its fair share" in " ".join(out.split())


def test_a_plan_shows_the_ten_best_and_says_how_many_more_there_are(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [estimate(precision=f"p{number}", refusal="x" if number > 8 else "") for number in range(24)]
    answers = [(200, CARD), (200, PLAN | {"estimates": rows})]
    gateway.answers = list(answers)
    assert gateway.main("plan", "chat") == 0
    out = capsys.readouterr().out
    assert out.count("tp1 pp1") == SHOWN == 10 and "14 more: --all" in out
    gateway.answers = answers
    assert gateway.main("plan", "chat", "--all") == 0
    out = capsys.readouterr().out
    assert out.count("tp1 pp1") == 24 and "--all" not in out


def test_a_plan_tells_what_a_worker_takes_where_the_degree_stays(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: dict[str, Any] = {"fixed_worker_bytes": 24 << 20, "group_worker_bytes": 96 << 20}
    only_fixed = sizes | {"group_worker_bytes": 0}
    rows = [estimate(2, **sizes), estimate(4, is_fixed=True, **only_fixed)]
    gateway.answers = [(200, CARD), (200, PLAN | {"estimates": rows})]
    assert gateway.main("plan", "chat") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fixed: each worker holds a part of the model, and the degree stays" in out
    stays = "MiB on each worker if the degree stays"
    assert f"tp2 pp1 full: 24 {stays}, 96 in a group that may part again" in out
    assert f"tp4 pp1 full: 24 {stays}" in out


@pytest.mark.parametrize(
    ("is_fixed", "group_mib", "text"),
    [
        (True, 96, ", fixed: 24.0 MiB on each; 96.0 MiB would be needed to part again"),
        (True, 0, ", fixed: 24.0 MiB on each"),
        (False, 96, ": 96.0 MiB on each, to part again; 24.0 MiB if the degree stayed"),
    ],
)
def test_a_deployment_of_ranks_tells_what_each_takes(
    gateway: Script, capsys: pytest.CaptureFixture[str], is_fixed: bool, group_mib: int, text: str
) -> None:
    sizes: dict[str, Any] = {"fixed_worker_bytes": 24 << 20, "group_worker_bytes": group_mib << 20}
    stages = [{"workers": ["w0", "w1"], "first": 0, "end": 8}]
    both = {"is_fixed": is_fixed, "stages": stages, "expected": estimate(2, **sizes)}
    gateway.answers = [(200, SERVING | both)]
    assert gateway.main("deployments", "a1") == 0
    out = capsys.readouterr().out
    assert f"chat@w0: tp2 pp1 full on w0+w1{text} expected: " in " ".join(out.split())


def test_a_plan_leaves_out_what_the_intent_fixes_otherwise(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = PLAN | {"intent": {"cost": "memory", "tp": 2, "pp": None}}
    gateway.answers = [(200, CARD), (200, plan)]
    assert gateway.main("plan", "chat", "--tp", "2") == 0
    out = capsys.readouterr().out
    assert "tp2 pp1" in out and "tp1 pp1" not in out and "2 more: --all" in out


def test_a_spread_that_tells_nothing_is_marked_and_what_to_do_is_said() -> None:
    wide, guess = quantity(0.1, spread=0.97), quantity(0.1, "assumed", spread=0.6)
    rows = [estimate(), estimate(precision="int4", latency_s=wide), estimate(2, latency_s=guess)]
    out = io.StringIO()
    Console(file=out, width=80).print(plan_table(rows, {"cost": "memory_seconds"}))
    assert "0.1~ ±97%!" in out.getvalue() and "±8%!" not in out.getvalue()
    measured, assumed = wide_lines(rows, CARD)
    assert "delete /models/chat/instar/fingerprint-*.json" in measured
    assert "`instar model add /models/chat --name chat`" in measured
    assert "without a measurement" in assumed
    assert not list(wide_lines(rows[:1], CARD))


def test_the_table_fits_80_columns() -> None:
    out = io.StringIO()
    huge = estimate(8, "full", memory_bytes=quantity(9e11), latency_s=quantity(1234.5, spread=0.5))
    rows = [huge, estimate(8, "int8", cost=quantity(9e15), gpu_hours=quantity(1.5), refusal="x")]
    Console(file=out, width=80).print(plan_table(rows, {"cost": "memory_seconds"}))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("tp8 pp1 full" in line and "yes" in line for line in lines)
    assert "…" not in out.getvalue()
    assert reasons_of(rows) == {"x": 1}


def test_numbers_say_what_they_rest_on() -> None:
    assert marked(quantity(0.00012345, "measured")) == "0.000123"
    assert marked(quantity(12345.6)) == "12346~"
    assert marked(quantity(2.0, "assumed")) == "2?"
    assert spread(quantity(2.0)) == 0.0
    assert spread(quantity(2.0, spread=0.25)) == 0.25


def test_a_plan_that_nothing_meets_says_the_best_there_is(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(200, CARD), (200, PLAN | {"unmet": "the nearest is tp1 pp1 full"})]
    assert gateway.main("plan", "chat", "--max-latency", "0.001") == 1
    assert "the nearest is tp1 pp1 full" in capsys.readouterr().out


def test_a_plan_is_drawn(gateway: Script, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gateway.answers = [(200, CARD), (200, PLAN)]
    assert gateway.main("plan", "chat", "--plot", str(tmp_path / "p.png"), "--json") == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_deployment_is_followed_until_it_serves(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_watched(monkeypatch)
    loading = WAITING | {"state": "loading", "reason": "w0: layer 3 of 8"}
    gateway.answers = [(202, WAITING), (200, PROFILING), (200, CARD), (200, loading), (200, SERVING)]
    gateway.answers.append((200, SERVING | {"kv": KV}))
    assert gateway.main("deploy", "chat", "--minimise", "latency", "--batch-size", "4") == 0
    order = {"model": "chat", "intent": {"minimise": "latency", "batch_size": 4}}
    assert gateway.asked[0] == ("POST", "/admin/deployments", order)
    told = capsys.readouterr()
    assert told.out == (
        "deployment a1 of chat: serving\n  chat@w0: tp1 pp1 full on w0\n"
        "  expected: 64~ MiB, 0.123~ s a request, for 1 request of 256+64 tokens\n"
        "  has: 512 MiB of KV, 65536 tokens\n"
    )
    assert "loading: w0: layer 3 of 8" in told.err


def test_a_deployment_that_does_not_fit_in_time_says_what_would_make_room(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "needs 6 bytes; to make room: retire deployment b2 (8 bytes)"  # other numbers are no news
    gateway.answers = [(202, WAITING | {"reason": NO_ROOM}), (200, WAITING | {"reason": more})]
    assert gateway.main("deploy", "chat", "--wait", "0.1") == 1
    told = capsys.readouterr()
    assert f"deployment a1 of chat: waiting ({more})" in told.out
    assert told.err.splitlines() == [f"  waiting: {NO_ROOM}", STAYS]


def test_a_deployment_without_room_is_not_waited_for_as_long_as_one_that_loads(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "STUCK_S", 0.1)
    loading = WAITING | {"state": "loading", "reason": "w0 loads it"}
    gateway.answers = [(202, WAITING), (200, CARD), (200, loading), (200, loading)]
    gateway.answers.append((200, WAITING | {"reason": NO_ROOM}))
    assert gateway.main("deploy", "chat") == 1
    assert capsys.readouterr().err.splitlines()[-1] == STAYS


def test_ctrl_c_says_that_a_deployment_stays(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("instar.client.time.sleep", interrupted)
    gateway.answers = [(202, WAITING | {"reason": NO_ROOM}), (200, CARD), (200, WAITING)]
    assert gateway.main("deploy", "chat") == 130
    assert capsys.readouterr().err.splitlines()[-1] == STAYS


def test_a_deployment_need_not_be_waited_for(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(202, WAITING)]
    fixed = ("--pp", "2", "--precision", "int8")
    assert gateway.main("deploy", "chat", "--detach", "--json", *fixed) == 0
    assert json.loads(capsys.readouterr().out) == WAITING
    order = {"model": "chat", "intent": {"pp": 2, "precision": "int8"}}
    assert gateway.asked == [("POST", "/admin/deployments", order)]


def test_a_deployment_is_retired(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answers = [(202, SERVING | {"state": "retiring"}), (200, SERVING | {"state": "retired"})]
    assert gateway.main("retire", "a1") == 0
    assert gateway.asked[0] == ("DELETE", "/admin/deployments/a1", None)
    assert capsys.readouterr().out == "deployment a1 of chat: retired\n"


def test_deployments_are_listed_with_what_they_have_and_what_they_wait_for(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WAITING | {"id": "b2", "reason": NO_ROOM}
    gateway.answers = [
        (200, {"deployments": [SERVING | {"kv": KV}, waiting, WAITING | {"state": "retired"}]})
    ]
    assert gateway.main("deployments") == 0
    out = capsys.readouterr().out
    assert "tp1 pp1 full" in out and "512" in out and "65536" in out and "retired" not in out
    assert f"b2: {NO_ROOM}" in " ".join(out.split())
    assert gateway.main("deployments", "--all", "--json") == 0
    assert [one["state"] for one in json.loads(capsys.readouterr().out)] == ["serving", "waiting", "retired"]
    gateway.answers = [(200, {"deployments": [WAITING | {"state": "retired"}]})]
    assert gateway.main("deployments") == 0
    assert (
        capsys.readouterr().out
        == "nothing is deployed (1 retired: --all); `instar deploy MODEL` deploys a model\n"
    )
    gateway.answers = [(200, SERVING | {"kv": KV})]
    assert gateway.main("deployments", "a1") == 0
    assert gateway.asked[-1] == ("GET", "/admin/deployments/a1", None)
    assert "has: 512 MiB of KV" in capsys.readouterr().out


def test_what_was_measured_of_a_model_is_shown(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    profile = {"device": "cpu", "version": "0.1.0", "samples": 96, "device_seconds": 12.34, "degrees": [1, 2]}
    profile |= {"fixed_degrees": [2, 4]}
    profile |= {"peak_bytes": 64 << 20, "loss": {"int8": 0.001}, "precisions": ["full", "int8", "int4"]}
    profile |= {"prompt_tokens": [32, 128], "batch_sizes": [1, 4], "links": ["all_reduce", "hop"]}
    gateway.answers = [(200, CARD | {"context": 1024, "profiles": [profile]})]
    assert gateway.main("model", "show", "chat") == 0
    assert capsys.readouterr().out.splitlines() == [
        "chat: profiled (measured on cpu)",
        "  /models/chat: 8 layers, a context of 1024 tokens",
        "  measured on cpu by Instar 0.1.0: 96 samples, 12.3 s, 64 MiB at most",
        "    prompts of 32, 128 tokens in batches of 1, 4; precisions: full, int8, int4",
        "    tensor-parallel degrees: 1, 2 of groups that may part again, 2, 4 that stay",
        "    between two workers: all-reduces and hops of stages",
        "    loss of perplexity: int8 0.1%",
        "    loss of perplexity by int4: unknown; run `instar profile --precision P` on the folder, then "
        "register it again",
    ]
    profile |= {"loss": {"int4": 0.0}, "precisions": ["int4"]}
    gateway.answers = [(200, CARD | {"profiles": [profile]})]
    assert gateway.main("model", "show", "chat") == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "    the checkpoint is quantised: its layers are in int4 alone, and no swap frees memory"
    )


def test_what_the_gateway_refuses_is_told_in_its_words(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers = [(404, {"error": {"message": "no deployment 'a2'; did you mean 'a1'?"}})]
    assert gateway.main("retire", "a2") == 1
    assert "instar retire: /admin/deployments/a2: 404: no deployment 'a2'; did" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["deploy", "chat", "--minimise", "latncy"], "did you mean latency?"),
        (["deploy", "chat", "--max-latncy", "1"], "did you mean --max-latency?"),
        (["deploy", "chat", "--max-latency", "soon"], "'soon' must be a number above 0"),
        (["plan", "chat", "--max-loss", "1000%"], "'1000%' must be a share from 0 to 1, as 1% or 0.01"),
        (["plan", "chat", "--max-loss", "much"], "'much' must be a share from 0 to 1, as 1% or 0.01"),
        (["deploy", "chat", "--precision", "int5"], f"'int5' is none of {', '.join(PRECISIONS)}"),
        (["model", "ad", "x"], "did you mean add?"),
        (["deplo", "x"], "did you mean deploy?"),
    ],
)
def test_slips_are_answered_with_what_was_meant(
    gateway: Script, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        gateway.main(*argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_workers_may_start_without_a_model() -> None:
    settings = Settings(worker=WorkerSettings(may_be_empty=True), gateway=GatewaySettings(port=0))
    assert ready_to_start(settings).worker.models == []


def test_the_status_shows_deployments_that_were_not_retired() -> None:
    shown = [deployment_line(one) for one in (SERVING | {"kv": KV}, WAITING | {"reason": NO_ROOM})]
    assert shown == [
        "deployment a1 of chat: serving (chat@w0, 512 MiB of KV, 65536 tokens)",
        f"deployment a1 of chat: waiting ({NO_ROOM})",
    ]


def option(lever: str, **fields: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {
        **dict.fromkeys(("tp", "layers", "blocks", "nbytes"), 0),
        **dict.fromkeys(("tokens_per_s", "loss", "stalled_s", "duration_s", "price_s", "cost_s"), 0.0),
        "lever": lever,
        "targets": [],
        "precision": "full",
        "basis": "assumed",
        "refusal": "",
        "is_taken": False,
    }
    return empty | fields


WEIGHED: dict[str, Any] = {
    "note": "",
    "plans": [
        {
            "model": "demo",
            "subject": "demo@w0",
            "need": "4 requests wait for 30 KV blocks",
            "options": [
                option("queue", targets=["demo@w0"], duration_s=NEVER_S),
                option("move", targets=["demo@w0", "demo@w1"], blocks=30, cost_s=0.4, is_taken=True),
                option("swap", targets=["demo@w0"], layers=2, precision="int8", loss=0.0012, nbytes=3 << 20),
                option("more", refusal="only by order"),
            ],
            "cost_s": 0.4,
            "wait_s": 0.1,
            "meets": True,
        }
    ],
}


def test_what_would_be_done_is_shown_with_every_option(
    gateway: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    gateway.answers = [(200, WEIGHED)]
    assert gateway.main("plan", "--what-if", "--requests", "20", "--prompt-tokens", "2000") == 0
    assert gateway.asked == [("GET", "/admin/plan?requests=20&prompt_tokens=2000", None)]
    told = " ".join(capsys.readouterr().out.split())
    assert "demo, demo@w0: 4 requests wait for 30 KV blocks" in told
    assert "move demo@w0 to demo@w1" in told and "swap demo@w0: 2 layers to int8" in told
    assert "0.12%" in told and "tokens/s" not in told  # no lever changes the throughput
    assert "never" in told and "not possible: more: only by order" in told and "taken" in told
    assert "0.40 request-seconds, the longest wait 0.10 s: within the objective" in told


def test_a_need_that_no_lever_meets_is_an_exit_status(
    gateway: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = {"subject": "demo", "meets": False, "wait_s": NEVER_S, "cost_s": 4 * NEVER_S}
    unmet = {"note": "mode manual", "plans": [WEIGHED["plans"][0] | endless]}
    gateway.answers = [(200, unmet), (200, unmet), (200, {"note": "", "plans": []})]
    assert gateway.main("plan", "demo", "--what-if") == 1
    assert gateway.asked[0][1] == "/admin/plan?model=demo"
    assert gateway.main("plan", "--what-if", "--json") == 1
    assert gateway.main("plan", "--what-if") == 0
    told = capsys.readouterr().out
    assert "mode manual" in told and "\ndemo: 4 requests wait" in told and "nothing would be done" in told
    assert "some requests would wait without end, or be refused: no set of levers" in told


def test_a_plan_needs_a_model_or_a_question(gateway: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert gateway.main("plan") != 0
    assert "instar model list" in capsys.readouterr().err
