"""What a call's own span says: names of OpenTelemetry's conventions for HTTP and generative AI, where they
have one, vLLM's for latencies, and `instar.` for what only we have. Codes and numbers: no text of prompts or
answers, and no message of an error, since those quote what the client sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from opentelemetry.trace import Status, StatusCode

from gateway.delivery.inflight import Flight, Target
from gateway.http.body import Scope
from gateway.morphs import Entry
from gateway.tracing.phases import Facts

if TYPE_CHECKING:
    from gateway.openai.call import Call
    from gateway.openai.ended import Ended

Happened = tuple[float, Facts]
OPERATIONS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


def of_request(scope: Scope) -> Facts:
    return {
        "http.request.method": "POST",
        "http.route": scope["path"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "gen_ai.operation.name": OPERATIONS.get(scope["path"], "unknown"),
        "gen_ai.provider.name": "instar",
        "gen_ai.request.id": scope["state"]["request_id"],
    }


def of_end(ended: Ended) -> Facts:
    facts: Facts = {"http.response.status_code": ended.status}
    if error := error_type(ended):
        facts["error.type"] = error
    return facts | _of_call(ended.call, ended.arrived) if ended.call is not None else facts


def _of_call(call: Call, arrived: float) -> Facts:
    flights, sampling = call.flights, call.flights[0].sampling
    usage = call.usage()
    facts: Facts = {
        "gen_ai.request.model": call.envelope.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": len(flights),
        "gen_ai.request.stream": call.is_stream,
        "gen_ai.response.id": call.envelope.id,
        "gen_ai.response.model": call.envelope.model,
        "gen_ai.response.finish_reasons": [flight.ended for flight in flights if flight.ended],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "instar.attempts": max(flight.attempt for flight in flights),
        "instar.fingerprint": call.fingerprint,
    }
    began = [flight.began for flight in flights if flight.began]
    first = [flight.first_token for flight in flights if flight.first_token]
    if began:
        facts["gen_ai.latency.time_in_queue"] = min(began) - arrived
    if first:
        facts["gen_ai.latency.time_to_first_token"] = min(first) - arrived
    return facts


def error_type(ended: Ended) -> str:
    """The code of its error; "" where it had none. A client that left is none of ours."""
    if ended.code:
        return ended.code
    if ended.call is not None and ended.call.error is not None:  # in the midst of a stream
        return ended.call.error.code or "other"
    return "500" if ended.status == 500 else ""


def status(ended: Ended) -> Status | None:
    """By the conventions for servers: what the client did wrong is no error of the span."""
    is_ours = bool(error_type(ended)) and not 400 <= ended.status < 500
    return Status(StatusCode.ERROR) if is_ours else None


def of_replays(flight: Flight) -> Iterator[Happened]:
    for attempt in flight.journey.attempts if flight.journey is not None else ():
        if attempt.void and attempt.target is not None:
            yield (
                attempt.ended,
                {
                    "instar.sequence": flight.request_id,
                    "instar.attempt": attempt.number,
                    "instar.worker": attempt.target.worker,
                    "instar.reason": attempt.void,
                    "instar.tokens": attempt.num_tokens,
                },
            )


def targets(flights: Iterable[Flight]) -> list[Target]:
    """Where attempts of these ran."""
    journeys = [flight.journey for flight in flights if flight.journey is not None]
    return [one.target for journey in journeys for one in journey.attempts if one.target is not None]


def of_morphs(entries: Sequence[Entry], workers: set[str], start_s: float, end_s: float) -> list[Happened]:
    """Those of these workers that ran between the two times, seconds since 1970. A morph is told when it
    ended; one that ended later, or runs, when it began."""
    found: list[Happened] = []
    for entry in entries:
        if entry.started > end_s or (entry.ended or end_s) < start_s or workers.isdisjoint(entry.workers):
            continue
        at_s = entry.ended if entry.ended is not None and entry.ended <= end_s else entry.started
        facts: Facts = {
            "instar.morph.id": entry.id,
            "instar.morph.kind": entry.kind,
            "instar.morph.outcome": entry.state,
            "instar.instance": entry.target,
            "instar.morph.started": entry.started,
        }
        if entry.ended is not None:
            facts["instar.morph.seconds"] = entry.ended - entry.started
        if entry.pause_s is not None:
            facts["instar.morph.pause_seconds"] = entry.pause_s
        if entry.cause:
            facts["instar.morph.cause"] = entry.cause
        found.append((max(start_s, at_s), facts))
    return found
