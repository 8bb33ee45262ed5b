"""Which request runs here, for whom, and which stream entry must be acknowledged when it ends.

Pure bookkeeping: no I/O, no clock. It makes an at-least-once bus harmless: a Submit that comes twice, late,
or behind its own Cancel is recognised here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bus.messages import Submit

# Cancelled ids that are remembered for a Submit which they overtook. A Submit is overtaken by seconds; this
# many cancellations do not happen in them.
MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that this worker runs, and the entry of `requests:{instance}` that asked for it."""

    request_id: str
    attempt: int
    gateway: str
    instance: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`run`: give it to the engine. `replaced`: an older attempt to abort first. `reason`: why not to run."""

    run: bool
    replaced: Ticket | None = None
    reason: str = ""


class Ledger:
    """Owns the tickets of the current epoch."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def get(self, request_id: str) -> Ticket | None:
        return self._tickets.get(request_id)

    def gateways(self) -> set[str]:
        return {ticket.gateway for ticket in self._tickets.values()}

    def of_gateway(self, gateway: str) -> list[str]:
        return [ticket.request_id for ticket in self._tickets.values() if ticket.gateway == gateway]

    def offer(self, submit: Submit, instance: str, entry_id: str, epoch: int) -> Verdict:
        """Decide about a Submit; one that runs has a ticket from here on."""
        if submit.epoch != epoch:
            return Verdict(run=False, reason=f"addressed to epoch {submit.epoch}, this is {epoch}")
        if submit.request_id in self._cancelled:
            return Verdict(run=False, reason="cancelled before it came")
        known = self._tickets.get(submit.request_id)
        if known and known.attempt >= submit.attempt:
            return Verdict(run=False, reason=f"attempt {known.attempt} runs already")
        self._tickets[submit.request_id] = Ticket(
            submit.request_id, submit.attempt, submit.gateway, instance, entry_id
        )
        return Verdict(run=True, replaced=known)

    def end(self, request_id: str, attempt: int) -> Ticket | None:
        """The ticket of a request that ended; None if it is not here, or another attempt is."""
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.attempt != attempt:
            return None
        return self._tickets.pop(request_id)

    def cancel(self, request_id: str) -> Ticket | None:
        """Its ticket, if it runs. The id is remembered either way: its Submit may still be on its way."""
        self._cancelled[request_id] = None
        self._cancelled.move_to_end(request_id)
        if len(self._cancelled) > MAX_REMEMBERED:
            self._cancelled.popitem(last=False)
        return self._tickets.pop(request_id, None)

    def clear(self) -> None:
        """A new epoch runs nothing. Cancellations stay: they are about requests, not about epochs."""
        self._tickets.clear()
