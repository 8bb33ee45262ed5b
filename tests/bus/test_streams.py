"""Publishing and reading, on a healthy Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus.client import Bus
from bus.messages import Cancel, DeadLetter, Event, StepOutput, Submit
from bus.names import consumer
from tests.support.bus_samples import cancel, event, step_output, submit


async def raw_add(bus: Bus, stream: str, payload: bytes) -> None:
    await bus.run(lambda client: client.xadd(stream, {b"m": payload}))


async def pending(bus: Bus, stream: str) -> int:
    groups: Any = await bus.run(lambda client: client.xinfo_groups(stream))
    return int(groups[0]["pending"])


async def test_what_is_published_is_read_in_order(bus: Bus) -> None:
    stream = bus.names.tokens("g")
    sent = [step_output(3, index=i) for i in range(5)]
    async with bus.reader(stream, StepOutput, start="0") as reader:
        await bus.publish(stream, *sent)
        batch = await reader.read()
    assert [message for _, message in batch] == sent
    assert reader.position == batch[-1][0]


async def test_a_reader_opened_at_the_tail_sees_all_that_comes_later_and_nothing_before(bus: Bus) -> None:
    await bus.publish(bus.names.events, event("old"))
    async with bus.reader(bus.names.events, Event) as reader:
        await reader.open()
        await bus.publish(bus.names.events, event("new"))  # before the first read
        assert [message.kind for _, message in await reader.read()] == ["new"]


async def test_a_reader_at_the_tail_of_a_stream_that_is_not_there_sees_its_first_entry(bus: Bus) -> None:
    async with bus.reader(bus.names.events, Event) as reader:
        await reader.open()
        await bus.publish(bus.names.events, event("first"))
        assert [message.kind for _, message in await reader.read()] == ["first"]


async def test_a_read_without_entries_returns_after_the_block_time(bus: Bus) -> None:
    async with bus.reader(bus.names.events, Event) as reader, asyncio.timeout(2):
        assert await reader.read() == []


async def test_a_blocked_reader_is_woken_by_an_entry_and_keeps_nobody_else_waiting(bus: Bus) -> None:
    readers = [bus.reader(bus.names.events, Event) for _ in range(20)]
    for reader in readers:
        await reader.open()
    reads = [asyncio.create_task(reader.next_batch()) for reader in readers]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(2):
        await bus.publish(bus.names.events, event("wake"))
        batches = await asyncio.gather(*reads)
    assert all(batch[0][1].kind == "wake" for batch in batches)
    for reader in readers:
        await reader.aclose()


async def test_a_group_hands_each_entry_to_one_consumer_and_forgets_it_when_acknowledged(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    async with bus.group_reader(stream, "a", Submit) as one, bus.group_reader(stream, "b", Submit) as other:
        await one.open()
        await other.open()  # the group is there already: no error
        await bus.publish(stream, submit("r1"))
        ((entry_id, message),) = await one.read()
        assert message == submit("r1")
        assert await other.read() == []
        assert await pending(bus, stream) == 1
        await one.ack([entry_id])
        await one.ack([entry_id])  # twice is harmless
        assert await pending(bus, stream) == 0
        assert await bus.length(stream) == 0


async def test_entries_from_before_the_group_are_delivered(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    await bus.publish(stream, submit("early"))
    async with bus.group_reader(stream, "a", Submit) as reader:
        await reader.open()
        assert [m.request_id for _, m in await reader.read()] == ["early"]


async def test_a_group_that_was_never_made_or_was_destroyed_is_made_and_told(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    told: list[str] = []
    async with bus.group_reader(stream, "a", Submit) as reader:
        reader.on_recreate = lambda: told.append("made")
        assert await reader.read() == []
        blocked = asyncio.create_task(reader.read())
        await asyncio.sleep(0.05)
        await bus.run(lambda client: client.delete(stream))  # while it waits in Redis
        assert await blocked == []
        await bus.publish(stream, submit("r1"))
        async with asyncio.timeout(2):
            assert [m.request_id for _, m in await reader.next_batch()] == ["r1"]
    assert told == ["made", "made"]


async def test_a_batch_publishes_and_acknowledges_at_once(bus: Bus) -> None:
    requests, tokens = bus.names.requests("demo@w0"), bus.names.tokens("g")
    async with bus.group_reader(requests, "a", Submit) as reader:
        await reader.open()
        await bus.publish(requests, submit())
        ((entry_id, _),) = await reader.read()
        batch = bus.batch()
        batch.publish(tokens, step_output())
        batch.ack(requests, entry_id)
        batch.ack(requests)  # nothing: no command
        await batch.send()
    assert await bus.length(tokens) == 1
    assert await bus.length(requests) == 0
    await bus.batch().send()  # an empty one costs nothing


async def test_bad_entries_of_a_stream_become_dead_letters_and_the_good_ones_arrive(bus: Bus) -> None:
    stream = bus.names.control("w0")
    async with bus.reader(stream, Cancel, start="0") as reader:
        await raw_add(bus, stream, b"\xff not msgpack")
        await bus.publish(stream, cancel("good"), event())
        await raw_add(bus, stream, b"x" * 100_000)
        assert [message.id for _, message in await reader.read()] == ["good"]
        assert await reader.read() == []
    async with bus.reader(bus.names.dead_letters, DeadLetter, start="0") as letters:
        found = [letter for _, letter in await letters.read()]
    assert [letter.stream for letter in found] == [stream] * 3
    assert found[0].payload == b"\xff not msgpack"
    assert "Event is not expected here, only Cancel" in found[1].reason
    assert "65536 of 100000 bytes" in found[2].reason
    async with bus.reader(bus.names.events, Event, start="0") as events:
        (told,) = [message for _, message in await events.read()]
    assert told.kind == "dead_letter"
    assert told.numbers == {"entries": 3}


async def test_bad_entries_of_a_group_are_acknowledged_too(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    async with bus.group_reader(stream, "a", Submit) as reader:
        await reader.open()
        await raw_add(bus, stream, b"junk")
        await bus.run(lambda client: client.xadd(stream, {b"other": b"field"}))
        assert await reader.read() == []
        assert await pending(bus, stream) == 0
    assert await bus.length(stream) == 0
    assert await bus.length(bus.names.dead_letters) == 2


async def test_a_bad_dead_letter_makes_no_other(bus: Bus) -> None:
    await raw_add(bus, bus.names.dead_letters, b"junk")
    async with bus.reader(bus.names.dead_letters, DeadLetter, start="0") as reader:
        assert await reader.read() == []
    assert await bus.length(bus.names.dead_letters) == 1


async def test_a_flood_of_bad_entries_is_told_once(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    stream = bus.names.telemetry
    async with bus.reader(stream, Event, start="0", count=1) as reader:
        for _ in range(10):
            await raw_add(bus, stream, b"junk")
        for _ in range(10):
            await reader.read()
    assert sum("unusable" in record.message for record in caplog.records) == 1
    assert await bus.length(bus.names.events) == 1
    assert await bus.length(bus.names.dead_letters) == 10


async def test_streams_that_nobody_acknowledges_are_trimmed_by_their_writers(bus: Bus) -> None:
    for _ in range(20):
        await bus.publish(bus.names.metrics, event(), event())
    assert await bus.length(bus.names.metrics) == bus.names.limit(bus.names.metrics) == 16
    assert bus.names.limit(bus.names.requests("demo@w0")) is None
    assert bus.names.limit(bus.names.tokens("g")) is None


async def test_trimming_drops_what_is_older_than_the_entry_and_no_more(bus: Bus) -> None:
    stream = bus.names.tokens("g")
    await bus.publish(stream, *(step_output(index=i) for i in range(5)))
    async with bus.reader(stream, StepOutput, start="0") as reader:
        batch = await reader.read()
    await bus.trim(stream, before=batch[3][0])
    async with bus.reader(stream, StepOutput, start="0") as reader:
        assert [entry_id for entry_id, _ in await reader.read()] == [batch[3][0], batch[4][0]]


async def test_an_event_names_its_source(bus: Bus) -> None:
    await bus.event("worker_lost", "w0", "its lease ran out", epoch=7)
    async with bus.reader(bus.names.events, Event, start="0") as reader:
        ((_, told),) = await reader.read()
    assert (told.source, told.kind, told.subject, told.numbers) == ("test", "worker_lost", "w0", {"epoch": 7})


async def test_a_new_incarnation_ends_what_earlier_ones_left_pending_and_not_what_was_never_read(
    bus: Bus,
) -> None:
    stream = bus.names.requests("demo@w0")
    async with bus.group_reader(stream, consumer("w0", 1), Submit) as old:
        await old.open()
        await bus.publish(stream, submit("r1"), submit("r2"))
        assert len(await old.read()) == 2
    await bus.publish(stream, submit("r3", epoch=2))
    async with bus.group_reader(stream, consumer("w0", 2), Submit) as new:
        assert await new.claim_all() == 2
        assert [m.request_id for _, m in await new.read()] == ["r3"]
        assert await new.claim_all() == 0  # its own stay
        assert await pending(bus, stream) == 1
    consumers: Any = await bus.run(lambda client: client.xinfo_consumers(stream, "workers"))
    assert [c["name"] for c in consumers] == [b"w0:2"]


async def test_a_consumer_name_that_is_used_again_starts_with_new_entries(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    for name in ("r1", "r2"):
        await bus.publish(stream, submit(name))
        async with bus.group_reader(stream, "same", Submit) as reader:
            await reader.open()
            assert [m.request_id for _, m in await reader.read()] == [name]


async def test_ending_leftovers_of_a_stream_that_is_not_there_is_harmless(bus: Bus) -> None:
    async with bus.group_reader(bus.names.requests("none@w9"), "a", Submit) as reader:
        assert await reader.claim_all() == 0


async def test_a_cancelled_command_leaves_its_connection_in_step(bus: Bus) -> None:
    for _ in range(30):
        tasks = [asyncio.create_task(bus.length(bus.names.events)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bus.publish(bus.names.tokens("g"), step_output())
    assert await bus.length(bus.names.tokens("g")) == 30
    assert await bus.length(bus.names.events) == 0


async def test_a_cancellation_is_never_lost_however_far_the_command_was(bus: Bus) -> None:
    for steps in range(40):
        task = asyncio.create_task(bus.length(bus.names.events))
        for _ in range(steps):
            await asyncio.sleep(0)
        if task.cancel():  # it was not done yet
            with pytest.raises(asyncio.CancelledError):
                await task
