"""The promise: every token once, in order, and exactly one end, whatever workers do."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from bus.client import connect
from bus.messages import Event, StepOutput
from bus.settings import RedisSettings
from tests.support.gateway_harness import ANSWER, BODY, Gate, metrics_of, running
from tests.support.gateway_streams import answer, assert_whole, busy, hang_at
from worker.service.parcels import parts_of

pytest_plugins = ["tests.support.gateway_fixtures"]


def submitted(gate: Gate, attempt: int) -> bool:
    return any(submit.attempt == attempt for submit in gate.worker.submits)


async def test_a_worker_killed_in_mid_stream_costs_no_token(gate: Gate) -> None:
    second = await gate.add_worker("w1")
    task = hang_at(gate, 5)
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.3)
    victim = next(worker for worker in gate.workers if worker.num_running)
    heir = second if victim is gate.worker else gate.worker
    heir.stop_at = None
    await victim.die()
    await assert_whole(gate, task)
    submit = heir.submits[-1]
    assert (submit.attempt, submit.sent_token_ids) == (2, gate.ids(ANSWER)[:5])
    assert submit.sampling == victim.submits[-1].sampling  # the same seed goes on


async def test_a_worker_killed_before_its_first_token_is_only_latency(gate: Gate) -> None:
    gate.worker.gate.clear()
    task = hang_at(gate, 0)
    await gate.until("the request", lambda: gate.worker.submits)
    await gate.worker.die()
    await gate.add_worker("w1")
    await assert_whole(gate, task)


async def test_a_lost_worker_that_the_controller_declares_is_replayed_at_once(gate: Gate) -> None:
    task = hang_at(gate, 3)
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.2)
    gate.worker.stop_at = None
    await gate.bus.event("worker_lost", "w0", "test", epoch=gate.worker.epoch)
    await assert_whole(gate, task)
    assert gate.worker.submits[-1].attempt == 2


async def test_a_worker_with_a_newer_epoch_gets_its_requests_again(gate: Gate) -> None:
    task = hang_at(gate, 4)
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.2)
    await gate.worker.die()
    gate.worker.stop_at = None
    await gate.worker.start()
    await assert_whole(gate, task)


SCORED: dict[str, Any] = {"prompt": "lazy 🌍 dog", "echo": True, "logprobs": 2, "max_tokens": 3}


async def scored(gate: Gate) -> tuple[str, Any]:
    async with gate.http() as http:
        sent = await http.post("/v1/completions", json=BODY | SCORED)
    choice = sent.json()["choices"][0]
    return choice["text"], choice["logprobs"]


def in_parts(step: StepOutput) -> list[StepOutput]:
    """Send every score of a prompt by itself, as a worker does with those of a long one."""
    return [replace(step, deltas=[part]) for delta in step.deltas for part in parts_of(delta, 1)]


async def test_scores_of_a_prompt_that_come_in_parts_make_the_same_answer(gate: Gate) -> None:
    whole = await scored(gate)
    gate.worker.mangle = in_parts
    assert await scored(gate) == whole
    async with gate.client() as client:
        stream = await client.completions.create(**BODY | SCORED, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == whole[0]
    for name, values in whole[1].items():
        assert [one for chunk in chunks if chunk.logprobs for one in getattr(chunk.logprobs, name)] == values
    assert len(chunks) > len(gate.ids("lazy 🌍 dog")), "each part is an event of its own"


async def test_scores_of_a_prompt_survive_a_worker_that_dies_among_them(gate: Gate) -> None:
    whole = await scored(gate)
    gate.worker.mangle = lambda step: in_parts(step)[:3] if step.deltas[0].prompt_logprobs else []
    task = asyncio.create_task(scored(gate))
    await gate.until("some scores", lambda: any(gate.worker.submits) and gate.worker.num_running == 0)
    await gate.worker.die()
    await gate.add_worker("w1")
    gate.workers[1].mangle = in_parts
    assert await task == whole
    assert gate.workers[1].submits[0].attempt == 2


async def test_a_part_of_the_scores_that_is_lost_is_asked_for_again(gate: Gate) -> None:
    whole = await scored(gate)
    for lost in (slice(1, 2), slice(-2, -1)):  # in the middle, and just before the first token

        def drop(step: StepOutput, lost: slice = lost) -> list[StepOutput]:
            parts = in_parts(step)
            if gate.worker.submits[-1].attempt == 1 and step.deltas[0].prompt_logprobs:
                del parts[lost]
            return parts

        gate.worker.mangle = drop
        assert await scored(gate) == whole
        assert gate.worker.submits[-1].attempt == 2


async def test_doubled_entries_are_dropped(gate: Gate) -> None:
    gate.worker.mangle = lambda step: [step, step]
    await assert_whole(gate, asyncio.create_task(answer(gate)))


async def test_overlapping_deltas_are_trimmed(gate: Gate) -> None:
    tokens = gate.ids(ANSWER)

    def overlap(step: StepOutput) -> list[StepOutput]:
        delta = step.deltas[0]
        if delta.token_ids and delta.index >= 2 and delta.finish_reason is None:
            back = dataclasses.replace(
                delta, index=delta.index - 2, token_ids=tokens[delta.index - 2 : delta.index + 1]
            )
            return [dataclasses.replace(step, deltas=[back])]
        return [step]

    gate.worker.mangle = overlap
    await assert_whole(gate, asyncio.create_task(answer(gate)))


async def test_a_missing_entry_is_noticed_and_replayed(gate: Gate) -> None:
    def lose_the_third(step: StepOutput) -> list[StepOutput]:
        delta = step.deltas[0]
        return [] if delta.index == 3 and delta.attempt == 1 and delta.token_ids else [step]

    gate.worker.mangle = lose_the_third
    await assert_whole(gate, asyncio.create_task(answer(gate)))
    assert gate.worker.submits[-1].sent_token_ids == gate.ids(ANSWER)[:3]


async def test_an_end_that_was_lost_after_the_last_token_is_made_up(gate: Gate) -> None:
    def endless(step: StepOutput) -> list[StepOutput]:
        return [dataclasses.replace(step, deltas=[dataclasses.replace(step.deltas[0], finish_reason=None)])]

    gate.worker.mangle = endless
    task = asyncio.create_task(answer(gate))
    await gate.until("all tokens", lambda: gate.worker.submits and not gate.worker.num_running)
    await asyncio.sleep(0.2)
    await gate.bus.event("worker_lost", "w0", "test", epoch=gate.worker.epoch)
    await assert_whole(gate, task)
    assert len(gate.worker.submits) == 1


async def test_late_tokens_of_a_fenced_epoch_are_dropped(gate: Gate) -> None:
    task = hang_at(gate, 4)
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.2)
    old_epoch, submit = gate.worker.epoch, gate.worker.submits[0]
    await gate.worker.die()
    await gate.worker.start()
    await gate.until("the replay", lambda: gate.worker.submits[-1].attempt == 2)
    for attempt in (1, 2):
        late = gate.worker._delta(dataclasses.replace(submit, attempt=attempt), 4, [99])
        await gate.worker.publish(submit.gateway, late, epoch=old_epoch)
    await asyncio.sleep(0.1)
    gate.worker.stop_at = None
    await assert_whole(gate, task)


async def test_a_stop_string_over_the_cut_is_still_found(gate: Gate) -> None:
    tokens = gate.ids(ANSWER)
    start = ANSWER.find("jumps over")
    inside = next(i for i in range(len(tokens)) if len(gate.tokenizer.vocabulary.text_of(tokens[:i])) > start)
    gate.worker.stop_at = inside
    task = asyncio.create_task(answer(gate, stop="jumps over", logprobs=0))
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.2)
    await gate.worker.die()
    gate.worker.stop_at = None
    await gate.worker.start()
    text, reason, _ = await asyncio.wait_for(task, 15)
    assert (text, reason) == (ANSWER[: ANSWER.find("jumps")], "stop")


async def test_a_request_that_kills_its_workers_ends_with_an_error_and_an_event(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, max_attempts=2) as gate:
        events: list[Event] = []

        async def listen() -> None:
            async with gate.bus.reader(gate.bus.names.events, Event) as reader:
                async for batch in reader:
                    events.extend(event for _, event in batch)

        listening = asyncio.create_task(listen())
        task = hang_at(gate, 2)
        for attempt in (1, 2):
            await gate.until("the attempt", partial(submitted, gate, attempt))
            await asyncio.sleep(0.2)
            await gate.worker.die()
            if attempt == 1:
                await gate.worker.start()
        with pytest.raises(openai.APIError, match="given up after 2 attempts") as failure:
            await asyncio.wait_for(task, 15)
        assert failure.value.code == "worker_lost"
        await gate.until("the event", lambda: any(event.kind == "dead_letter" for event in events))
        assert any(event.kind == "request_replayed" for event in events)
        listening.cancel()


async def test_without_replay_a_stream_ends_with_one_error_event(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, replay=False) as gate:
        gate.worker.stop_at = 3
        async with (
            gate.http() as http,
            http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as raw,
        ):
            await gate.until("a run", busy(gate))
            await asyncio.sleep(0.2)
            await gate.worker.die()
            text = (await raw.aread()).decode()
        events = [event for event in text.split("\n\n") if event]
        assert events[-1] == "data: [DONE]" and '"code":"worker_lost"' in events[-2]
        assert text.count('"error":') == 1


async def test_an_error_of_the_engine_is_told_and_not_retried(gate: Gate) -> None:
    def fail(step: StepOutput) -> list[StepOutput]:
        delta = dataclasses.replace(
            step.deltas[0], finish_reason="error", error="logits are NaN", token_ids=[]
        )
        return [dataclasses.replace(step, deltas=[delta])]

    gate.worker.mangle = fail
    async with gate.client() as client:
        with pytest.raises(openai.InternalServerError, match="logits are NaN") as failure:
            await client.completions.create(**BODY)
    assert failure.value.code == "engine_error"
    assert len(gate.worker.submits) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_a_client_that_leaves_is_cancelled_at_the_worker(gate: Gate, stream: bool, phase: str) -> None:
    gate.worker.token_s = 0.05
    if phase == "queue":
        gate.worker.gate.clear()
    gate.worker.stop_at = {"queue": None, "prefill": 0, "decode": None}[phase]
    async with gate.http() as http:
        post = http.post("/v1/completions", json=BODY | {"stream": stream, "ignore_eos": True, "n": 2})
        task = asyncio.create_task(post)
        await gate.until("the requests", lambda: gate.worker.num_running == 2)
        await asyncio.sleep(0.2)
        task.cancel()
    await gate.until("the cancellation", lambda: len(gate.worker.cancelled) == 2, 1.0)
    assert gate.worker.num_running == 0
    await gate.settled()
    async with gate.http() as http:
        metrics = (await http.get("/metrics")).text
    assert 'instar_request_success_total{finished_reason="abort",model_name="demo"} 2.0' in metrics


async def test_an_answer_nobody_waits_for_is_cancelled_again(gate: Gate) -> None:
    """After a restart of a gateway under the same id, the worker goes on for the old one."""
    gateway = (await gate.state())["gateway"]["id"]
    await answer(gate)
    ghost = dataclasses.replace(gate.worker.submits[0], request_id="cmpl-ghost-0")
    await gate.worker.publish(gateway, gate.worker._delta(ghost, 0, [5]))
    await gate.until("the cancellation", lambda: "cmpl-ghost-0" in gate.worker.cancelled)


async def test_requests_spread_over_instances(gate: Gate) -> None:
    second = await gate.add_worker("w1")
    await gate.until("both", lambda: True)
    deadline = time.monotonic() + 5
    while len((await gate.state())["workers"]) < 2:
        assert time.monotonic() < deadline
    for worker in gate.workers:
        worker.gate.clear()
    tasks = [asyncio.create_task(answer(gate)) for _ in range(6)]
    await gate.until("all", lambda: gate.worker.num_running + second.num_running == 6)
    assert gate.worker.num_running == second.num_running == 3
    for worker in gate.workers:
        worker.gate.set()
    await asyncio.gather(*tasks)


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has(gate: Gate) -> None:
    task = hang_at(gate, 3)
    await gate.until("a run", busy(gate))
    await gate.bus.update_card(gate.worker.card("draining"))
    second = await gate.add_worker("w1")
    deadline = time.monotonic() + 5
    while {w["state"] for w in (await gate.state())["workers"]} != {"draining", "serving"}:
        assert time.monotonic() < deadline
    assert (await answer(gate))[0] == ANSWER
    assert len(second.submits) == 1
    gate.worker.stop_at = None
    await assert_whole(gate, task)
    assert len(gate.worker.submits) == 1


async def test_a_worker_that_leaves_hands_its_rest_over(gate: Gate) -> None:
    second = await gate.add_worker("w1")
    task = hang_at(gate, 3)
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.2)
    first = next(worker for worker in gate.workers if worker.num_running)
    heir = second if first is gate.worker else gate.worker
    heir.stop_at = None
    epoch = first.epoch
    await first.leave()
    await gate.bus.event("worker_left", first.id, "test", epoch=epoch)
    await assert_whole(gate, task)


async def test_two_gateways_share_the_workers(redis_settings: RedisSettings, folder: Path) -> None:
    async with (
        running(redis_settings, folder, id="g1") as one,
        running(redis_settings, folder, workers=0, id="g2") as two,
    ):
        two.workers = one.workers
        deadline = time.monotonic() + 5
        while not await two.is_ready():
            assert time.monotonic() < deadline
        one.worker.token_s = 0.01
        texts = await asyncio.gather(*(answer(gate) for gate in (one, two) for _ in range(4)))
        assert {text for text, _, _ in texts} == {ANSWER}
        assert {submit.gateway for submit in one.worker.submits} == {"g1", "g2"}
        two.workers = []


async def test_a_request_lost_without_a_sign_is_submitted_again(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder) as gate, connect(redis_settings) as monitor:
        gate.worker._take = lambda submit: gate.worker.submits.append(submit)  # type: ignore[method-assign]
        task = asyncio.create_task(answer(gate))
        await gate.until("the request", lambda: gate.worker.submits)
        del gate.worker._take
        while not task.done():
            await monitor.publish(monitor.names.metrics, metrics_of(gate.worker))
            await asyncio.wait([task], timeout=0.3)
        await assert_whole(gate, task)
        assert gate.worker.submits[-1].attempt == 2


async def test_a_gateway_that_was_paused_beyond_its_lease_submits_again(gate: Gate) -> None:
    task = hang_at(gate, 5)
    await gate.until("a run", busy(gate))
    await asyncio.sleep(0.2)
    gateway = gate.worker.submits[0].gateway
    await gate.bus.run(lambda client: client.delete(gate.bus.names.gateway_lease(gateway)))
    await gate.until("the second attempt", partial(submitted, gate, 2))
    gate.worker.stop_at = None
    await assert_whole(gate, task)
