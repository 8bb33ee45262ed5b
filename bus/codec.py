"""The codec: messages to bytes and back, as msgpack of `[SCHEMA_VERSION, type name, fields]`.

Decoding reads the header first, so an error names another version or type, then validates every field. It
ignores fields that the type does not have: a newer sender may add some.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, get_args, overload

import msgspec

from bus import deployments, messages, morphs, policy
from bus.messages import SCHEMA_VERSION

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

# What msgspec raises on hostile bytes: its own errors, bad UTF-8 (ValueError), nesting beyond the stack, and
# a length prefix that asks for more memory than there is.
_MALFORMED: Final = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError)


class DecodeError(ValueError):
    """The bytes are not an expected message. `reason` says why, without the payload."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def encode(message: object) -> bytes:
    """Return the bytes of a message. Raises TypeError for another type, OverflowError for over 64 bits."""
    name = _NAMES.get(type(message))
    if name is None:
        raise TypeError(f"{type(message).__name__} is not a bus message; known are {', '.join(_DECODERS)}")
    return _ENCODER.encode((SCHEMA_VERSION, name, message))


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
    if version != SCHEMA_VERSION:
        raise DecodeError(f"schema version {version}, this program speaks {SCHEMA_VERSION}")
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise DecodeError(f"unknown message type {name[:64]!r}")
    if expected and decoder.type not in expected:
        raise DecodeError(f"{name} is not expected here, only {' or '.join(t.__name__ for t in expected)}")
    try:
        return decoder.decode(fields)
    except _MALFORMED as error:
        raise DecodeError(f"bad {name}: {error}") from None
