"""The requests that run here, for whom, and the stream entry to acknowledge when its last one ends. Pure.

It makes an at-least-once bus harmless: it knows a Submit that comes twice, late, or behind its own Cancel.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass

from bus.messages import Submit

# Ids of cancelled and of ended requests, each, for a Submit that comes late or again. That takes seconds, in
# which fewer requests end.
MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that this worker runs, and the entry of `requests:{instance}` that asked for it."""

    request_id: str
    attempt: int
    gateway: str
    instance: str
    entry_id: str
    trace_id: str = ""  # the client's id of its call, for the log

    @property
    def log_ids(self) -> dict[str, str]:
        return log_ids(self.trace_id, self.request_id)


def log_ids(trace_id: str, request_id: str) -> dict[str, str]:
    """Return the ids of the gateway's log lines: of a client's call and of one of its sequences."""
    return {"request_id": trace_id, "sequence": request_id}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about a Submit."""

    run: bool  # give it to the engine
    replaced: Ticket | None = None  # an older attempt to abort first
    reason: str = ""  # why not to run it


class _Attempts:
    """Request id -> the last attempt of it that is over; the latest MAX_REMEMBERED ids."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, attempt: float) -> None:
        self._last[request_id] = max(attempt, self._last.get(request_id, attempt))
        self._last.move_to_end(request_id)
        if len(self._last) > MAX_REMEMBERED:
            self._last.popitem(last=False)

    def __contains__(self, submit: Submit) -> bool:
        return submit.attempt <= self._last.get(submit.request_id, -math.inf)


class Ledger:
    """Owns the tickets of the current epoch."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._open: Counter[tuple[str, str]] = Counter()  # tickets by instance and entry
        self._cancelled, self._ended = _Attempts(), _Attempts()

    def __len__(self) -> int:
        return len(self._tickets)

    def get(self, request_id: str) -> Ticket | None:
        return self._tickets.get(request_id)

    def is_open(self, instance: str, entry_id: str) -> bool:
        """Return True if a request of this entry runs, so that it must not be acknowledged yet."""
        return (instance, entry_id) in self._open

    def num_of(self, instance: str) -> int:
        return sum(ticket.instance == instance for ticket in self._tickets.values())

    def gateways(self) -> set[str]:
        return {ticket.gateway for ticket in self._tickets.values()}

    def drop_gateway(self, gateway: str) -> list[Ticket]:
        """Remove and return a gateway's tickets; one that was only paused may submit the requests again."""
        dropped = [ticket for ticket in self._tickets.values() if ticket.gateway == gateway]
        for ticket in dropped:
            self._remove(ticket.request_id)
        return dropped

    def offer(self, submit: Submit, instance: str, entry_id: str, epoch: int) -> Verdict:
        """Decide about a Submit; one that runs has a ticket from here on."""
        if submit.epoch != epoch:
            return Verdict(run=False, reason=f"addressed to epoch {submit.epoch}, this is {epoch}")
        if submit in self._cancelled:
            return Verdict(run=False, reason="cancelled before it came")
        if submit in self._ended:
            return Verdict(run=False, reason=f"attempt {submit.attempt} has ended")
        known = self._tickets.get(submit.request_id)
        if known and known.attempt >= submit.attempt:
            return Verdict(run=False, reason=f"attempt {known.attempt} runs already")
        if known:
            self._remove(submit.request_id)
        self._open[instance, entry_id] += 1
        self._tickets[submit.request_id] = Ticket(
            submit.request_id, submit.attempt, submit.gateway, instance, entry_id, submit.trace_id
        )
        return Verdict(run=True, replaced=known)

    def end(self, request_id: str, attempt: int) -> Ticket | None:
        """Remove and return the ticket of an attempt that ended; None if it is not here."""
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.attempt != attempt:
            return None
        self._ended.add(request_id, attempt)
        return self._remove(request_id)

    def cancel(self, request_id: str, up_to_attempt: int | None = None) -> Ticket | None:
        """Remove and return the ticket of the running attempt, if it is one of those meant (None: all).

        The cancellation is remembered either way: the Submit may still be on its way.
        """
        limit = math.inf if up_to_attempt is None else up_to_attempt
        self._cancelled.add(request_id, limit)
        ticket = self._tickets.get(request_id)
        return self._remove(request_id) if ticket and ticket.attempt <= limit else None

    def _remove(self, request_id: str) -> Ticket:
        ticket = self._tickets.pop(request_id)
        entry = ticket.instance, ticket.entry_id
        self._open[entry] -= 1
        if not self._open[entry]:
            del self._open[entry]
        return ticket

    def clear(self) -> None:
        """Begin an epoch without tickets. Cancellations stay: they are about requests, not about epochs."""
        self._tickets.clear()
        self._open.clear()
        self._ended = _Attempts()
