"""Requests as they end: the gateway's feed, and the file that `instar bench record` makes of it."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bus.messages import SamplingParams
from bus.settings import RedisSettings
from gateway.delivery.request import GenerationRequest, RequestState
from gateway.operations.feeds import EndedRequests
from instar.cli import main
from instar.replay.requests import Dialect, find_dialect
from instar.replay.traces import Shaping, load
from instar.replay.wire import ServerAddress
from tests.support.gateway_core import Ear
from tests.support.gateway_harness import BODY, Gate, running

pytest_plugins = ["tests.support.gateway_fixtures"]


def state(number: int, arrived: float = 5.0) -> RequestState:
    request = GenerationRequest(
        id=f"r{number}",
        model="demo",
        prompt_token_ids=[7, 8, 9],
        sampling=SamplingParams(max_tokens=9, seed=1),
        arrived=arrived,
        trace_id=f"id{number}",
    )
    made = RequestState(request, Ear(), deadline=60.0)
    made.received += [1, 2]
    return made


async def taken(stream: AsyncIterator[bytes]) -> list[tuple[str, Any]]:
    """The events of what comes next."""
    text = (await anext(stream)).decode()
    pieces = [piece.split("\n") for piece in text.split("\n\n") if piece.startswith("event: ")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in pieces]


async def test_nobody_listens_and_nothing_is_kept() -> None:
    ended = EndedRequests()
    ended.publish(state(0), "stop")
    stream = ended.listen(has_prompts=False)
    assert await taken(stream) == []
    ended.publish(state(1), "length")
    assert [one["id"] for _, one in await taken(stream)] == ["id1"]


async def test_a_record_says_when_it_came_and_what_it_was() -> None:
    ended = EndedRequests(clock=lambda: 7.5)
    plain, full = ended.listen(has_prompts=False), ended.listen(has_prompts=True)
    await anext(plain), await anext(full)
    ended.publish(state(0), "abort")
    [(kind, record)] = await taken(plain)
    expected = {"model": "demo", "prompt_tokens": 3, "output_tokens": 2, "max_tokens": 9, "status": "abort"}
    assert kind == "request" and expected.items() <= record.items() and record["seconds"] == 2.5
    assert "prompt_token_ids" not in record
    [(_, with_prompt)] = await taken(full)
    assert with_prompt == record | {"at": with_prompt["at"], "prompt_token_ids": [7, 8, 9]}


async def test_a_listener_that_is_behind_is_told_how_many_it_lost() -> None:
    ended = EndedRequests(kept=3)
    stream = ended.listen(has_prompts=False)
    await anext(stream)
    for number in range(5):
        ended.publish(state(number), "stop")
    found = await taken(stream)
    assert [one["id"] for kind, one in found if kind == "request"] == ["id0", "id1", "id2"]
    assert found[-1] == ("lost", 2)


async def test_a_listener_that_is_behind_holds_no_more_than_some_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.operations.feeds.KEPT_BYTES", 300)
    ended = EndedRequests()
    stream = ended.listen(has_prompts=True)
    await anext(stream)
    for _ in range(2):  # what was taken makes room again
        for number in range(5):
            ended.publish(state(number), "stop")
        found = await taken(stream)
        assert len(found) < 4 and found[-1] == ("lost", 6 - len(found))


async def test_what_ended_before_the_gateway_left_is_told_to_a_slow_listener() -> None:
    ended = EndedRequests()
    stream = ended.listen(has_prompts=False)
    await anext(stream)
    ended.publish(state(0), "stop")
    await taken(stream)
    ended.publish(state(1), "stop")
    ended.close()
    assert [one["id"] for _, one in await taken(stream)] == ["id1"]
    assert [data async for data in stream] == []


async def test_a_gateway_that_leaves_ends_the_stream() -> None:
    ended = EndedRequests()
    stream = ended.listen(has_prompts=False)
    await anext(stream)
    asyncio.get_running_loop().call_soon(ended.close)
    assert [data async for data in stream] == [b""]


async def test_what_was_recorded_can_be_replayed(
    gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    argv = ["bench", "record", "--url", gate.url, "--out", str(path), "--with-prompts", "--limit", "3"]
    recording = asyncio.create_task(asyncio.to_thread(main, argv))
    while not path.exists():
        await asyncio.sleep(0.01)
    async with gate.http() as http:
        while not recording.done():  # the first may end before anybody listens
            assert (await find_dialect(ServerAddress.at(gate.url, None), "demo"))[0] == Dialect()
            answer = await http.post("/v1/completions", json=BODY | {"max_tokens": 5})
            assert answer.status_code == 200
    assert recording.result() == 0
    assert path.stat().st_mode & 0o077 == 0  # others' prompts are nobody's business
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["status"], one["output_tokens"]) for one in lines] == [("length", 5)] * 3
    assert re.search(r"^[1-4] trial requests of a replay are left out", capsys.readouterr().err, re.MULTILINE)
    trace = load(str(path), "auto", Shaping())
    assert trace.format == "instar" and len(trace.arrivals) == 3
    assert trace.arrivals[0].prompt == gate.worker.submits[-1].prompt_token_ids


async def test_failures_and_clients_that_left_are_recorded_as_such(gate: Gate) -> None:
    stream = gate_events(gate)
    await anext(stream)
    async with gate.http() as http:
        gate.worker.token_s, gate.worker.stop_at = 0.01, 2
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), http.stream("POST", "/v1/completions", json=BODY):
                await asyncio.sleep(1)
    record = await anext(stream)
    assert record["status"] == "abort" and record["max_tokens"] == 100


async def gate_events(gate: Gate) -> AsyncIterator[dict[str, Any]]:
    """{} when it is listened to, then each record."""
    async with gate.http() as http, http.stream("GET", "/admin/requests") as answer:
        async for line in answer.aiter_lines():
            if line == ": requests":
                yield {}
            elif line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


async def test_the_feed_asks_for_the_admin_key(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, admin_keys=["hush-hush"]) as gate, gate.http() as http:
        assert (await http.get("/admin/requests")).status_code == 401


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.jsonl").write_text("kept")
    assert main(["bench", "record", "--out", str(tmp_path / "mine.jsonl")]) == 2
    assert "is there already; name another file" in capsys.readouterr().err
    assert main(["bench", "record", "--out", str(tmp_path / "no" / "mine.jsonl")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_disk_without_room_is_told_before_anything_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 9 << 10))
    assert main(["bench", "record", "--out", str(tmp_path / "mine.jsonl")]) == 2
    assert "9 KiB are free on its disk; 1024 are needed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_ends_the_recording_in_a_line(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("instar.replay.record._write", full)
    argv = ["bench", "record", "--url", gate.url, "--out", str(tmp_path / "mine.jsonl")]
    assert await asyncio.to_thread(main, argv) == 2
    assert "mine.jsonl: No space left on device, after 0 requests" in capsys.readouterr().err
