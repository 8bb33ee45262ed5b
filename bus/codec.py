"""The codec: messages to bytes and back, as msgpack of `[schema version, type name, fields]`.

Decoding reads the header first, so an error names another version or type, then validates every field. It
ignores fields that the type does not have: a newer sender may add some. Messages of the versions in READS are
read, and written if another process needs it (`bus.schema`).
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, get_args, overload

import msgspec

from bus import deployments, messages, morphs, policy, schema
from bus.messages import READS, SCHEMA_VERSION

M = TypeVar("M")

# The types of stream entries and registry keys; the other dataclasses only occur within these.
MESSAGE_TYPES: Final[tuple[type, ...]] = (
    messages.Submit,
    *get_args(morphs.Command),  # the kinds of morphs among them
    policy.Policy,
    policy.Envelope,
    morphs.MorphReport,
    messages.StepOutput,
    messages.WorkerCard,
    messages.WorkerTelemetry,
    messages.Metrics,
    messages.Moment,
    messages.Demand,
    messages.Event,
    messages.DeadLetter,
    deployments.Profile,
    deployments.ModelCard,
    deployments.Deployment,
    *get_args(deployments.Order),
    deployments.Answer,
    deployments.Measure,
)

_NAMES: Final[dict[type, str]] = {kind: kind.__name__ for kind in MESSAGE_TYPES}
_DECODERS: Final[dict[str, msgspec.msgpack.Decoder[Any]]] = {
    name: msgspec.msgpack.Decoder(kind) for kind, name in _NAMES.items()
}
_ENCODER: Final = msgspec.msgpack.Encoder()
_HEADER: Final = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw])
_FIELDS: Final = msgspec.msgpack.Decoder(dict[str, Any])

# What msgspec raises on hostile bytes: its own errors, bad UTF-8 (ValueError), nesting beyond the stack, and
# a length prefix that asks for more memory than there is.
_MALFORMED: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)


class DecodeError(ValueError):
    """The bytes are not an expected message. `reason` says why, without the payload."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def encode(message: object, version: int = SCHEMA_VERSION) -> bytes:
    """Return the bytes of a message in a version of the schema.

    Raises TypeError for another type, OverflowError for over 64 bits.
    """
    name = _NAMES.get(type(message))
    if name is None:
        raise TypeError(f"{type(message).__name__} is not a bus message; known are {', '.join(_DECODERS)}")
    if changes := schema.lowerings(version, name):
        fields = msgspec.to_builtins(message, builtin_types=(bytes,))
        for change in changes:
            fields = change(fields)
        return _ENCODER.encode((version, name, fields))
    return _ENCODER.encode((version, name, message))


@overload
def decode(data: bytes, expected: type[M], /) -> M: ...
@overload
def decode(data: bytes, /, *expected: type[Any]) -> Any: ...
def decode(data: bytes, /, *expected: type[Any]) -> Any:
    """Return the message in `data`, of an `expected` type if any is given. Raises DecodeError, else."""
    try:
        version, name, fields = _HEADER.decode(data)
    except _MALFORMED as error:
        raise DecodeError(f"not a message: {error}") from None
    if version not in READS:
        raise DecodeError(f"schema version {version}, this program reads {schema.in_words(READS)}")
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise DecodeError(f"unknown message type {name[:64]!r}")
    if expected and decoder.type not in expected:
        raise DecodeError(f"{name} is not expected here, only {' or '.join(t.__name__ for t in expected)}")
    try:
        return decoder.decode(_lifted(version, name, fields))
    except _MALFORMED as error:
        raise DecodeError(f"bad {name}: {error}") from None


def _lifted(version: int, name: str, data: msgspec.Raw) -> msgspec.Raw | bytes:
    """Return the fields of a message of an older version in the form of this one. Raises _MALFORMED."""
    changes = schema.lifts(version, name)
    if not changes:
        return data
    try:
        fields = _FIELDS.decode(data)
    except TypeError as error:  # a map is the key of a map
        raise ValueError(str(error)) from None
    for change in changes:
        fields = change(fields)
    return _ENCODER.encode(fields)
