"""From the engine to the bus: one StepOutput for each gateway that a step made something for."""

from __future__ import annotations

import logging

from bus.messages import Delta, StepOutput
from bus.names import Names
from worker.engine.engine import StepResult
from worker.service.ledger import Ledger, Ticket
from worker.service.outbox import Outbox, Parcel

log = logging.getLogger(__name__)


class Dispatch:
    def __init__(self, names: Names, worker: str, ledger: Ledger, outbox: Outbox) -> None:
        self._names, self._worker = names, worker
        self._ledger, self._outbox = ledger, outbox

    def take(self, epoch: int, result: StepResult) -> None:
        """Deltas of attempts that were cancelled or replaced meanwhile are dropped here."""
        parcels: dict[str, Parcel] = {}
        for output in result.outputs:
            delta = output.delta
            ticket = self._ledger.get(delta.request_id)
            if ticket is None or ticket.attempt != delta.attempt:
                continue
            parcel = parcels.get(ticket.gateway)
            if parcel is None:
                parcel = parcels[ticket.gateway] = self._parcel(ticket.gateway, epoch, result)
            assert parcel.output is not None
            parcel.output.deltas.append(delta)
            if delta.finish_reason:
                self._ledger.end(delta.request_id, delta.attempt)
                _log(ticket, delta)
                parcel.acks.append((self._names.requests(ticket.instance), ticket.entry_id))
        for parcel in parcels.values():
            self._outbox.put(parcel)

    def _parcel(self, gateway: str, epoch: int, result: StepResult) -> Parcel:
        output = StepOutput(
            worker=self._worker,
            epoch=epoch,
            instance=result.instance,
            step=result.step,
            born_ns=result.born_ns,
            fingerprint=result.shape_id,
            deltas=[],
            layers_below_full=result.layers_below_full,
            step_s=result.step_s,
        )
        return Parcel(output, self._names.tokens(gateway))


def _log(ticket: Ticket, delta: Delta) -> None:
    """An error is told here, too: the gateway may try again elsewhere, and its client never hear of it."""
    ids = ticket.log_ids | {"attempt": ticket.attempt}
    if delta.error is not None:
        level = logging.INFO if delta.reject_reason else logging.WARNING
        log.log(level, "not served: %s", delta.error, extra=ids)
    else:
        log.debug("ended: %s", delta.finish_reason, extra=ids)
