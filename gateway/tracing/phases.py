"""The children of a call's span: each attempt of a sequence waits (queue), makes its first token (prefill)
and then the others (decode)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.delivery.inflight import Flight
from gateway.delivery.journey import Attempt, Shape

Facts = dict[str, AttributeValue]

PROPERLY: Final = ("stop", "length", "abort")


@dataclass(slots=True)
class Phase:
    """Times are those of the flight; `events` are changes of the shape that makes its tokens."""

    name: str
    start: float
    end: float
    facts: Facts
    events: list[tuple[float, Facts]] = field(default_factory=list)
    status: Status | None = None


def phases(flight: Flight, now: float) -> list[Phase]:
    """Of all its attempts, in order; none where nothing was noted."""
    found: list[Phase] = []
    attempts = flight.journey.attempts if flight.journey is not None else []
    for attempt in attempts:
        found += _of_attempt(flight, attempt, attempt.ended or now)
        if attempt.void:
            found[-1].facts["instar.void"] = attempt.void
    if found and flight.ended not in PROPERLY:
        found[-1].facts["error.type"] = flight.ended or "unknown"
        found[-1].status = Status(StatusCode.ERROR)
    return found


def _of_attempt(flight: Flight, attempt: Attempt, ended: float) -> Iterator[Phase]:
    who = _who(flight, attempt)
    yield Phase("queue", attempt.since, attempt.began or ended, dict(who))
    if attempt.began:
        tokens: Facts = {"gen_ai.usage.input_tokens": attempt.num_known}
        yield Phase("prefill", attempt.began, attempt.first_token or ended, who | tokens | _made_by(attempt))
    if attempt.first_token:
        tokens = {"gen_ai.usage.output_tokens": attempt.num_tokens}
        if not attempt.void:
            tokens["gen_ai.response.finish_reasons"] = [flight.ended]
        changes = [(shape.at, _shape(shape)) for shape in attempt.shapes[1:]]
        yield Phase("decode", attempt.first_token, ended, who | tokens | _made_by(attempt), changes)


def _who(flight: Flight, attempt: Attempt) -> Facts:
    facts: Facts = {"instar.sequence": flight.request_id}
    if attempt.target is not None:
        facts |= {
            "instar.attempt": attempt.number,
            "instar.instance": attempt.target.instance,
            "instar.worker": attempt.target.worker,
            "instar.epoch": attempt.target.epoch,
        }
    return facts


def _made_by(attempt: Attempt) -> Facts:
    return _shape(attempt.shapes[0]) if attempt.shapes else {}


def _shape(shape: Shape) -> Facts:
    return {
        "instar.fingerprint": shape.fingerprint,
        "instar.layers_below_full": shape.layers_below_full,
        "instar.first_token": shape.index,
    }
