"""Orders on their way to workers: one morph, or a transform of several steps, one after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Final

from bus.client import BusFull, BusUnavailable
from bus.clock import now_ms
from bus.messages import Event
from bus.morphs import Morph, MorphOutcome, MorphReport, TransformOrder, in_words
from gateway.delivery.cluster import PlacedInstance
from gateway.errors import ApiError
from gateway.morphs import CARDS_S, ORDER, SILENT_S, MorphRecord
from gateway.operations import transforms
from gateway.operations.answers import bus_or_503, new_id
from gateway.operations.levelling import ShapeStep
from gateway.state import Gateway

log = logging.getLogger("gateway")

POLL_S: Final = 0.05  # between two looks at the cards of a group that has just changed


async def send(
    gateway: Gateway, place: PlacedInstance, command: Morph, why: str = "ordered by hand"
) -> MorphRecord:
    """Send an order and the event of its decision, both or neither. Raises ApiError 503."""
    worker = place.worker.id
    entry = gateway.morphs.ordered(command, worker, f"{why}: {in_words(command)}")
    await _publish_decided(gateway, entry, gateway.bus.names.control(worker), command)
    return entry


async def _publish_decided(
    gateway: Gateway, entry: MorphRecord, stream: str, message: Morph | MorphReport
) -> None:
    """Write a message and the event of its morph's decision, both or neither. Raises ApiError 503."""
    decision = Event(
        kind="morph_decided",
        source="gateway",
        subject=entry.target,
        reason=entry.decided,
        at_ms=now_ms(),
        morph_id=entry.id,
        cause=ORDER,
    )
    batch = gateway.bus.batch()
    batch.publish(gateway.bus.names.events, decision)
    batch.publish(stream, message)
    try:
        with bus_or_503():
            await batch.send()
    except ApiError:
        gateway.morphs.unsent(entry)
        raise


async def shown(gateway: Gateway, entry: MorphRecord) -> None:
    """Wait until the cards of all members show the degree that a transform made, at most CARDS_S."""
    deadline = time.monotonic() + CARDS_S
    while entry.state == "applied" and time.monotonic() < deadline:
        members = [one for one in gateway.cluster.workers.values() if one.id in entry.workers]
        if not any(gateway.morphs.changing(one.id, card.tp) for one in members for card in one.instances):
            return
        gateway.poll_now.set()
        await asyncio.sleep(POLL_S)


class Sequences:
    """The transforms of several steps that this gateway orders, each a morph of its own beside its steps."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    async def start(self, model: str, steps: list[ShapeStep], body: TransformOrder) -> MorphRecord:
        """Return the morph that stands for all steps. Raises ApiError 503."""
        gateway, last = self._gateway, steps[-1]
        leader = transforms.place_of(gateway.cluster, last.workers[0], model)
        report = MorphReport(
            id=new_id(),
            kind="transform",
            target=leader.card.id,
            worker=leader.worker.id,
            epoch=leader.worker.epoch,
            state="running",
            reason=f"step 1 of {len(steps)}: {steps[0]}",
            started_ms=now_ms(),
            numbers={"steps": len(steps), "steps_done": 0},
            workers=sorted({name for step in steps for name in step.workers}),
            steps=[new_id() for _ in steps],
        )
        entry = gateway.morphs.on_report(report)
        planned = "; ".join(map(str, steps))
        entry.decided = (
            f"ordered by hand: tp {body.tp} on {', '.join(body.workers or ())}, in steps: {planned}"
        )
        entry.cause = ORDER
        await _publish_decided(gateway, entry, gateway.bus.names.events, report)
        task = self._tasks[entry.id] = asyncio.create_task(self._run(report, model, steps, body))
        task.add_done_callback(lambda _: self._tasks.pop(entry.id, None))
        return entry

    def cancel(self, morph_id: str) -> None:
        """Order no further step of this morph; for others nothing happens."""
        if morph_id in self._tasks:
            self._cancelled.add(morph_id)

    async def close(self) -> None:
        """Order nothing more. The step that runs goes on at its workers."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, report: MorphReport, model: str, steps: list[ShapeStep], body: TransformOrder
    ) -> None:
        state: MorphOutcome = "applied"
        reason, num_done = "", 0
        try:
            for step, morph_id in zip(steps, report.steps, strict=True):
                at = f"step {num_done + 1} of {len(steps)}: {step}"
                report = replace(report, reason=at, numbers=report.numbers | {"steps_done": num_done})
                await self._publish(report)
                state, reason = await self._step(report, model, step, morph_id, body)
                if state != "applied":
                    reason = f"{report.reason}: {reason}; the steps before it stay"
                    break
                num_done += 1
        except Exception as error:
            log.exception("the steps of morph %s cannot go on", report.id)
            state, reason = "failed", f"{type(error).__name__}: {error}"
        finally:
            self._cancelled.discard(report.id)
        numbers = report.numbers | {"steps_done": num_done}
        end = replace(report, state=state, reason=reason, numbers=numbers, ended_ms=now_ms())
        await self._publish(end)

    async def _step(
        self,
        report: MorphReport,
        model: str,
        step: ShapeStep,
        morph_id: str,
        body: TransformOrder,
    ) -> tuple[MorphOutcome, str]:
        gateway = self._gateway
        if report.id in self._cancelled:
            return "failed", "cancelled"
        try:
            place, command = transforms.command(gateway.cluster, model, step, body, morph_id)
            why = f"{report.reason.partition(':')[0]} of morph {report.id}"
            entry = await send(gateway, place, command, why)
        except ApiError as error:
            return "failed", error.message
        while entry.is_running:
            await entry.wait(SILENT_S / 4)
            await self._publish(report)
        await shown(gateway, entry)
        return entry.state, entry.reason

    async def _publish(self, report: MorphReport) -> None:
        """Publish to every gateway, this one included, as soon as Redis takes it."""
        bus = self._gateway.bus
        while True:
            try:
                return await bus.publish(bus.names.events, report)
            except BusUnavailable:
                await bus.wait_up()
            except BusFull:
                await asyncio.sleep(SILENT_S / 4)
