"""The intake of a worker from the bus: each attempt once, for the epoch of now, until it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from bus.client import connect
from bus.messages import Cancel, SiblingChoice
from bus.settings import RedisSettings
from tests.support.engine_toys import continuation, toy_instance
from tests.support.redis_process import RedisProcess
from tests.support.worker_bench import Bench
from worker.service import intake

pytest_plugins = ["tests.support.worker_fixtures"]


async def test_a_submit_for_another_epoch_is_deleted_and_never_run(bench: Bench) -> None:
    await bench.submit("old", [1], epoch=5)
    await bench.submit("new", [1])
    await bench.until(lambda: bench.end("new"))
    await bench.until(bench.is_settled)
    assert not bench.deltas("old")


async def test_the_same_submit_twice_runs_once(bench: Bench) -> None:
    bench.model.step_s = 0.02
    for _ in range(3):
        await bench.submit("a", [1], 10)
    await bench.until(lambda: bench.end("a"))
    await bench.until(bench.is_settled)
    indexes = [delta.index for delta in bench.deltas("a") if delta.token_ids]
    assert indexes == list(range(10))


async def test_a_request_whose_entry_is_read_again_runs_once_and_is_acknowledged_at_its_end(
    bench: Bench, redis_server: RedisProcess
) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 60)
    await bench.until(lambda: bench.tokens("a"))
    with redis_server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.4)
    assert await bench.backlog() == 1
    await bench.until(lambda: bench.end("a"))
    await bench.until(bench.is_settled)
    assert bench.tokens("a") == continuation([1], 60)
    assert bench.instance.stats.finished == {"length": 1}


async def test_choices_of_one_prompt_share_an_entry_that_stays_until_the_last_has_ended(bench: Bench) -> None:
    bench.model.step_s = 0.02
    whole = continuation([1], 30)
    choices = [
        SiblingChoice(request_id="b", attempt=2, seed=2, sent_token_ids=whole[:28]),
        SiblingChoice(request_id="c", attempt=1, seed=3),
        SiblingChoice(request_id="d", attempt=1, seed=4),
    ]
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["d"])
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await asyncio.sleep(0.2)
    await bench.submit("a", [1], 30, choices=choices)
    await bench.until(lambda: bench.end("b"))
    assert await bench.backlog() == 1 and not bench.end("a"), "d was cancelled ahead, and b has ended"
    await bench.until(lambda: bench.end("a") and bench.end("c"))
    await bench.until(bench.is_settled)
    assert bench.tokens("a") == bench.tokens("c") == whole and bench.tokens("b") == whole[28:]
    assert not bench.deltas("d")


async def test_a_higher_attempt_replaces_the_running_one_and_goes_on_from_what_was_sent(bench: Bench) -> None:
    bench.model.step_s = 0.02
    whole = continuation([1], 30)
    await bench.submit("a", [1], 30)
    await bench.until(lambda: len(bench.tokens("a")) >= 5)
    await bench.submit("a", [1], 30, attempt=2, sent_token_ids=whole[:5])
    await bench.until(lambda: bench.end("a"))
    second = [delta for delta in bench.deltas("a") if delta.attempt == 2]
    assert second[0].index == 5
    assert [token for delta in second for token in delta.token_ids] == whole[5:]
    await bench.until(bench.is_settled)


async def test_a_cancel_stops_a_running_request_and_frees_its_blocks(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 150)
    await bench.until(lambda: len(bench.tokens("a")) >= 3)
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["a", "nobody"])
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await bench.until(bench.is_settled)
    said = len(bench.deltas("a"))
    await asyncio.sleep(0.2)
    assert len(bench.deltas("a")) == said and bench.end("a") is None


async def test_a_cancel_that_overtakes_its_submit_works_too(bench: Bench) -> None:
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["a"])
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await asyncio.sleep(0.2)
    await bench.submit("a", [1], 150)
    await bench.until(bench.is_settled)
    assert not bench.deltas("a")


async def test_a_cancel_of_an_earlier_attempt_leaves_the_running_one_alone(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 30, attempt=2)
    await bench.until(lambda: bench.tokens("a"))
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["a"], up_to_attempt=1)
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1], 30)


async def test_requests_of_a_gateway_that_died_are_cancelled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "CHECK_S", 0.1)
    monkeypatch.setattr(intake, "GRACE_S", 0.3)
    bench.model.step_s = 0.02
    await bench.submit("theirs", [1], 190, gateway="dead")
    await bench.submit("ours", [2], 60)
    await bench.until(lambda: bench.instance.stats.finished["cancelled"] == 1)
    await bench.until(lambda: bench.end("ours"))
    assert bench.tokens("ours") == continuation([2], 60)
    await bench.until(bench.is_settled)


async def test_a_gateway_whose_lease_ran_out_may_submit_its_requests_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "CHECK_S", 0.05)
    monkeypatch.setattr(intake, "GRACE_S", 0.1)
    bench.model.step_s = 0.02
    lease = bench.bus.names.gateway_lease("g0")
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    await bench.bus.run(lambda client: client.delete(lease))
    await bench.until(lambda: bench.instance.stats.finished["cancelled"] == 1)
    await bench.bus.renew_gateway("g0", 60.0)
    bench.model.step_s = 0.0
    await bench.submit("a", [1], 10, attempt=2)
    await bench.until(lambda: bench.end("a"))
    await bench.until(bench.is_settled)


async def test_two_instances_of_one_worker_have_streams_of_their_own(redis_settings: RedisSettings) -> None:
    async with connect(redis_settings, source="test") as bus:
        bench = Bench(bus, redis_settings)
        second = toy_instance()
        second.id = "other@w0"
        bench.engine.add_instance(second)
        listener = asyncio.create_task(bench.listen())
        try:
            await bench.start()
            await bench.submit("a", [1], 5)
            await bench.submit("b", [2], 5, instance="other@w0")
            await bench.until(lambda: bench.end("a") and bench.end("b"))
            assert bench.tokens("b") == continuation([2], 5)
            assert {output.instance for output in bench.received} == {"toy@w0", "other@w0"}
        finally:
            listener.cancel()
            await bench.aclose()
