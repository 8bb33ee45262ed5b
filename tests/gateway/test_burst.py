"""/admin/burst: one at a time, measured first, followed, stopped; nothing of it is left."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from bus.burst import FEWEST, NUM_AT_ONCE, PlannedRequest, burst
from bus.messages import Event, Submit
from gateway.operations import burst as played
from gateway.operations.burst import fitted
from tests.support.gateway_harness import Gate

pytest_plugins = ["tests.support.gateway_fixtures"]

RATE = {"tokens_per_s": 100}  # given, so that nothing is measured


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Bursts of a fifth of a second, measured in one; a worker that answers at once and in full."""
    monkeypatch.setattr(played, "burst", lambda rate, seconds: burst(100.0, 0.2))
    monkeypatch.setattr(played, "MEASURED_S", 1.0)
    monkeypatch.setattr(played, "PAUSE_S", 0.0)
    gate.worker.reply = in_full
    gate.worker.tokens_per_step = 400


def in_full(submit: Submit) -> list[int]:
    return [7] * submit.sampling.max_tokens


async def until(http: httpx.AsyncClient, *states: str) -> dict[str, Any]:
    deadline = time.monotonic() + 8
    while (found := (await http.get("/admin/burst")).json()["burst"])["state"] not in states:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)
    return dict(found)


@pytest.mark.usefixtures("short")
async def test_a_burst_is_measured_played_and_told_of(gate: Gate) -> None:
    async with (
        gate.http() as http,
        gate.bus.reader(gate.bus.names.events, Event, start="0") as events,
    ):
        assert (await http.get("/admin/burst")).json() == {"burst": None}
        begun = await http.post("/admin/burst", json={"seconds": 5})
        assert (begun.status_code, begun.json()["state"]) == (202, "measuring")
        again = await http.post("/admin/burst", json={"model": "demo"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "burst_running")
        assert f"burst {begun.json()['id']} of demo measures the service" in again.json()["error"]["message"]
        ended = await until(http, "ended", "failed")
        assert ended["state"] == "ended", ended
        assert (ended["planned"], ended["sent"], ended["served"], ended["lost"]) == (FEWEST,) * 3 + (0,)
        firsts = sorted(ttft for _, ttft, _ in ended["requests"])
        assert 0 < ended["ttft_s"]["p50"] <= ended["ttft_s"]["p95"] <= firsts[-1] < 5
        assert ended["tokens_per_s"] > 0
        submits = gate.worker.submits
        assert [one.min_precision for one in submits] == ["full"] * NUM_AT_ONCE + [""] * FEWEST
        assert len({tuple(one.prompt_token_ids) for one in submits}) == len(submits)
        told = [
            event.kind
            for _, event in await events.read()
            if isinstance(event, Event) and event.kind.startswith("burst_")
        ]
        assert told[:1] == ["burst_started"]
    await gate.settled()


@pytest.mark.usefixtures("short")
async def test_a_burst_that_is_stopped_leaves_no_request(gate: Gate) -> None:
    gate.worker.gate.clear()
    async with gate.http() as http:
        refused = await http.delete("/admin/burst")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_burst")
        assert (await http.post("/admin/burst", json=RATE)).json()["state"] == "sending"
        await until(http, "waiting")
        stopped = (await http.delete("/admin/burst")).json()
        assert (stopped["state"], stopped["sent"], stopped["lost"]) == ("stopped", FEWEST, FEWEST)
        await gate.until("the worker to drop them", lambda: len(gate.worker.cancelled) == FEWEST)
        assert (await http.post("/admin/burst", json=RATE)).status_code == 202  # the next one may begin
        await http.delete("/admin/burst")
    await gate.settled()


@pytest.mark.usefixtures("short")
async def test_what_nothing_can_be_measured_of_fails_with_the_reason(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played, "MEASURED_S", 0.1)
    gate.worker.gate.clear()
    async with gate.http() as http:
        await http.post("/admin/burst", json={})
        failed = await until(http, "failed")
        assert failed["reason"] == "no token was generated within 0.1 s"
        bad = await http.post("/admin/burst", json={"seconds": 100})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "seconds")
        assert (await http.post("/admin/burst", json={"model": "else"})).status_code == 404
    await gate.settled()


def test_requests_of_a_burst_fit_a_short_context() -> None:
    planned = [PlannedRequest(0.5, 90, 300), PlannedRequest(1.0, 32, 200)]
    assert fitted(planned, 4096) == planned
    assert fitted(planned, 100) == [PlannedRequest(0.5, 50, 50), PlannedRequest(1.0, 32, 68)]
