"""The life of a worker from its first lease to its last: join, load, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from bus.client import Bus
from bus.messages import InstanceCard, WorkerCard
from bus.morphs import MorphReport
from bus.precisions import PRECISIONS
from bus.service import run_until
from bus.settings import Settings
from worker.deploy.model_host import ModelHost
from worker.engine.engine import StepResult
from worker.profiler.measurer import kind_of, measurer_of
from worker.profiler.runner import ProfileRunner
from worker.service.engine_thread import EngineThread
from worker.service.gpu_watch import watch_of
from worker.service.groups import GroupMembership, meet_neighbours
from worker.service.instances import GATEWAYS_LOOK_S, Instances
from worker.service.intake import Intake, watch_gateways
from worker.service.ledger import Ledger
from worker.service.loading import Loader, LoadTask
from worker.service.measures import Measures
from worker.service.membership import Membership
from worker.service.publisher import Outbox, OutputPublisher, ReportPublisher, ResultQueue
from worker.service.tasks import end
from worker.service.telemetry import TelemetryReporter, watch_steps

log = logging.getLogger("worker")

DRAIN_CHECK_S = 0.05
PARTING_CHECK_S = 0.3


async def serve(settings: Settings, bus: Bus, stop: asyncio.Event, load: Loader) -> None:
    """Serve until `stop` is set or a Drain command comes.

    Raises CannotServe and RedisProblem; anything else is a bug or a broken device, and a restart helps.
    """
    worker = settings.worker.id or f"{socket.gethostname()}-0"
    card = WorkerCard(
        id=worker,
        epoch=0,  # `join` takes one
        host=socket.gethostname(),
        pid=os.getpid(),
        device=settings.worker.device,
        page_bytes=0,
        state="loading",
        variants=[one for one in PRECISIONS if one == "full" or one in settings.worker.variants],
    )
    membership = Membership(bus, card, settings.worker.lease_s)
    try:
        await run_until(stop, membership.join())
        if stop.is_set():
            return
        # While the lease is renewed: without it other workers may do the same work.
        renewal = asyncio.create_task(membership.run(), name="lease")
        try:
            host = await LoadTask(load, settings.worker, worker).run(membership, stop, renewal)
            if host:
                await Serving(settings, bus, worker, host, membership).run(stop, renewal)
        finally:
            await end(renewal)
    finally:
        await membership.leave()


class Serving:
    """The parts of a worker that has something to serve, and the wires between them."""

    def __init__(
        self, settings: Settings, bus: Bus, worker: str, host: ModelHost, membership: Membership
    ) -> None:
        self._settings, self._bus, self._host, self._membership = settings.worker, bus, host, membership
        self._loop = asyncio.get_running_loop()
        self._died: asyncio.Future[None] = self._loop.create_future()
        self._draining = asyncio.Event()
        self._ledger = Ledger()
        runner = ProfileRunner(self._settings.morph_share)
        results = ResultQueue(self._loop, self._take_results, self._settings.publish_ms / 1000)
        groups = GroupMembership(host)
        groups.update()
        self._thread = EngineThread(
            host.engine,
            host.pool.counts,
            host.morphs,
            groups.grouping,
            snapshot_s=self._settings.telemetry_s,
            on_results=results.put,
            on_snapshot=self._in_loop(lambda snapshot: self._reporter.take(snapshot)),
            on_reports=self._in_loop(self._take_reports),
            on_events=self._in_loop(lambda events: self._morph_reports.put(events)),
            on_death=self._in_loop(self._die),
            measuring=runner,
        )
        self._outbox = Outbox(bus, self._thread, membership.may_publish)
        self._dispatch = OutputPublisher(bus.names, worker, self._ledger, self._outbox)
        self._intake = Intake(bus, worker, lambda: membership.epoch, self._ledger, self._thread, self._outbox)
        self._gpu_watch = watch_of(host.pool.backend.device)
        self._reporter = TelemetryReporter(
            bus,
            worker,
            lambda: membership.epoch,
            self._thread,
            busy_interval_s=self._settings.telemetry_s,
            idle_interval_s=self._settings.idle_telemetry_s,
            gpu=self._gpu_watch.latest if self._gpu_watch else lambda: None,
        )
        self._morph_reports = ReportPublisher(bus)
        self._measures = Measures(bus, worker, self._thread, runner, measurer_of(host))
        self._intake.on_measure = self._measures.begin
        self._intake.on_cancel_morph = self._measures.cancel
        self._instances = Instances(
            bus,
            self._intake,
            self._ledger,
            host.cards,
            on_changed=self._models_changed,
            in_engine=self._thread.call,
            on_error=self._die,
        )
        host.listener, host.post = self._instances, self._loop.call_soon_threadsafe
        host.on_changed, groups.use = groups.update, self._thread.use_grouping
        groups.on_regrouped = self._in_loop(lambda *group: self._show(lambda: self._show_group(*group)))
        groups.on_cards = self._in_loop(self._take_cards)
        self._showing: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, renewal: asyncio.Task[None]) -> None:
        """Serve until drained. Raises what ends the engine's thread, the renewal or a part of the service."""
        self._reporter.take(self._thread.snapshot())
        self._thread.start()
        if self._gpu_watch:
            self._gpu_watch.start()
        self._thread.fence(self._membership.epoch)
        self._membership.on_fenced = self._fence
        self._instances.read(self._membership.epoch)
        work = (
            self._until_drained(stop),
            self._outbox.run(),
            self._reporter.run(),
            self._morph_reports.run(),
            self._intake.read_commands(self._draining.set),
            watch_gateways(self._bus, self._ledger, self._intake, self._outbox),
            meet_neighbours(self._bus, lambda: self._membership.card, self._thread),
            watch_steps(self._thread, self._settings.watchdog_s),
        )
        tasks: list[asyncio.Future[None]] = [asyncio.create_task(each) for each in work]
        try:
            ends = [*tasks, self._died, renewal]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._membership.on_fenced = lambda epoch: None
            await end(*tasks, self._died, *([self._showing] if self._showing else []))
            await self._instances.close()
            await self._measures.close()
            await asyncio.to_thread(self._thread.stop)
            if self._gpu_watch:
                await asyncio.to_thread(self._gpu_watch.stop)
            if self._host.transport:
                self._host.transport.close()
            await self._morph_reports.send_rest()

    def _fence(self, epoch: int) -> None:
        """Stop everything of the old epoch after the lease was lost: it must not publish or acknowledge."""
        self._ledger.clear()
        self._outbox.clear()
        self._thread.fence(epoch)
        self._instances.read(epoch)

    def _models_changed(self) -> None:
        """Show on the card that a model comes, is here, goes or is gone, once the worker is announced."""
        if self._membership.card.state != "loading":
            shown, loading = self._instances.shown, self._instances.loading
            told = [loading] if loading else []
            self._show(lambda: self._membership.update(instances=shown, loading=told))

    async def _announce(self) -> None:
        host, transport = self._host, self._host.transport
        device = host.pool.backend.device
        await self._membership.update(
            state="serving",
            link=transport.address if transport else "",
            link_key=transport.key if transport else b"",
            instances=self._instances.shown,
            device=str(device),
            device_kind=kind_of(device),
            page_bytes=host.pool.page_bytes,
            progress="",
        )
        models = ", ".join(card.model for card in host.cards) or "no model yet: waiting for deployments"
        log.info("serving %s on %s", models, device)

    async def _until_drained(self, stop: asyncio.Event) -> None:
        await run_until(stop, self._intake.is_listening.wait())
        if stop.is_set():  # no gateway has seen a card to send to
            return
        await self._announce()
        waits = [asyncio.create_task(event.wait()) for event in (stop, self._draining)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            await end(*waits)

    async def _drain(self) -> None:
        """Finish the requests, also those of gateways that have not yet seen the card change."""
        log.info("draining: %d requests to finish", len(self._ledger))
        why = f"{self._membership.card.id} is draining"
        self._thread.call(lambda: self._host.morphs.refuse_deploys(why))
        await self._membership.update(state="draining")
        self._measures.refuse(why)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._part()  # first, since a group whose leader drains takes nothing new
                await self._end_stages(why)
                if self._bus.up:  # else no gateway can send anything either
                    await asyncio.sleep(GATEWAYS_LOOK_S)
                while len(self._ledger) or await self._instances.backlog():  # noqa: ASYNC110 one wait a life
                    await asyncio.sleep(DRAIN_CHECK_S)
                await self._part()  # leave a group ordered before the card was read
                await self._outbox.wait_empty()
        except TimeoutError:
            if unfinished := len(self._ledger):
                log.warning("%d requests did not finish in time; they go on elsewhere", unfinished)

    async def _part(self) -> None:
        """Leave the group, if the worker is in one, so that other members compute no request again."""
        while self._thread.is_in_group:
            self._thread.request_split()
            await asyncio.sleep(PARTING_CHECK_S)

    async def _end_stages(self, why: str) -> None:
        """End the stages that this worker runs for leaders elsewhere, after their requests."""
        stages = self._host.stages
        if stages:
            self._thread.call(lambda: stages.ask_to_end(why))
            while stages.runners:  # noqa: ASYNC110 one wait a life
                await asyncio.sleep(DRAIN_CHECK_S)

    async def _show_group(self, members: tuple[str, ...], why: str) -> None:
        """Show the group on the cards: the leader's is the group's, the others say whom they follow."""
        own = self._membership.card
        self._reporter.group = members
        shape: Any = {"tp": max(1, len(members)), "workers": list(members) or [own.id]}
        cards = [replace(card, **shape) for card in own.instances]
        self._instances.replace(cards)
        log.info("serving in %s: %s", f"a group of {', '.join(members)}" if members else "no group", why)
        await self._membership.update(instances=cards)

    def _die(self, error: BaseException) -> None:
        if not self._died.done():
            self._died.set_exception(error)

    def _in_loop(self, call: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `call` in the event loop."""

        def post(*args: Any) -> None:
            self._loop.call_soon_threadsafe(call, *args)

        return post

    def _take_results(self, epoch: int, results: list[StepResult]) -> None:
        if epoch == self._membership.epoch:
            self._dispatch.take(epoch, results)

    def _take_reports(self, reports: list[MorphReport]) -> None:
        """Publish reports, those of an end with the numbers after it, and of models behind the card."""
        latest = self._reporter.latest
        reports = [one if one.state == "running" else replace(one, telemetry=latest) for one in reports]
        if any(report.kind in ("deploy", "retire") for report in reports):
            self._show(lambda: self._put_reports(reports))
        else:
            self._morph_reports.put(reports)

    async def _put_reports(self, reports: list[MorphReport]) -> None:
        self._morph_reports.put(reports)

    def _show(self, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Update cards one after the other: a newer card must not be overtaken by an older one."""
        self._showing = asyncio.create_task(self._after(self._showing, then))

    async def _after(
        self, before: asyncio.Task[None] | None, then: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        if before:
            await asyncio.wait([before])
        await then()

    def _take_cards(self, cards: list[InstanceCard]) -> None:
        """Show cards whose possible degrees have changed."""
        self._instances.replace(cards)
        self._models_changed()
