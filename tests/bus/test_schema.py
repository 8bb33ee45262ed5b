"""Versions of the schema side by side: what one release writes the other reads, and what neither reads is
refused by name."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import histogram
from bus.batch import WriteBatch
from bus.client import Bus, connect
from bus.codec import MESSAGE_TYPES, DecodeError, decode, encode
from bus.deployments import Measure, ProbePeer
from bus.errors import OtherSchema
from bus.messages import (
    READS,
    SCHEMA_VERSION,
    Delta,
    Metrics,
    RejectReason,
    SamplingParams,
    SiblingChoice,
    StepOutput,
    Submit,
    WorkerCard,
    WorkerTelemetry,
)
from bus.morphs import MorphReport
from bus.presence import has_monitor, readers
from bus.schema import (
    BOUNDS,
    DOWNGRADES,
    FIRST,
    HISTOGRAMS,
    UPGRADES,
    common_version,
    in_words,
    parsed,
    version_needed,
)
from monitor.smoothing import Smoother
from tests.conftest import settings_of
from tests.support.bus_samples import any_of, card, step_output, submit, telemetry
from tests.support.redis_process import RedisProcess
from tests.support.wire_samples import sample

FIRST_RELEASE = Path(__file__).with_name("wire_format_1.json")  # recorded by release 0.1 itself
CHANGED = {name for table in (*UPGRADES.values(), *DOWNGRADES.values()) for name in table}
MEASURE: Measure = sample(Measure)
NAMED = {kind.__name__: kind for kind in MESSAGE_TYPES}


def through(message: Any, version: int) -> Any:
    return decode(encode(message, version), type(message))


@pytest.mark.parametrize("kind", [one for name, one in NAMED.items() if name not in CHANGED])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_message_whose_form_did_not_change_comes_back_equal_in_every_version(
    kind: type[Any], data: st.DataObject
) -> None:
    message = data.draw(any_of(kind))
    assert all(through(message, version) == message for version in READS)


def test_every_changed_message_is_a_message() -> None:
    assert set(NAMED) >= CHANGED and set(UPGRADES) == set(DOWNGRADES) == set(READS) - {SCHEMA_VERSION}


@pytest.mark.parametrize("name", sorted(json.loads(FIRST_RELEASE.read_text())))
def test_every_message_of_release_0_1_is_read(name: str) -> None:
    data = base64.b64decode(json.loads(FIRST_RELEASE.read_text())[name])
    version, wire_name, fields = msgspec.msgpack.decode(data)
    assert (version, wire_name) == (FIRST, name)
    found = msgspec.to_builtins(decode(data, NAMED[name]), builtin_types=(bytes,))
    plain = {key: value for key, value in fields.items() if not isinstance(value, dict | list)}
    gone = {"door", "door_key", "step_layers", "link", "link_key"}
    assert {key: found[key] for key in plain.keys() - gone} == {
        key: value for key, value in plain.items() if key not in gone
    }


# ------------------------------------------------------------------------------- histograms


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 5000), max_size=20))
def test_a_histogram_in_version_1_keeps_count_and_sum_and_all_else_is_equal(values: list[float]) -> None:
    first_token = histogram.Accumulator()
    for value in values:
        first_token.observe(value)
    report = telemetry()
    report = replace(
        report, instances=[replace(report.instances[0], time_to_first_token=first_token.snapshot())]
    )
    back = through(report, 1)
    found = back.instances[0].time_to_first_token
    assert histogram.count(found) == len(values)
    assert found.total == pytest.approx(sum(values))
    others = {
        name: getattr(report.instances[0], name) for name in HISTOGRAMS if name != "time_to_first_token"
    }
    assert {name: getattr(back.instances[0], name) for name in others} == others
    assert replace(back, instances=[]) == replace(report, instances=[])


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 2500))
def test_a_value_in_version_1_stays_between_the_bounds_that_it_was_counted_between(value: float) -> None:
    back: WorkerTelemetry = through(telemetry(ttft=(value,)), 1)
    found = histogram.quantile(back.instances[0].time_to_first_token, 0.5)
    assert found is not None and below(value * 0.98) <= below(found) <= below(value * 1.02)


def below(value: float) -> float:
    """Return the bound that a value counts for; the last one for what is above all."""
    return next((bound for bound in BOUNDS if value <= bound), BOUNDS[-1])


def test_a_report_in_version_1_has_the_form_of_release_0_1() -> None:
    _, name, fields = msgspec.msgpack.decode(encode(telemetry(ttft=(0.03, 0.03, 5000.0)), 1))
    found = fields["instances"][0]["time_to_first_token"]
    assert name == "WorkerTelemetry"
    assert found["bounds"] == list(BOUNDS) and len(found["counts"]) == len(BOUNDS) + 1
    assert found["counts"][BOUNDS.index(0.04)] == 2 and found["counts"][-1] == 1
    assert all(type(amount) is int for amount in found["counts"])


def test_metrics_of_both_versions_have_the_same_percentiles_and_nearly_the_same_last_report() -> None:
    smoother = Smoother(window_s=10.0, smoothing=0.5, stale_s=5.0)
    smoother.observe(0.0, telemetry())
    smoother.observe(1.0, telemetry(running=1, tokens=10, ttft=(0.03,) * 9))
    metrics = smoother.metrics(1.0, 1000)
    last = telemetry(ttft=(0.03,) * 9).instances[0]  # monitors of release 0.1 sent its histograms, too
    metrics = replace(metrics, instances=[replace(one, last=last) for one in metrics.instances])
    back: Metrics = through(metrics, 1)
    assert [one.ttft_p95 for one in back.instances] == [one.ttft_p95 for one in metrics.instances]
    found = back.instances[0].last.time_to_first_token
    assert histogram.count(found) == 9 and 0.02 < (histogram.quantile(found, 0.5) or 0) <= 0.04


def test_a_monitor_takes_a_report_in_another_version_than_the_one_before_as_a_new_beginning() -> None:
    smoother = Smoother(window_s=10.0, smoothing=0.5, stale_s=5.0)
    smoother.observe(0.0, through(telemetry(running=1, tokens=10, ttft=(0.025,) * 5), 1))
    smoother.observe(1.0, telemetry(running=1, tokens=20, ttft=(0.025,) * 9))
    (one,) = smoother.metrics(1.0, 1000).instances
    assert one.ttft_p95 is None and one.prompt_tokens_per_second == pytest.approx(10)


@pytest.mark.parametrize(
    "bad",
    [
        {"bounds": [0.1], "counts": [1, 2, 3], "total": 1.0},
        {"bounds": "x", "counts": [1], "total": 1.0},
        {"bounds": [float("inf")], "counts": [1, 2], "total": 1.0},
        {"bounds": [], "counts": ["x"], "total": 1.0},
        {"bounds": [1e308, 1e308], "counts": [1, 2**63, 2**63], "total": 0.0},
    ],
)
def test_a_broken_histogram_of_version_1_is_refused_and_nothing_else_is_raised(bad: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(telemetry(), builtin_types=(bytes,))
    fields["instances"][0]["step_seconds"] = bad
    with pytest.raises(DecodeError, match="bad WorkerTelemetry"):
        decode(msgspec.msgpack.encode([1, "WorkerTelemetry", fields]), WorkerTelemetry)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(UPGRADES[1])))
def test_a_damaged_message_of_version_1_decodes_or_raises_decode_error(
    data: st.DataObject, name: str
) -> None:
    samples = {
        "WorkerTelemetry": telemetry(ttft=(0.1,)),
        "StepOutput": step_output(2),
        "WorkerCard": card(),
        "Measure": MEASURE,
        "Metrics": Metrics(at_ms=1, window_seconds=1.0, workers=[], instances=[]),
    }
    damaged = bytearray(encode(samples[name], 1))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(damaged))
    except DecodeError as error:
        assert error.reason


# ------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("reason", list(RejectReason))
def test_a_refusal_is_the_first_word_of_the_error_in_version_1(reason: RejectReason) -> None:
    error = f"no room: {reason}"
    delta = Delta(
        request_id="r", attempt=1, index=0, token_ids=[], finish_reason="error", error=error,
        reject_reason=reason,
    )  # fmt: skip
    step = replace(step_output(), deltas=[delta, replace(delta, error=None)])
    assert through(step, 1) == step
    _, _, fields = msgspec.msgpack.decode(encode(step, 1))
    assert fields["deltas"][0]["error"] == f"{reason}: {error}"
    del fields["deltas"][0]["reject_reason"]  # as release 0.1 sends it
    found = decode(msgspec.msgpack.encode([1, "StepOutput", fields]), StepOutput)
    assert found.deltas[0] == delta


@pytest.mark.parametrize("error", ["the device failed", "kv: full", None, "retired", ": x"])
def test_another_error_of_version_1_stays_as_it_is(error: str | None) -> None:
    step = replace(step_output(), deltas=[replace(step_output().deltas[0], error=error)])
    assert through(step, 1) == step


# ------------------------------------------------------------------------------- cards, reports, requests


def test_a_card_of_release_0_1_is_of_one_that_reads_version_1_and_joins_no_group() -> None:
    fields = msgspec.to_builtins(card(), builtin_types=(bytes,))
    del fields["reads"]
    fields |= {"link": "10.0.0.1:7", "link_key": b"k", "door": "10.0.0.1:8", "door_key": b"d"}
    fields["instances"][0]["degrees"] = [1, 2, 4]
    found = decode(msgspec.msgpack.encode([1, "WorkerCard", fields]), WorkerCard)
    assert (found.reads, found.link, found.link_key) == ((1,), "", b"")
    assert found.instances[0].degrees == [1]


def test_a_card_in_version_1_shows_no_link_and_says_what_its_worker_reads() -> None:
    shown = replace(card(), link="10.0.0.1:7", link_key=b"k")
    assert through(shown, 1) == replace(shown, link="", link_key=b"")
    assert through(shown, 1).reads == READS


def test_the_end_of_a_morph_in_version_1_comes_without_a_report() -> None:
    report = MorphReport(
        id="m", kind="swap", target="demo@w0", worker="w0", epoch=1, state="applied", reason="",
        started_ms=1, ended_ms=2, telemetry=telemetry(),
    )  # fmt: skip
    assert through(report, 1) == replace(report, telemetry=None)


def test_a_measurement_in_version_1_measures_no_links() -> None:
    assert isinstance(MEASURE.peer, ProbePeer)
    assert through(MEASURE, 1) == replace(MEASURE, peer=None)
    assert through(MEASURE, 2) == MEASURE


async def test_choices_are_entries_of_their_own_in_version_1_and_share_one_in_version_2(bus: Bus) -> None:
    choices = [SiblingChoice(request_id=f"r{i}", attempt=2, seed=i, sent_token_ids=[i]) for i in (2, 3)]
    message = replace(submit("r1"), choices=choices)
    stream = bus.names.requests("demo@w0")
    for version, entries in ((1, message.each()), (2, [message])):
        bus.schema = version
        await bus.run(lambda client: client.delete(stream))
        await bus.publish(stream, message)
        async with bus.reader(stream, Submit, start="0") as reader:
            assert [one for _, one in await reader.read()] == entries


async def test_a_choice_that_cannot_be_encoded_leaves_no_entry_of_the_others(bus: Bus) -> None:
    bus.schema = 1
    bad = SiblingChoice(request_id="r2", attempt=1, seed=2**70)
    batch = WriteBatch(bus)
    with pytest.raises(OverflowError):
        batch.publish(bus.names.requests("demo@w0"), replace(submit("r1"), choices=[bad]))
    await batch.send()
    assert await bus.length(bus.names.requests("demo@w0")) == 0


@pytest.mark.parametrize(
    ("asked", "embeds", "version"),
    [
        ({}, False, 1),
        ({"frequency_penalty": 1.0, "logprobs": 5, "prompt_logprobs": 1}, False, 1),
        ({"repetition_penalty": 1.1}, False, 2),
        ({"min_tokens": 3}, False, 2),
        ({}, True, 2),
    ],
)
def test_what_release_0_1_would_ignore_needs_version_2(
    asked: dict[str, Any], embeds: bool, version: int
) -> None:
    assert version_needed(SamplingParams(max_tokens=4, seed=7, **asked), embeds=embeds) == version


# ------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("written", "present", "monitor", "chosen"),
    [
        (2, [], False, 2),  # a cluster that begins
        (1, [(1, 2), (1, 2)], True, 2),
        (1, [(1, 2), (1, 2)], False, 1),  # a monitor of release 0.1 shows nothing
        (2, [(1, 2), (1,)], True, 1),
        (1, [(1,), (1,)], False, 1),
        (2, [(1, 2), (2, 3)], True, 2),
        (2, [(3,)], True, None),
        (2, [()], True, None),
        (1, [(2, 3)], False, None),
    ],
)
def test_the_newest_version_that_all_read_is_written(
    written: int, present: list[tuple[int, ...]], monitor: bool, chosen: int | None
) -> None:
    assert common_version(written, present, has_monitor=monitor) == chosen


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_versions_in_words_come_back(versions: list[int]) -> None:
    assert parsed(in_words(versions).encode()) == tuple(versions)


def test_what_is_no_version_is_left_out() -> None:
    assert (parsed(b"1"), parsed(in_words(()).encode()), parsed(b"1 and x")) == ((1,), (), (1,))


async def test_all_who_are_present_tell_what_they_read(bus: Bus, redis_settings: Any) -> None:
    fields = msgspec.to_builtins(card("old", 5), builtin_types=(bytes,))
    del fields["reads"]
    names = bus.names

    async def older(client: Any) -> None:  # as release 0.1 joins
        await client.set(names.card("old"), msgspec.msgpack.encode([1, "WorkerCard", fields]))
        await client.sadd(names.workers, "old")
        await client.set(names.lease("old"), 5)
        await client.set(names.gateway_lease("g0"), b"1", px=5000)

    await bus.run(older)
    await bus.register_worker(card("new"), 5)
    await bus.register_worker(card("dead"), 0.01)
    await bus.register_worker(card("odd"), 5)
    await bus.run(lambda client: client.set(names.card("odd"), b"junk"))
    await bus.renew_gateway("g1")
    await asyncio.sleep(0.05)
    found = await readers(bus)
    expected = {"worker old": (1,), "worker new": READS, "worker odd": ()}
    assert found == expected | {"gateway g0": (1,), "gateway g1": READS} and not has_monitor(found)
    async with connect(redis_settings, role="monitor"):
        assert has_monitor(await readers(bus))


async def test_a_lease_that_a_gateway_of_another_release_left_shows_what_this_one_reads(bus: Bus) -> None:
    key = bus.names.gateway_lease("g")
    await bus.run(lambda client: client.set(key, b"1", px=5000))
    assert await bus.renew_gateway("g") is True
    assert await bus.run(lambda client: client.get(key)) == in_words(READS).encode()


# ------------------------------------------------------------------------------- what is written


async def test_a_new_data_set_is_in_the_newest_version_and_one_of_release_0_1_in_the_first(
    bus: Bus, redis_settings: Any
) -> None:
    assert bus.schema == SCHEMA_VERSION
    await bus.run(lambda client: client.delete(bus.names.schema))  # release 0.1 knows no such key
    async with connect(redis_settings) as other:
        assert other.schema == FIRST
        await other.publish(other.names.events, other.make_event("worker_joined", "w0", "", {}))
        entries: Any = await other.run(lambda client: client.xrange(other.names.events))
        assert msgspec.msgpack.decode(entries[0][1][b"m"])[0] == FIRST


async def test_a_process_follows_the_version_that_the_data_set_names(bus: Bus) -> None:
    await bus.run(lambda client: client.set(bus.names.schema, 1))
    await bus.doubt()
    assert bus.schema == 1
    await bus.register_worker(card("w0"), 5)
    shown: Any = await bus.run(lambda client: client.get(bus.names.card("w0")))
    assert msgspec.msgpack.decode(shown)[0] == 1


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (3, "are in schema 3 .* reads 1 and 2: start a release that reads 3"),
        (0, "are in schema 0 .* reads 1 and 2: first replace every process by a release that reads 0 and 1"),
    ],
)
async def test_a_program_that_does_not_read_what_is_written_does_not_start(
    bus: Bus, redis_settings: Any, named: int, says: str
) -> None:
    await bus.run(lambda client: client.set(bus.names.schema, named))
    with pytest.raises(OtherSchema, match=says):
        async with connect(redis_settings):
            pass


async def test_a_worker_that_does_not_read_what_is_written_gets_no_requests(bus: Bus) -> None:
    await bus.register_worker(replace(card("old"), reads=(1,)), 5)
    await bus.register_worker(card("new"), 5)
    assert [live.card.id for live in await bus.workers()] == ["new"]
    bus.schema = 1
    assert [live.card.id for live in await bus.workers()] == ["new", "old"]


async def test_the_version_of_lost_data_is_named_again_as_it_was(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    async with connect(settings_of(server.url)) as bus:
        await bus.run(lambda client: client.set(bus.names.schema, 1))
        await bus.doubt()
        await bus.run(lambda client: client.flushall())
        await bus.doubt()
        assert bus.schema == 1
        assert await bus.run(lambda client: client.get(bus.names.schema)) == b"1"
