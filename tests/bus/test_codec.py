"""The codec: what goes in comes out, and nothing else does."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.codec import MESSAGE_TYPES, DecodeError, decode, encode
from bus.messages import SCHEMA_VERSION, Cancel, Event, StepOutput, Submit, WorkerCard
from bus.morphs import KIND_OF, Morph
from tests.support.bus_samples import any_of, cancel, card, event, step_output, submit


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: str(kind.__name__))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_equal(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(any_of(kind))
    again = decode(encode(message), kind)
    assert again == message
    assert type(again) is kind


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_decode_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), message=st.sampled_from([submit(), event(), step_output(2), cancel()]))
def test_a_damaged_message_decodes_or_raises_decode_error(data: st.DataObject, message: object) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut])):
        try:
            decode(candidate)
        except DecodeError as error:
            assert error.reason


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a message"),
        (b"\x91" * 100_000, "not a message"),  # nested beyond the stack
        (
            msgspec.msgpack.encode([SCHEMA_VERSION + 1, "Event", {}]),
            "schema version 3, this program reads 1 and 2",
        ),
        (msgspec.msgpack.encode([SCHEMA_VERSION, "Surprise", {}]), "unknown message type 'Surprise'"),
        (msgspec.msgpack.encode([SCHEMA_VERSION, "Delta", {}]), "unknown message type 'Delta'"),
        (msgspec.msgpack.encode([SCHEMA_VERSION, "Cancel", {"id": "x"}]), "bad Cancel: .*`epoch`"),
        (
            msgspec.msgpack.encode([SCHEMA_VERSION, "Cancel", {"id": 5, "epoch": 1, "request_ids": []}]),
            "bad Cancel: Expected `str`, got `int`.*id",
        ),
        (b"\x93\x01\xa6Submit\x81\xb0prompt_token_ids\xdd\xff\xff\xff\xff", "not a message|bad Submit"),
    ],
)
def test_the_reason_names_what_was_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        decode(data)


def test_a_message_of_a_type_that_is_not_wanted_is_refused_by_name() -> None:
    with pytest.raises(DecodeError, match="Event is not expected here, only Submit or Cancel"):
        decode(encode(event()), Submit, Cancel)


def test_fields_of_a_newer_sender_are_ignored() -> None:
    fields = {"id": "c1", "epoch": 1, "request_ids": ["r1"], "added_later": True}
    assert decode(msgspec.msgpack.encode([SCHEMA_VERSION, "Cancel", fields]), Cancel) == cancel()


def test_a_card_of_an_older_sender_is_of_one_that_joins_no_group() -> None:
    fields = asdict(card())
    del fields["link"], fields["link_key"]
    for name in ("kv_heads", "degrees", "tokens_at"):
        del fields["instances"][0][name]
    found = decode(msgspec.msgpack.encode([SCHEMA_VERSION, "WorkerCard", fields]), WorkerCard)
    assert (found.link, found.instances[0].degrees, found.instances[0].tokens_at) == ("", [1], {})


def test_every_morph_has_a_kind_and_travels_alone() -> None:
    assert set(get_args(Morph)) == set(KIND_OF) <= set(MESSAGE_TYPES)


def test_what_is_no_message_is_not_encoded() -> None:
    with pytest.raises(TypeError, match="dict is not a bus message"):
        encode({"kind": "event"})


def test_a_step_of_256_tokens_costs_less_than_a_millisecond_each_way() -> None:
    message = step_output(256)
    data = encode(message)
    assert fastest(lambda: encode(message)) < 1e-3
    assert fastest(lambda: decode(data, StepOutput)) < 1e-3


def fastest(work: Any, times: int = 20) -> float:
    """Return the shortest of several runs, in seconds: the others were disturbed."""
    shortest = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


def test_an_integer_beyond_64_bits_is_refused_when_sending() -> None:
    with pytest.raises(OverflowError):
        encode(Event(kind="k", source="s", subject="s", reason="r", at_ms=2**64))
