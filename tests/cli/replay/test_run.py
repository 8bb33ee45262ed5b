"""A replay over real HTTP: against a gateway with a fake worker, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.common.service import free_port, wait_for
from bus.settings import GatewaySettings, RedisSettings, Settings
from instar.cli import main
from instar.errors import InputError, ServerError
from instar.replay import files
from instar.replay.files import RunFile
from instar.replay.generator import Generator, RunState
from instar.replay.outcomes import INTERRUPTED, NOT_SENT, UNFINISHED
from instar.replay.requests import DIALECTS, Dialect, bodies, find_dialect
from instar.replay.run import failures_text, progress_text, run_of
from instar.replay.schemas import Arrival
from instar.replay.statistics import LATE_S, Slo, summary
from instar.replay.traces import Shaping, Workload, load
from instar.replay.wire import Exchange, ServerAddress
from tests.support.gateway_harness import Gate, running
from tests.support.paths import ROOT, TRACES
from tests.support.replay_samples import Answer, Stub, events, flags, refused, stub

pytest_plugins = ["tests.support.gateway_fixtures"]

TRACE = TRACES / "azure-2023.csv"
SMALL = Shaping(0.0, 8.0, rate=8.0, lengths=0.02)


@pytest.fixture(autouse=True)
def collector_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of a run to the garbage collector, none of which is done: one that looks at all that was
    imported takes half a second, and so would every later one, since a run ends with `unfreeze`."""
    asked: list[str] = []
    calls = {name: partial(asked.append, name) for name in ("collect", "freeze", "unfreeze")}
    monkeypatch.setattr("instar.replay.generator.gc", SimpleNamespace(**calls))
    return asked


async def replayed(url: str, *argv: str, shaping: Shaping = SMALL) -> RunFile:
    trace = load(str(TRACE), "auto", shaping)
    return await run_of(Settings(), flags("replay", str(TRACE), "--url", url, *argv), trace)


async def test_a_trace_is_replayed_against_a_gateway_with_exact_lengths(gate: Gate) -> None:
    gate.worker.token_s = 0.002
    run = await replayed(gate.url)
    trace = load(str(TRACE), "auto", SMALL)
    assert [one.error for one in run.outcomes] == [""] * len(trace.arrivals)
    assert [(one.prompt_tokens, one.output_tokens, one.finish) for one in run.outcomes] == [
        (one.prompt_tokens, one.output_tokens, "length") for one in trace.arrivals
    ]
    sent = {
        submit.request_id: len(submit.prompt_token_ids) for submit in gate.worker.submits
    }  # in any attempt
    _, *lengths = sent.values()  # the first was a trial
    assert sorted(lengths) == sorted(one.prompt_tokens for one in trace.arrivals)
    found = run.summary
    assert found["ttft_s"]["count"] == found["queue_s"]["count"] == len(trace.arrivals)
    assert found["tokens_by_layers_below_full"] == {"0": sum(one.output_tokens for one in trace.arrivals)}
    assert run.observed["samples"][0]["instances"].keys() == {"demo@w0"}
    assert run.about["arrivals_sha256"] == trace.digest and run.about["model"] == "demo"
    assert sum(run.events_per_s) >= len(trace.arrivals)


async def test_arrivals_keep_to_the_trace_while_the_server_hangs() -> None:
    """Whatever the server does: no answer comes, and the next is sent when it is due."""
    hanging = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hanging.wait()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server:
        arrivals = [Arrival(i * 0.02, 4, 4) for i in range(25)]
        at = ServerAddress.at(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        made = bodies(arrivals, "m", Dialect(), 0)
        generator = Generator(at, arrivals, made, drain_s=0.05, name="test")
        await generator.replay()
        hanging.set()
    assert {one.error for one in generator.run.outcomes} == {UNFINISHED}
    late = sorted((one.sent_s or 0.0) - one.due_s for one in generator.run.outcomes)
    assert late[0] >= 0 and late[len(late) // 2] < 0.1  # on a busy machine


def misbehaving() -> Iterator[tuple[str, Answer, str]]:
    yield "refuses", refused(503, "server_overloaded"), "503 server_overloaded"
    yield "is limited", refused(429, "rate_limit_exceeded"), "429 rate_limit_exceeded"
    yield "says nothing of why", (500, [b"oops"]), "500"
    yield "fails in the stream", (200, [*events(2, ends=False), _FAILED]), "stream: worker_lost"
    yield "ends early", (200, events(2, ends=False)), "stream ended early"
    yield "cuts the stream", (200, [*events(2, ends=False), b""]), "stream ended early"
    yield "hangs up", (0, []), "connection lost"


SAID = {"stream: worker_lost": "gone", "500": "oops", "stream ended early": ""}


_FAILED = b'data: {"error": {"message": "gone", "code": "worker_lost"}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(("answer", "error"), [pytest.param(a, e, id=n) for n, a, e in misbehaving()])
async def test_what_a_server_does_is_counted_and_never_tried_again(answer: Answer, error: str) -> None:
    arrivals = [Arrival(i * 0.01, 4, 4) for i in range(5)]
    async with stub(lambda _: answer) as server:
        made = bodies(arrivals, "m", Dialect(), 0)
        generator = Generator(ServerAddress.at(server.url, None), arrivals, made, drain_s=5.0, name="test")
        await generator.replay()
    assert generator.run.errors == {error: 5} and len(server.bodies) == 5
    assert generator.run.said == ({} if error == "connection lost" else {error: SAID.get(error, "no")})


async def test_a_server_that_went_away_is_counted() -> None:
    at = ServerAddress.at(f"http://127.0.0.1:{free_port()}", None)
    arrivals = [Arrival(0.0, 4, 4)] * 3
    generator = Generator(at, arrivals, bodies(arrivals, "m", Dialect(), 0), drain_s=1.0, name="test")
    await generator.replay()
    assert generator.run.errors == {"connect: refused": 3}
    assert [one.sent_s for one in generator.run.outcomes] == [None] * 3


async def test_a_request_that_never_got_a_connection_counts_against_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hang(*_: object) -> str:
        await asyncio.sleep(60)
        return ""

    monkeypatch.setattr("instar.replay.generator.connect", hang)
    monkeypatch.setattr("instar.replay.generator.LEAD_S", 0.05)
    arrivals = [Arrival(0.0, 4, 4)] * 3
    at = ServerAddress.at("http://127.0.0.1:1", None)
    generator = Generator(at, arrivals, bodies(arrivals, "m", Dialect(), 0), drain_s=0.05, name="test")
    await generator.replay()
    outcomes = generator.run.outcomes
    assert [(one.error, one.sent_s) for one in outcomes] == [(UNFINISHED, None)] * 3
    assert summary(outcomes, Slo(1.0, 1.0), has_queue_times=False)["violations"]["either"]["count"] == 3


async def test_a_replay_that_is_cancelled_tells_of_each_request_what_became_of_it() -> None:
    arrivals = [Arrival(0.0, 4, 4), Arrival(0.0, 4, 4), Arrival(0.1, 4, 500), Arrival(60.0, 4, 4)]
    async with stub(lambda body: (200, events(body["max_tokens"])), pause_s=0.01) as server:
        made = bodies(arrivals, "m", Dialect(), 0)
        generator = Generator(ServerAddress.at(server.url, None), arrivals, made, drain_s=5.0, name="test")
        task = asyncio.create_task(generator.replay())
        while generator.run.num_served < 2 or generator.run.num_sent < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    outcomes = generator.run.outcomes
    assert [one.error for one in outcomes] == ["", "", INTERRUPTED, NOT_SENT]
    found = summary(outcomes, Slo(60.0, 60.0), has_queue_times=False)
    assert found["requests"] == 2 and found["violations"]["either"]["count"] == 0


def test_the_line_of_a_run_tells_the_refused_from_the_failed() -> None:
    errors = {"400 context_length_exceeded": 3, "503 server_overloaded": 1, "connection lost": 2}
    assert failures_text(errors) == (
        ", 4 refused (mostly 400 context_length_exceeded), 2 failed (connection lost)"
    )
    run = RunState(
        [], began=time.perf_counter() - 3.2, num_sent=9, num_open=1, num_served=5, errors=Counter(errors)
    )
    told = progress_text(run, Workload("t", "instar", [Arrival(0.0, 4, 4), Arrival(10.0, 4, 4)], 10.0))
    assert told.startswith("3 of 10 s: 9 of 2 sent, 1 open, 5 served, 0 tokens/s, 4 refused (mostly 400")
    assert failures_text({}) == ""


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        (set(), Dialect()),
        ({"return_precision"}, DIALECTS[1]),
        ({"return_precision", "ignore_eos"}, DIALECTS[2]),
        ({"return_precision", "ids"}, DIALECTS[3]),
        ({"return_precision", "ids", "ignore_eos"}, DIALECTS[4]),
    ],
    ids=lambda value: " ".join(sorted(value)) or "nothing" if isinstance(value, set) else "",
)
async def test_a_server_is_spoken_to_in_the_dialect_it_takes(unknown: set[str], expected: Dialect) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        has = body.keys() | ({"ids"} if isinstance(body["prompt"], list) else set())
        return refused(400, "unknown_parameter") if has & unknown else (200, events(1))

    async with stub(answer) as server:
        assert await find_dialect(ServerAddress.at(server.url, None), "m") == (expected, "")


async def test_another_s_server_is_replayed_against_as_well() -> None:
    async with stub(lambda body: (200, events(body["max_tokens"]))) as server:
        run = await replayed(server.url + "/v1", "--slo-ttft", "0.5")
    assert {one.error for one in run.outcomes} == {""}
    assert {body["model"] for body in server.bodies} == {"m"}
    assert run.observed == {} and run.summary["queue_s"] is None and run.slo.ttft_s == 0.5
    assert "it is not an Instar server" in run.about["notes"][-1]


async def test_events_are_counted_wherever_a_read_cuts_them() -> None:
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    data += b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in events(3)) + b"0\r\n\r\n"
    for size in (1, 7, 50, len(data)):
        exchange = Exchange()
        for at in range(0, len(data), size):
            exchange.data_received(data[at : at + size])
        assert exchange.num_events == 4 and exchange.ended.done() and exchange.problem == ""  # with the usage


async def test_without_its_admin_key_a_gateway_is_replayed_against_unseen(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, admin_keys=["hush-hush"]) as gate:
        few = Shaping(limit=2, rate=8.0, lengths=0.02)
        blind = await replayed(gate.url, shaping=few)
        seeing = await replayed(gate.url, "--admin-key", "hush-hush", shaping=few)
    assert blind.about["notes"] == ["of the server: its state needs a key: --admin-key"]
    assert blind.observed == {} and seeing.observed["samples"]


async def test_requests_longer_than_the_context_are_told_of_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with stub(lambda _: (200, events(2))) as server:
        run = await replayed(server.url, shaping=Shaping(limit=4, rate=8.0))
    assert "are longer than the model's context of 50 tokens" in run.about["notes"][0]
    assert f"note: {run.about['notes'][0]}\n" in capsys.readouterr().err


async def test_a_busy_server_gets_the_load_all_the_same() -> None:
    async with stub(lambda _: refused(503, "server_overloaded")) as server:
        run = await replayed(server.url)
    assert run.summary["errors"] == {"503 server_overloaded": len(run.outcomes)}
    assert "a trial request was answered 503: no" in run.about["notes"]


async def test_a_server_that_refuses_everything_is_told_before_the_run() -> None:
    async with stub(lambda _: refused(401, "invalid_api_key")) as server:
        with pytest.raises(ServerError, match="refuses a request: 401: no"):
            await replayed(server.url)
    with pytest.raises(ServerError, match=r"no server answers at 127\.0\.0\.1.*connect: refused"):
        await replayed(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match=r"--url http://a\.\.b:1: .*; write it as http://"):
        await replayed("http://a..b:1")
    with pytest.raises(InputError, match="--url holds a name or a password") as told:
        await replayed("http://me:hush-hush@127.0.0.1:1")
    assert "hush-hush" not in str(told.value)
    with pytest.raises(InputError, match="--url ftp://x: the URL needs http://"):
        await replayed("ftp://x")


def test_prompts_are_of_the_length_asked_for_and_the_same_for_a_seed() -> None:
    arrivals = [Arrival(0.0, 7, 2), Arrival(1.0, 2, 1, [5, 6])]
    made = bodies(arrivals, "m", Dialect(), 3, range(20, 30))
    assert made == bodies(arrivals, "m", Dialect(), 3, range(20, 30)) != bodies(arrivals, "m", Dialect(), 4)
    first, second = map(json.loads, made)
    assert len(first["prompt"]) == 7 and set(first["prompt"]) <= set(range(20, 30))
    assert second["prompt"] == [5, 6] and first["ignore_eos"] and first["max_tokens"] == 2
    words = json.loads(bodies(arrivals, "m", DIALECTS[4], 3)[0])
    assert len(words["prompt"].split()) == 7 and "ignore_eos" not in words


# --------------------------------------------------------------------------- the command


def test_the_command_says_what_is_wrong_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for argv, status, told in (
        ([str(TRACE), "--url", nowhere], 1, "instar bench replay: no server answers at"),
        ([str(tmp_path / "none")], 2, "cannot be read: No such file"),
        ([str(TRACE), "--window", "99:1"], 2, "--window begins at 99 s, and the trace has 13.4 s"),
        ([], 2, "name a trace, or runs to --compare"),
        (["--compare", str(tmp_path)], 2, "there is no run in it"),
        ([str(TRACE), "--out", str(TRACE)], 2, "is a file; name a folder"),
    ):
        assert main(["bench", "replay", *argv]) == status
        assert told in capsys.readouterr().err


def test_the_command_teaches_its_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    assert "instar bench replay azure.csv --window 792:72" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["bench", "replay", str(TRACE), "--windw", "1:2"])
    assert "there is no flag --windw; did you mean --window?" in capsys.readouterr().err


async def test_the_command_runs_writes_and_compares(tmp_path: Path, gate: Gate) -> None:
    """Run the command as typed, in a process of its own: the gateway runs in this loop."""
    out = tmp_path / "runs" / "one"
    argv = ["bench", "replay", "gamma:40:1:0.5:8:4", "--url", gate.url, "--out", str(out), "--no-plot"]
    assert await asyncio.to_thread(main, argv) == 0
    run = files.read(out)
    assert run.about["name"] == "one" and not [one for one in run.outcomes if one.error]
    assert run.outcomes == [one.rounded() for one in run.outcomes]


async def test_without_matplotlib_a_run_is_kept_without_its_picture(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "run"
    argv = ["bench", "replay", "gamma:40:1:0.2:8:4", "--url", gate.url, "--out", str(out)]
    assert await asyncio.to_thread(main, argv) == 0
    told = capsys.readouterr().err
    assert "matplotlib is not installed (pip install 'instar[bench]')" in told and "--no-plot" in told
    assert [path.name for path in out.iterdir()] == ["run.json"]
    assert await asyncio.to_thread(main, ["bench", "plot", str(out)]) == 2
    assert "instar bench plot: pictures need matplotlib" in capsys.readouterr().err


async def test_a_run_in_which_nothing_was_served_fails_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = json.dumps(
        {"error": {"message": "the prompt\nis " + "too long " * 100, "code": "too_long"}}
    ).encode()
    argv = ["bench", "replay", "gamma:40:1:0.1:8:400", "--out", str(tmp_path / "run"), "--no-plot"]
    async with stub(lambda body: (200, events(1)) if body["max_tokens"] == 1 else (400, [long])) as server:
        assert await asyncio.to_thread(main, [*argv, "--url", server.url]) == 1
    told = capsys.readouterr()
    assert "x 400 too_long" in told.out and "400 too_long: the prompt is too long too long" in told.out
    assert not [line for line in told.out.splitlines() if line != line.rstrip()]
    assert "requests was served" in told.err
    said = files.read(tmp_path / "run").said["400 too_long"]
    assert said.endswith("...") and len(said) < 310


async def test_what_is_not_under_an_address_leads_back_to_it() -> None:
    async with stub(lambda _: (200, events(1))) as server:
        with pytest.raises(ServerError, match=r"/nope/v1/models: 404: .*; is --url right\?"):
            await replayed(server.url + "/nope")


async def test_the_garbage_collector_looks_at_everything_again_after_a_run(
    collector_calls: list[str],
) -> None:
    arrivals = [Arrival(0.0, 4, 4)]
    async with stub(lambda body: (200, events(body["max_tokens"]))) as server:
        made = bodies(arrivals, "m", Dialect(), 0)
        generator = Generator(ServerAddress.at(server.url, None), arrivals, made, drain_s=5.0, name="test")
        await generator.replay()
    assert collector_calls == ["collect", "freeze", "unfreeze"]


def test_settings_give_address_and_keys() -> None:
    at = ServerAddress.at("https://host/prefix/v1/", "k")
    assert (at.host, at.port, at.path, at.tls is not None) == ("host", 443, "/prefix", True)
    assert b"authorization: Bearer k\r\n" in at.head("GET", "/v1/models")
    assert ServerAddress.at(f"http://[::1]:{GatewaySettings().port}", None).name == "[::1]:8000"


async def test_keys_of_the_settings_go_to_their_own_service_only(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[str] = []
    answer = Stub._answer

    async def noted(self: Stub, head: str, reader: asyncio.StreamReader) -> Answer:
        heads.append(head)
        return await answer(self, head, reader)

    monkeypatch.setattr(Stub, "_answer", noted)
    trace = load(str(TRACE), "auto", Shaping(limit=1, lengths=0.02))
    keys = {"api_keys": ["mine-mine"], "admin_keys": ["hush-hush"]}
    async with stub(lambda body: (200, events(body["max_tokens"]))) as server:
        for port, is_sent in ((server.port, True), (free_port(), False)):
            heads.clear()
            settings = Settings(gateway=GatewaySettings(port=port, **keys))
            await run_of(settings, flags("replay", str(TRACE), "--url", server.url), trace)
            assert ("bearer mine-mine" in "".join(heads), "bearer hush-hush" in "".join(heads)) == (
                is_sent,
                is_sent,
            )


@pytest.mark.faults
@pytest.mark.slow  # ten seconds, and of a machine that is not busy
def test_50_requests_a_second_are_within_5_ms_of_the_trace_at_p99(tmp_path: Path) -> None:
    """The server is a process of its own. What the machine itself is late is measured beside it."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "tests.support.replay_samples", str(port)], cwd=ROOT)
    sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    try:
        wait_for("the server", lambda: answers(port))
        argv = ["bench", "replay", "gamma:50:1:10:256:64", "--url", f"http://127.0.0.1:{port}"]
        assert main([*argv, "--out", str(tmp_path / "run"), "--no-plot"]) == 0
        machine_late_s = float(sleeper.communicate()[0])
    finally:
        server.kill()
        sleeper.kill()
        server.wait(), sleeper.wait()
    run = files.read(tmp_path / "run")
    assert {one.error for one in run.outcomes} == {""}
    assert run.summary["lateness_s"]["p99"] < max(LATE_S, 2 * machine_late_s)


# 50 times a second it sleeps until it is time, and at the end says how late it woke at P99.
SLEEPER = """
import time
due, late = time.perf_counter(), []
while len(late) < 500:
    due += 0.02
    time.sleep(max(0.0, due - time.perf_counter()))
    late.append(time.perf_counter() - due)
print(sorted(late)[495])
"""


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
