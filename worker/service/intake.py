"""Read the streams of the instances and the control stream, and hand both to the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import get_args

from bus.client import Bus, BusFull, BusUnavailable
from bus.deployments import Measure
from bus.messages import Cancel, Drain, Submit
from bus.morphs import CancelMorph, Command, Deploy, Morph, Transform
from bus.names import consumer
from bus.policy import Envelope
from worker.distributed.messages import Peer
from worker.service.engine_thread import EngineThread
from worker.service.groups import as_peer
from worker.service.ledger import Ledger, Ticket, log_ids
from worker.service.publisher import Outbox
from worker.service.tasks import RETRY_S, end, until_taken

log = logging.getLogger(__name__)

COMMANDS = (*get_args(Command), Measure, Envelope)


class Intake:
    """Gives requests and commands to the engine's thread."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        epoch: Callable[[], int],
        ledger: Ledger,
        thread: EngineThread,
        outbox: Outbox,
    ) -> None:
        self._bus, self._worker, self._epoch = bus, worker, epoch
        self._ledger, self._thread, self._outbox = ledger, thread, outbox
        self._beginning: dict[str, asyncio.Task[None]] = {}  # Transforms whose peers are being read
        self.on_measure: Callable[[Measure], None] = lambda command: None
        self.on_cancel_morph: Callable[[str], None] = lambda morph_id: None  # beside the engine's thread
        self.is_listening = asyncio.Event()  # no command is missed from here on

    async def read_requests(self, instance: str, epoch: int) -> None:
        """Read for one epoch, until cancelled; entries that earlier epochs left pending are ended first."""
        stream = self._bus.names.requests(instance)
        async with self._bus.group_reader(stream, consumer(self._worker, epoch), Submit) as reader:
            await until_taken(self._bus, reader.open)
            if ended := await until_taken(self._bus, reader.claim_all):
                log.info("ended %d entries that an earlier epoch left in %s", ended, stream)
            while True:
                try:
                    batch = await reader.read()
                except BusFull as error:
                    log.warning("cannot read %s: %s", stream, error)
                    await asyncio.sleep(RETRY_S)
                    continue
                if epoch != self._epoch():  # the next reader ends what this one holds
                    return
                for entry_id, submit in batch:
                    for one in submit.each():
                        self._offer(one, instance, entry_id, epoch)
                    if not self._ledger.is_open(instance, entry_id):
                        self._outbox.ack(stream, entry_id)

    def _offer(self, submit: Submit, instance: str, entry_id: str, epoch: int) -> None:
        verdict = self._ledger.offer(submit, instance, entry_id, epoch)
        if not verdict.run:
            log.info("not run: %s", verdict.reason, extra=log_ids(submit.trace_id, submit.request_id))
            return
        if verdict.replaced:
            self._thread.cancel([submit.request_id])
            self._ack([verdict.replaced])
        log.debug("begun", extra=log_ids(submit.trace_id, submit.request_id) | {"attempt": submit.attempt})
        self._thread.submit(instance, submit)

    async def read_commands(self, on_drain: Callable[[], None]) -> None:
        """Carry out commands for the present epoch until cancelled. Morphs of others are answered `stale`."""
        stream = self._bus.names.control(self._worker)
        async with self._bus.reader(stream, *COMMANDS) as reader:
            await until_taken(self._bus, reader.open)
            self.is_listening.set()
            try:
                async for batch in reader:
                    for _, command in batch:
                        self._obey(command, on_drain)
            finally:  # morphs that have not begun are answered too
                await end(*self._beginning.values())

    def _obey(self, command: Command | Measure | Envelope, on_drain: Callable[[], None]) -> None:
        match command:
            case Transform() | Deploy(is_divided=True, stage=0):
                self._begin(command)
            case _ if isinstance(command, Morph):
                self._thread.morph(command)
            case _ if command.epoch != self._epoch():
                log.info("%s %s is for another epoch", type(command).__name__, command.id)
            case Cancel():
                self._cancel(command)
            case CancelMorph():
                self._cancel_morph(command.morph_id)
            case Drain():
                on_drain()
            case Measure():
                self.on_measure(command)
            case Envelope():
                self._thread.grant(command)

    def _begin(self, command: Transform | Deploy) -> None:
        """Begin a morph of several workers; the same order again changes nothing."""
        if command.id not in self._beginning:
            task = asyncio.create_task(self._with_peers(command), name=f"peers of {command.id}")
            self._beginning[command.id] = task
            task.add_done_callback(lambda _: self._beginning.pop(command.id))

    async def _with_peers(self, command: Transform | Deploy) -> None:
        """Begin the morph even if the cards cannot be read; its answer is then that no worker is reached."""
        peers: dict[str, Peer] = {}
        try:
            for member in await self._bus.members():
                card = member.card
                if card and card.link and member.lease_epoch == card.epoch:
                    peers[card.id] = as_peer(card)
        except BusUnavailable as error:
            log.warning("the workers of %s are not known: %s", command.id, error)
        except Exception:
            log.exception("the workers of %s are not known", command.id)
        finally:
            self._thread.morph(command, peers)

    def _cancel_morph(self, morph_id: str) -> None:
        """Cancel a morph, behind its order if that is still on its way to the engine."""
        self.on_cancel_morph(morph_id)
        if task := self._beginning.get(morph_id):
            task.add_done_callback(lambda _: self._thread.cancel_morph(morph_id))
        else:
            self._thread.cancel_morph(morph_id)

    def _cancel(self, command: Cancel) -> None:
        tickets = [self._ledger.cancel(name, command.up_to_attempt) for name in command.request_ids]
        self._stop([ticket for ticket in tickets if ticket])

    def drop_gateway(self, gateway: str) -> int:
        """Stop the requests of a gateway that is gone. Returns how many."""
        tickets = self._ledger.drop_gateway(gateway)
        self._stop(tickets)
        return len(tickets)

    def _stop(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            log.debug("stopped", extra=ticket.log_ids | {"attempt": ticket.attempt})
        self._ack(tickets)
        self._thread.cancel([ticket.request_id for ticket in tickets])

    def _ack(self, tickets: list[Ticket]) -> None:
        """Acknowledge the entries of tickets that are over, apart from those of which others run."""
        for instance, entry_id in dict.fromkeys((one.instance, one.entry_id) for one in tickets):
            if not self._ledger.is_open(instance, entry_id):
                self._outbox.ack(self._bus.names.requests(instance), entry_id)


CHECK_S = 1.0
# A lease that is missing has already run out once. After Redis lost its data, gateways need a moment to write
# theirs again.
GRACE_S = 3.0


async def watch_gateways(bus: Bus, ledger: Ledger, intake: Intake, outbox: Outbox) -> None:
    """Cancel the requests of gateways that were missing at every look that Redis answered for a while."""
    missing_since: dict[str, float] = {}
    while True:
        await asyncio.sleep(CHECK_S)
        with suppress(BusUnavailable, BusFull):
            asked = ledger.gateways()
            missing = asked - await bus.live_gateways(asked)
            now = time.monotonic()
            missing_since = {gateway: missing_since.get(gateway, now) for gateway in missing}
            for gateway, since in missing_since.items():
                if now - since >= GRACE_S:
                    stopped = intake.drop_gateway(gateway)
                    log.warning("gateway %s is gone; stopped its %d requests", gateway, stopped)
                    outbox.drop_gateway(bus.names.tokens(gateway))
