"""The attributes and events of a call's spans.

Names are OpenTelemetry's, vLLM's or `instar.`. No text of prompts, answers or errors is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import Status, StatusCode
from opentelemetry.util.types import AttributeValue

from gateway.delivery.journey import Attempt, ShapeChange
from gateway.delivery.request import RequestState
from gateway.http.body import Scope
from gateway.morphs import MorphRecord
from gateway.openai.call import Completion
from gateway.openai.request_log import RequestLog

Facts = dict[str, AttributeValue]
TimedFacts = tuple[float, Facts]

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/embeddings": "embeddings",
}
ENDED_WELL: Final = ("stop", "length", "abort")


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


def of_end(log: RequestLog) -> Facts:
    facts: Facts = {"http.response.status_code": log.status}
    if error := error_type(log):
        facts["error.type"] = error
    return facts | _of_call(log.call) if log.call is not None else facts


def _of_call(call: Completion) -> Facts:
    states, sampling, usage = call.states, call.states[0].request.sampling, call.usage()
    facts: Facts = {
        "gen_ai.request.model": call.envelope.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": len(states),
        "gen_ai.request.stream": call.is_stream,
        "gen_ai.response.id": call.envelope.id,
        "gen_ai.response.model": call.envelope.model,
        "gen_ai.response.finish_reasons": [state.ended for state in states if state.ended],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "instar.attempts": max(state.attempt for state in states),
        "instar.fingerprint": call.fingerprint,
    }
    latencies = {"time_in_queue": call.queue_s, "time_to_first_token": call.ttft_s}
    return facts | {f"gen_ai.latency.{name}": s for name, s in latencies.items() if s is not None}


def error_type(log: RequestLog) -> str:
    """Return the code of the call's error; "" without one, as for a client that left."""
    if log.code:
        return log.code
    if log.call is not None and log.call.error is not None:  # an error in the middle of a stream
        return log.call.error.code or "other"
    return "500" if log.status == 500 else ""


def status(log: RequestLog) -> Status | None:
    """Return the span's status: by the conventions for servers, a client's mistake is no error."""
    is_ours = bool(error_type(log)) and not 400 <= log.status < 500
    return Status(StatusCode.ERROR) if is_ours else None


def of_replays(state: RequestState) -> Iterator[TimedFacts]:
    """Yield an event for each attempt that was sent and did not continue."""
    for attempt in attempts_of(state):
        if attempt.void and attempt.number:
            facts: Facts = {
                "instar.sequence": state.id,
                "instar.attempt": attempt.number,
                "instar.worker": attempt.worker,
                "instar.reason": attempt.void,
                "instar.tokens": attempt.num_tokens,
            }
            yield attempt.ended, facts


def attempts_of(state: RequestState) -> list[Attempt]:
    return state.journey.attempts if state.journey is not None else []


def of_morphs(
    entries: Sequence[MorphRecord], workers: set[str], start_s: float, end_s: float
) -> list[TimedFacts]:
    """Return an event for each morph of these workers between two times, in seconds since 1970."""
    found: list[TimedFacts] = []
    for entry in entries:
        if entry.started > end_s or (entry.ended or end_s) < start_s or workers.isdisjoint(entry.workers):
            continue
        at_s = entry.ended if entry.ended is not None and entry.ended <= end_s else entry.started
        facts: dict[str, str | float | None] = {
            "instar.morph.id": entry.id,
            "instar.morph.kind": entry.kind,
            "instar.morph.outcome": entry.state,
            "instar.instance": entry.target,
            "instar.morph.started": entry.started,
            "instar.morph.seconds": None if entry.ended is None else entry.ended - entry.started,
            "instar.morph.pause_seconds": entry.pause_s,
            "instar.morph.cause": entry.cause or None,
        }
        known: Facts = {name: value for name, value in facts.items() if value is not None}
        found.append((max(start_s, at_s), known))
    return found


@dataclass(slots=True)
class Phase:
    """A child span: an attempt in queue, prefill or decode. `events`: changes of its shape."""

    name: str
    start: float
    end: float
    facts: Facts
    events: list[TimedFacts] = field(default_factory=list)
    status: Status | None = None


def phases(state: RequestState, now: float) -> list[Phase]:
    """Return the phases of all attempts, in order."""
    found: list[Phase] = []
    for attempt in attempts_of(state):
        found += _phases_of(state, attempt, attempt.ended or now)
        if attempt.void:
            found[-1].facts["instar.void"] = attempt.void
    if found and state.ended not in ENDED_WELL:
        found[-1].facts["error.type"] = state.ended or "unknown"
        found[-1].status = Status(StatusCode.ERROR)
    return found


def _phases_of(state: RequestState, attempt: Attempt, ended: float) -> Iterator[Phase]:
    who: Facts = {"instar.sequence": state.id}
    if attempt.number:
        who |= {
            "instar.attempt": attempt.number,
            "instar.instance": attempt.instance,
            "instar.worker": attempt.worker,
            "instar.epoch": attempt.epoch,
        }
    yield Phase("queue", attempt.since, attempt.began or ended, dict(who))
    first_shape = _of_shape(attempt.shapes[0]) if attempt.shapes else {}
    if attempt.began:
        tokens: Facts = {"gen_ai.usage.input_tokens": attempt.num_known}
        yield Phase("prefill", attempt.began, attempt.first_token or ended, who | tokens | first_shape)
    if attempt.first_token:
        tokens = {"gen_ai.usage.output_tokens": attempt.num_tokens}
        if not attempt.void:
            tokens["gen_ai.response.finish_reasons"] = [state.ended]
        changes = [(shape.at, _of_shape(shape)) for shape in attempt.shapes[1:]]
        yield Phase("decode", attempt.first_token, ended, who | tokens | first_shape, changes)


def _of_shape(shape: ShapeChange) -> Facts:
    return {
        "instar.fingerprint": shape.fingerprint,
        "instar.layers_below_full": shape.layers_below_full,
        "instar.first_token": shape.index,
    }
