"""GET /admin/live: what the dashboard is told, in which order, and that it costs nothing unwatched."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bus.levers import WEIGHED, LeverOption, LeverPlan
from bus.messages import InstanceMoment, LayerShape, Moment, Stage
from bus.morphs import MorphReport
from bus.precisions import Precision
from bus.settings import RedisSettings
from gateway.operations import live as live_module
from gateway.operations.live import MAX_PENDING, Live, _Viewer
from gateway.operations.picture import live_state
from gateway.state import Gateway
from tests.support import metrics_samples
from tests.support.gateway_core import Core
from tests.support.gateway_harness import Gate, metrics_of, running

pytest_plugins = ["tests.support.gateway_fixtures"]

Told = tuple[str, Any]


async def told(stream: AsyncIterator[str]) -> AsyncIterator[Told]:
    kind = ""
    async for line in stream:
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def viewer(gate: Gate) -> AsyncIterator[AsyncIterator[Told]]:
    async with gate.http() as http, http.stream("GET", "/admin/live") as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield told(answer.aiter_lines())


async def next_of(stream: AsyncIterator[Told], kind: str) -> Any:
    async with asyncio.timeout(8):
        async for found, body in stream:
            if found == kind:
                return body
    raise AssertionError(f"no {kind} came")


def moment(at: float, running: float = 1.0) -> Moment:
    one = InstanceMoment(
        running=running,
        waiting=0.0,
        queue_delay_s=0.0,
        ttft_p95_s=None,
        tpot_p95_s=0.02,
        kv_blocks=64,
        kv_used=8.0,
        layers_below_full=0,
        tp=1,
        tokens_per_s=50.0,
    )
    return Moment(at=at, instances={"demo@w0": one})


def report(morph_id: str, state: Any = "running", **numbers: int) -> MorphReport:
    now_ms = int(time.time() * 1000)
    return MorphReport(
        id=morph_id,
        kind="swap",
        target="demo@w0",
        worker="w0",
        epoch=1,
        state=state,
        reason="",
        started_ms=now_ms,
        ended_ms=None if state == "running" else now_ms,
        numbers=dict(numbers),
    )


async def test_a_viewer_is_greeted_and_gets_history_and_state_in_this_order(gate: Gate) -> None:
    now = time.time()
    await gate.bus.publish(gate.bus.names.moments, moment(now - 1000), moment(now - 4), moment(now - 2))
    await gate.bus.event("request_replayed", "r1", "its worker died", epoch=3)
    await gate.bus.publish(gate.bus.names.events, report("m1", "applied", halves=2, halves_applied=2))
    await asyncio.sleep(0.1)
    async with viewer(gate) as stream:
        opening = [await anext(stream) for _ in range(3)]
    assert [kind for kind, _ in opening] == ["hello", "history", "state"]
    hello, history, state = (body for _, body in opening)
    assert hello["slo"] == {"ttft_s": 2.0, "tpot_s": 0.1} and hello["history_s"] == 900
    assert abs(hello["now"] - now) < 5 and hello["version"] and hello["gateway"]
    assert [one["at"] for one in history["moments"]] == [now - 4, now - 2]  # none that is too old
    assert history["moments"][0]["instances"]["demo@w0"]["ttft_p95_s"] is None
    events = {one.get("kind"): one for one in history["events"]}
    assert (
        events["request_replayed"]["numbers"] == {"epoch": 3}
        and abs(events["request_replayed"]["at"] - now) < 5
    )
    assert (events["swap"]["id"], events["swap"]["state"]) == ("m1", "applied")
    assert [one["id"] for one in state["workers"]] == ["w0"] and state["policy"]["mode"] == "default"


async def test_what_happens_is_told_to_all_who_watch(gate: Gate) -> None:
    async with viewer(gate) as first, viewer(gate) as second:
        for stream in (first, second):
            await next_of(stream, "state")
        await gate.bus.publish(gate.bus.names.moments, moment(time.time(), running=7.0))
        running = replace(report("m2", halves=4, halves_applied=1), epoch=gate.worker.epoch)
        await gate.bus.event("worker_lost", "w7", "its lease ran out")
        await gate.bus.publish(gate.bus.names.events, running)
        for stream in (first, second):
            found: dict[str, list[Any]] = {"moment": [], "event": [], "state": []}
            async with asyncio.timeout(8):
                async for kind, body in stream:
                    found[kind].append(body)
                    morphs = [one["progress"] for state in found["state"] for one in state["morphs"]]
                    if found["moment"] and len(found["event"]) == 2 and morphs:
                        break
            assert found["moment"][0]["instances"]["demo@w0"]["running"] == 7.0
            assert [one.get("subject") or one["id"] for one in found["event"]] == ["w7", "m2"]
            assert morphs == [0.25]


async def test_what_was_weighed_comes_with_its_words(gate: Gate) -> None:
    option = LeverOption(lever="swap", targets=["demo@w0"], layers=2, precision="int4", cost_s=1.5)
    plan = LeverPlan(model="demo", subject="demo@w0", need="4 requests wait", options=[option])
    async with viewer(gate) as stream:
        hello = await next_of(stream, "hello")
        assert hello["percentiles"] == {"window_s": 10.0, "relative_error": 0.01}
        await next_of(stream, "state")
        made = gate.bus.make_event("levers_weighed", "demo@w0", f"4 wait; {WEIGHED}: all", {}, weighed=plan)
        await gate.bus.publish(gate.bus.names.events, made)
        event = await next_of(stream, "event")
    (told,) = event["weighed"]["options"]
    assert (told["words"], told["cost_s"]) == ("swap demo@w0: 2 layers to int4", 1.5)
    assert event["weighed"]["need"] == "4 requests wait"
    assert event["reason"] == "4 wait"  # the options are in the plan


async def test_the_state_has_the_pages_of_every_layer(gate: Gate) -> None:
    async with viewer(gate) as stream:
        assert (await next_of(stream, "state"))["workers"][0]["ranges"] == []  # nothing was reported
        gate.worker.shape.layers[0] = LayerShape(attention="full", ffn="int4")
        await gate.bus.publish(gate.bus.names.metrics, metrics_of(gate.worker, running=2, kv_used=16))
        state = await next_of(stream, "state")
    worker = state["workers"][0]
    found = [(one["kind"], one["layer"], one["part"], one["precision"]) for one in worker["ranges"]]
    assert found == [
        ("weights", 0, "attention", "full"),
        ("weights", 0, "ffn", "int4"),
        ("weights", 1, "attention", "full"),
        ("weights", 1, "ffn", "full"),
        ("kv", None, "", "full"),
    ]
    assert {one["owner"] for one in worker["ranges"]} == {"demo@w0"}
    assert worker["ranges"][-1]["pages"] == worker["pages"]["kv"] == 30
    (measured,) = state["metrics"]["instances"]
    assert measured["running"] == 2 and "last" not in measured and state["metrics"]["at_ms"]


async def test_a_state_that_did_not_change_is_not_told_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "STATE_S", 0.05)
    monkeypatch.setattr(live_module, "LOOK_S", 0.1)
    async with viewer(gate) as stream:
        await next_of(stream, "state")
        for _ in range(2):
            await gate.bus.publish(gate.bus.names.metrics, metrics_of(gate.worker))
            await asyncio.sleep(0.2)
        await gate.bus.event("worker_lost", "w7", "the end of this test")
        found = []
        async with asyncio.timeout(5):
            async for kind, _ in stream:
                found.append(kind)
                if kind == "event":
                    break
    assert found == ["state", "event"]  # the second metrics were the same, but for their time


async def test_a_history_that_came_late_is_told_to_those_who_are_there(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, may_read = Live._read_moments, asyncio.Event()

    async def late(self: Live) -> None:
        await may_read.wait()
        await read(self)

    monkeypatch.setattr(Live, "_read_moments", late)
    monkeypatch.setattr(live_module, "HISTORY_WAIT_S", 0.01)
    await gate.bus.publish(gate.bus.names.moments, moment(time.time()))
    async with viewer(gate) as stream:
        assert (await next_of(stream, "history"))["moments"] == []
        may_read.set()
        assert len((await next_of(stream, "history"))["moments"]) == 1


async def test_the_feed_shows_nothing_without_its_key(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, admin_keys=["hush-hush"], api_keys=["knock-knock"]) as gate:
        for key, status in ((None, 401), ("knock-knock", 401), ("hush-hush", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            async with gate.http(headers=headers) as http, http.stream("GET", "/admin/live") as answer:
                assert answer.status_code == status


async def test_a_silent_feed_says_that_it_lives(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "KEEPALIVE_S", 0.1)
    async with gate.http() as http, http.stream("GET", "/admin/live") as answer, asyncio.timeout(5):
        async for line in answer.aiter_lines():
            if line == ": keepalive":
                return


async def test_unwatched_it_reads_nothing_and_keeps_no_moment(gate: Gate) -> None:
    def is_reading() -> bool:
        return any("Live._read_moments" in repr(one.get_coro()) for one in asyncio.all_tasks())

    await gate.bus.publish(gate.bus.names.moments, moment(time.time()))
    for _ in range(2):
        assert not is_reading()
        async with viewer(gate) as stream:
            history = await next_of(stream, "history")
            assert len(history["moments"]) == 1
            assert is_reading()
        await gate.until("the viewer's end", lambda: not is_reading())


def test_of_the_ffn_each_member_of_a_group_has_its_rows_and_of_attention_all() -> None:
    core = Core()
    core.worker("w0")
    (card,) = core.cards["w0"].instances
    pages: dict[Precision, int] = {"full": 31, "int4": 10}
    shape: dict[str, Any] = {"tp": 2, "workers": ["w0", "w1"], "num_layers": 3}
    shape |= {"layer_pages": pages, "attention_pages": {"full": 10, "int4": 3}}
    core.cards["w0"] = replace(core.cards["w0"], instances=[replace(card, **shape)])
    core.poll()
    layers = [LayerShape(), LayerShape(attention="int4"), LayerShape(ffn="int4")]
    core.report(metrics_samples.metrics_of("m@w0", layers=layers))
    told = {"layers": 3, "layers_done": 1, "tp_before": 2, "tp_after": 1}
    on_its_way = replace(report("t1", **told), kind="transform", workers=["w0", "w1"])
    for morph, sizes in ((None, [(10, 11), (3, 11), (10, 4)]), (on_its_way, [(10, 11), (3, 11), (10, 7)])):
        if morph:
            core.gateway.morphs.on_report(morph)
        (worker,) = live_state(core.gateway)["workers"]
        found = [one["pages"] for one in worker["ranges"] if one["kind"] == "weights"]
        assert list(zip(found[::2], found[1::2], strict=True)) == sizes


def test_each_worker_of_a_pipeline_has_the_layers_of_its_stage() -> None:
    core = Core()
    for worker in ("w0", "w1"):
        core.worker(worker)
    (card,) = core.cards["w0"].instances
    stages = [Stage(workers=["w0"], first=0, end=1), Stage(workers=["w1"], first=1, end=3)]
    shape: dict[str, Any] = {"pp": 2, "workers": ["w0", "w1"], "num_layers": 3, "stages": stages}
    shape |= {"layer_pages": {"full": 31}, "attention_pages": {"full": 10}}
    core.cards["w0"] = replace(core.cards["w0"], instances=[replace(card, **shape)])
    core.cards["w1"] = replace(core.cards["w1"], instances=[])
    core.poll()
    leading = metrics_samples.metrics_of("m@w0", layers=[LayerShape()] * 3)
    behind = [replace(leading.workers[0], worker="w1")]
    core.report(replace(leading, workers=[*leading.workers, *behind]))
    state = live_state(core.gateway)
    layers = {
        one["id"]: [(each["owner"], each["layer"], each["pages"]) for each in one["ranges"]]
        for one in state["workers"]
    }
    kv = ("m@w0", None, 30)
    assert layers["w0"] == [("m@w0", 0, 10), ("m@w0", 0, 21), kv]
    assert layers["w1"] == [("m@w0", layer, pages) for layer in (1, 2) for pages in (10, 21)] + [kv]
    (shown,) = state["instances"]
    assert [(one["workers"], one["first"], one["end"]) for one in shown["stages"]] == [
        (["w0"], 0, 1),
        (["w1"], 1, 3),
    ]


async def test_a_viewer_that_does_not_read_is_dropped_and_gets_one_state_for_many() -> None:
    one = _Viewer()
    one.put(b"before it is open")
    one.is_open = True
    one.put(b"event ")
    for number in range(3):
        one.put_state(b"state %d" % number)
    assert one.take() == b"event state 2"
    for _ in range(MAX_PENDING + 1):
        one.put(b"x")
    assert one.is_dropped and one.take() == b""


async def test_a_picture_that_cannot_be_drawn_ends_no_serving(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = Core()
    live = Live(core.gateway)

    async def fail(_: Live) -> None:
        raise KeyError("layer")

    async def wait(_: Live) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Live, "_watch", fail)
    monkeypatch.setattr(Live, "_read_moments", wait)
    monkeypatch.setattr(live_module, "HISTORY_WAIT_S", 0.01)
    running = asyncio.create_task(live.run())
    stream = live.listen()
    told = [data async for data in stream]
    assert told[0].startswith(b"event: hello") and not running.done()
    assert "the dashboard's feed failed" in caplog.text
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_gateway_that_leaves_ends_the_feed() -> None:
    gateway: Gateway = Core().gateway
    live = Live(gateway)
    live._is_loaded.set()
    stream = live.listen()
    for _ in range(2):
        await anext(stream)
    asyncio.get_running_loop().call_soon(live.close)
    assert [data async for data in stream] == [b""]
