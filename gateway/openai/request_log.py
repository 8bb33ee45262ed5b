"""The log line of each request, written when it is over. It has none of the request's text."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

from gateway.delivery.request import RequestState
from gateway.errors import ApiError
from gateway.openai.call import Completion

log = logging.getLogger("gateway")

CLIENT_LEFT: Final = 499  # nginx's status of an answer that the client did not wait for
DIGITS: Final = 4  # tenths of a millisecond
PROBES: Final = ("/health", "/ready", "/metrics")


class RequestLog:
    """The facts of an HTTP request for its log line."""

    def __init__(self, request_id: str, method: str, path: str, arrived: float) -> None:
        self.status = 200  # status as sent, before a stream's text
        self.code = ""  # code of the error that refused it
        self.call: Completion | None = None  # a completion whose body was understood
        self.request_id, self.arrived = request_id, arrived
        self._method, self._path = method, path

    def refused(self, error: ApiError) -> None:
        self.status = error.status
        self.code = error.code or "other"

    def write(self) -> None:
        if log.isEnabledFor(level := self._level()):
            log.log(level, "request ended", extra=self._fields(time.monotonic()))

    def _level(self) -> int:
        """Return DEBUG for probes and for what dashboards and scrapers ask again and again."""
        if self.status == 500:
            return logging.WARNING
        is_polled = self._method in ("GET", "HEAD") and not self._path.startswith("/v1/")
        return logging.DEBUG if is_polled and (self.status < 400 or self._path in PROBES) else logging.INFO

    def _fields(self, now: float) -> dict[str, Any]:
        fields = {
            "request_id": self.request_id,
            "method": self._method[:20],
            "path": quote(self._path[:200], safe="/:@"),  # one line, whatever the client sent
            "status": self.status,
            "seconds": round(now - self.arrived, DIGITS),
        }
        error = {"error": self.code} if self.code else {}
        return fields | error | (_of_call(self.call) if self.call is not None else {})


def _of_call(call: Completion) -> dict[str, Any]:
    states = call.states
    fields = {
        "id": call.envelope.id,
        "model": call.envelope.model,
        "finish": ",".join(sorted({state.ended for state in states} - {""})),
        "prompt_tokens": call.num_prompt_tokens,
        "output_tokens": sum(len(state.received) for state in states),
        "queue_s": _rounded(call.queue_s),
        "ttft_s": _rounded(call.ttft_s),
        "tpot_s": _mean_tpot_s(states),
        "attempts": max((state.attempt for state in states), default=0),
        "precision": call.fingerprint,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)


def _mean_tpot_s(states: Sequence[RequestState]) -> float | None:
    timed = [state for state in states if len(state.received) > 1]
    seconds = sum(state.last_token - state.first_token for state in timed)
    num_gaps = sum(len(state.received) - 1 for state in timed)
    return round(seconds / num_gaps, DIGITS + 1) if num_gaps else None
