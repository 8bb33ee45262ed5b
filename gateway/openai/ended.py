"""One line in the log for each call, when it is over: who, how long, how much, how it ended. None of its
text."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gateway.delivery.inflight import Flight
from gateway.errors import ApiError
from gateway.openai.call import Call

log = logging.getLogger("gateway")

CLIENT_LEFT: Final = 499  # nginx's number for an answer that nobody waited for
DIGITS: Final = 4  # tenths of a millisecond


class Ended:
    """What is known of a call at its end. `status`: as sent, before a stream's text; `call`: None where it
    was refused before its body was understood."""

    def __init__(self, request_id: str, path: str, arrived: float) -> None:
        self.status = 200
        self.code = ""  # of its refusal
        self.call: Call | None = None
        self.arrived = arrived
        self._request_id = request_id
        self._path = path

    def refused(self, error: ApiError) -> None:
        self.status = error.status
        self.code = error.code or "other"

    def log(self) -> None:
        level = logging.WARNING if self.status == 500 else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request ended", extra=self._fields(time.monotonic()))

    def _fields(self, now: float) -> dict[str, Any]:
        fields = {
            "request_id": self._request_id,
            "path": self._path,
            "status": self.status,
            "seconds": round(now - self.arrived, DIGITS),
        }
        if self.code:
            fields["error"] = self.code
        return fields | _of_call(self.call) if self.call is not None else fields


def _of_call(call: Call) -> dict[str, Any]:
    """Of several choices together: the first token of any, the mean over all of their tokens. What there was
    none of is left out."""
    flights = call.flights
    fields = {
        "id": call.envelope.id,
        "model": call.envelope.model,
        "finish": ",".join(sorted({flight.ended for flight in flights} - {""})),
        "prompt_tokens": call.num_prompt_tokens,
        "output_tokens": sum(len(flight.received) for flight in flights),
        "queue_s": _first(flights, (flight.began for flight in flights)),
        "ttft_s": _first(flights, (flight.first_token for flight in flights)),
        "tpot_s": _mean_tpot(flights),
        "attempts": max((flight.attempt for flight in flights), default=0),
        "precision": call.fingerprint,
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _first(flights: Sequence[Flight], times: Iterable[float]) -> float | None:
    """Seconds from the arrival to the earliest of these times; 0 is none."""
    told = [at for at in times if at]
    return round(min(told) - flights[0].arrived, DIGITS) if told else None


def _mean_tpot(flights: Sequence[Flight]) -> float | None:
    told = [flight for flight in flights if len(flight.received) > 1]
    seconds = sum(flight.last_token - flight.first_token for flight in told)
    num_gaps = sum(len(flight.received) - 1 for flight in told)
    return round(seconds / num_gaps, DIGITS + 1) if num_gaps else None
