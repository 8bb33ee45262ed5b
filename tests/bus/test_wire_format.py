"""The bytes of every message stay readable: renaming a class or a field in Python must not change them.

`wire_format.json` has one recorded entry for each type of message. A field or a type may be added (record a
new type with `python -m tests.bus.test_wire_format`); nothing recorded may be renamed, dropped or retyped.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bus.codec import MESSAGE_TYPES, decode, encode
from tests.support.wire_samples import sample

RECORDED = Path(__file__).with_name("wire_format.json")


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: str(kind.__name__))
def test_recorded_bytes_come_back_with_every_recorded_name_and_value(kind: type[Any]) -> None:
    recorded, name = json.loads(RECORDED.read_text()), name_of(kind)
    assert name in recorded, f"{name} is new: record it with python -m {__name__}"
    data = base64.b64decode(recorded[name])
    again = encode(decode(data, kind))
    assert has_all(msgspec.msgpack.decode(again), msgspec.msgpack.decode(data))


def test_no_recorded_message_has_gone() -> None:
    assert json.loads(RECORDED.read_text()).keys() <= set(map(name_of, MESSAGE_TYPES))


def name_of(kind: type[Any]) -> str:
    """Return the name that a message of this type has on the wire."""
    return str(msgspec.msgpack.decode(encode(sample(kind)))[1])


def has_all(value: Any, recorded: Any) -> bool:
    """Return True if all keys and items of `recorded` are in `value`, with equal values of equal types."""
    if isinstance(recorded, dict):
        return isinstance(value, dict) and all(
            key in value and has_all(value[key], part) for key, part in recorded.items()
        )
    if isinstance(recorded, list):
        return isinstance(value, list) and len(value) == len(recorded) and all(map(has_all, value, recorded))
    return type(value) is type(recorded) and bool(value == recorded)


def record_new_messages() -> None:
    """Add an entry for each message that has none."""
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for kind in MESSAGE_TYPES:
        recorded.setdefault(name_of(kind), base64.b64encode(encode(sample(kind))).decode())
    RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record_new_messages()
