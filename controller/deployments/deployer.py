"""Observe, decide, apply: orders, cards, metrics and reports in; records, commands and events out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from bus.batch import key_of
from bus.catalogue import Contents
from bus.checkpoints import BadCheckpoint, Checkpoint, read_checkpoint
from bus.client import Bus, BusFull, BusUnavailable, LiveWorker, Restart
from bus.clock import now_ms
from bus.deployments import Answer, CatalogueOrder, DeployModel, Order, PlanModel, WeighLevers
from bus.messages import Event, Metrics
from bus.morphs import MorphReport
from bus.settings import Settings
from controller.deployments.adopting import folders_of_unknown
from controller.deployments.copying import copies_of
from controller.deployments.free_memory import FreeMemory, free_memory
from controller.deployments.observation import Observation, WorkerView, kept_of, named_by_settings
from controller.deployments.orders import Facts, carry_out, path_of
from controller.deployments.planner import Planner, Question, planned
from controller.deployments.profiling import SlowdownsByKind, profiles_of, rests_of, slowdowns_by_kind
from controller.deployments.reconcile import reconcile
from controller.deployments.transitions import Transition
from controller.failures import Failures, described
from controller.morphing.copies import Copies
from controller.morphing.resting import Rests
from controller.planning.intent import IntentError, validate
from controller.planning.placement import LoadWindow, Placing
from controller.planning.plan import Plan

log = logging.getLogger("controller")

ORDERS = get_args(Order)
KEPT = 4096  # reports, complaints and commands that are remembered
LOOK_S = 0.5  # the longest pause between two looks at what is deployed
IMPROVE_S = 5.0  # between two looks for other ways to serve what serves
REASK_S = 2.0  # the pause before a question without a choice is asked again: a plan takes 0.1 s

V = TypeVar("V")


class _Recent(OrderedDict[str, V], Generic[V]):
    """The last KEPT entries that were set."""

    def __setitem__(self, key: str, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > KEPT:
            self.popitem(last=False)


class Deployer:
    """The owner of models and deployments. What Redis loses of them is written again."""

    def __init__(self, settings: Settings, bus: Bus, failures: Failures) -> None:
        self._bus, self._failures = bus, failures
        self._settings, chosen = settings, settings.controller
        self._contents = Contents()
        self._slowdowns: SlowdownsByKind = {}
        self._workers: list[LiveWorker] = []
        self._metrics: tuple[float, Metrics] | None = None  # the last, and when they came
        self._window = LoadWindow(chosen.load_window_s)
        self._placing = Placing(chosen.placement, chosen.placement_threshold)
        self._reports: _Recent[MorphReport] = _Recent()
        self._complaints: _Recent[str] = _Recent()
        self._progress: _Recent[str] = _Recent()
        self._heard: _Recent[int] = _Recent()
        self._sent: _Recent[int] = _Recent()
        self._settled_at_s = time.monotonic() + chosen.grace_s
        self._is_manual = False  # the policy that morphs
        self._improved_s = float("-inf")  # the last look for other ways to serve what serves
        self._loads_known_s = time.monotonic() + chosen.load_window_s
        self._answers: dict[Hashable, tuple[float, Plan]] = {}  # answers, and until when they hold
        self._may_lack = False  # Redis may have lost records, which are not written again yet
        self.what_if: Callable[[WeighLevers], Awaitable[Answer]] = _no_morpher
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._has_history = asyncio.Event()  # set when the reports of earlier orders are read
        bus.on_restart(self._restarted)

    def _restarted(self, _: Restart) -> None:
        self._settled_at_s = time.monotonic() + self._settings.controller.grace_s
        self._may_lack = True  # a replica that became the primary may lack the last writes
        self._news.set()

    async def take(self) -> None:
        """Carry out orders in turn, an earlier controller's too; gateways withdraw those they gave up."""
        async with self._bus.reader(self._bus.names.orders, *ORDERS, start="0") as reader:
            async for batch in reader:
                for entry, order in batch:
                    await self._try(self._answer(entry, order))
                self._news.set()

    async def listen(self) -> None:
        """Follow reports of morphs, from the oldest there is, and of profiles."""
        events = self._bus.names.events
        async with self._bus.reader(events, MorphReport, Event, start="0") as reader:
            while True:
                batch = await reader.read()
                for _, message in batch:
                    with self._failures.survived("deployments"):
                        self._hear(message)
                if not batch:
                    self._has_history.set()

    async def watch(self) -> None:
        """Follow memory and load."""
        async with self._bus.reader(self._bus.names.metrics, Metrics) as reader:
            async for batch in reader:
                now_s, metrics = time.monotonic(), batch[-1][1]
                self._metrics = now_s, metrics
                for one in metrics.workers:
                    self._window.see(one.worker, now_s, one.busy)

    async def bring_about(self) -> None:
        """Take a step again and again, at once after news."""
        await self._has_history.wait()
        while True:
            await self._try(self.step())
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, self._settings.controller.interval_s)):
                    await self._news.wait()
            self._news.clear()

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turn:
                with self._failures.survived("deployments"):
                    await work
        except BusUnavailable:
            self._settled_at_s = time.monotonic() + self._settings.controller.grace_s
            await self._bus.wait_up()
        except BusFull as full:
            log.debug("a deployment waits: %s", full)

    def _hear(self, message: MorphReport | Event) -> None:
        if isinstance(message, MorphReport):
            report = kept_of(message)
            if report is None:
                return
            self._reports[report.id] = report
        elif message.kind in ("profile_failed", "profile_progress"):
            book = self._complaints if message.kind == "profile_failed" else self._progress
            book[message.morph_id] = message.reason
            self._heard[message.morph_id] = now_ms()
        else:
            return
        self._news.set()

    async def step(self) -> None:
        """Observe, decide, apply. Raises BusUnavailable, BusFull."""
        await self._observe()
        seen = self._observation()
        folders = folders_of_unknown(self._contents, seen)
        found = {path: await asyncio.to_thread(_checkpoint, path) for path in folders}
        models = {path: one for path, one in found.items() if isinstance(one, Checkpoint)}
        seen = replace(seen, checkpoints=models)
        if seen.may_change:
            self._improved_s = time.monotonic()
        for transition in reconcile(self._contents, seen, self._planner(seen)):
            with self._failures.survived("deployments"):
                await self._apply(transition)

    async def _observe(self) -> None:
        self._workers, contents, policy = await asyncio.gather(
            self._bus.workers(), self._bus.catalogue.read(), self._bus.read_policy()
        )
        self._is_manual = policy.mode == "manual"
        if self._may_lack:
            there = {key_of(self._bus.names, one) for one in contents.records}
            lacking = [one for one in self._contents.records if key_of(self._bus.names, one) not in there]
            await self._bus.catalogue.write(*lacking)
            if lacking:
                log.info("wrote %d records again that Redis had lost", len(lacking))
                contents = await self._bus.catalogue.read()
            self._may_lack = False
        if contents.profiles != self._contents.profiles:
            self._slowdowns = slowdowns_by_kind(contents)
        self._contents = contents

    def _observation(self) -> Observation:
        now_s, pages = time.monotonic(), {}
        if self._metrics and now_s - self._metrics[0] <= self._settings.monitor.stale_s:
            pages = {(one.worker, one.epoch): one.pages for one in self._metrics[1].workers}
        return Observation(
            now_ms=now_ms(),
            workers={
                live.card.id: WorkerView(
                    card=live.card,
                    pages=pages.get((live.card.id, live.epoch)),
                    load=self._window.load(live.card.id, now_s),
                )
                for live in self._workers
            },
            is_settled=now_s >= self._settled_at_s,
            reports=self._reports,
            complaints=self._complaints,
            progress=self._progress,
            heard=self._heard,
            sent=self._sent,
            may_change=not self._is_manual and now_s >= self._improved_s + IMPROVE_S,
            is_load_known=now_s >= self._loads_known_s,
            cooldown_ms=round(1000 * self._settings.controller.change_cooldown_s),
        )

    def rests(self) -> Rests:
        """Return the shapes that deployments rest in; none before the first look."""
        return rests_of(self._contents, self._slowdowns)

    def copies(self) -> dict[str, Copies]:
        """Return by model what the planner can copy; nothing before the first look."""
        return copies_of(self._contents, self._observation()) if self._contents.deployments else {}

    def _memory(self, seen: Observation) -> FreeMemory:
        return free_memory(self._metrics[1] if self._metrics else None, seen.workers.values(), self._contents)

    def _planner(self, seen: Observation) -> Planner:
        memory, now_s = self._memory(seen), time.monotonic()
        self._answers = {key: one for key, one in self._answers.items() if now_s < one[0]}

        def plan(question: Question) -> Plan:
            if known := self._answers.get(question.key):
                return known[1]
            answer = planned(question, memory, self._placing)
            if not answer.chosen or question.gone:  # with `gone`, no worker loads by the answer
                self._answers[question.key] = now_s + REASK_S, answer
            return answer

        return plan

    async def _apply(self, transition: Transition) -> None:
        """Send record, commands and events, all or none."""
        batch, names = self._bus.batch(), self._bus.names
        if transition.record is not None:
            batch.write(transition.record)
        if transition.erased is not None:
            batch.erase(transition.erased)
        for worker, command in transition.commands:
            batch.publish(names.control(worker), command)
            self._sent[command.id] = now_ms()  # before: if the outcome is unknown, it counts as sent
        record = transition.record if transition.announced else None
        if record is not None:
            about = transition.kind, transition.subject, record.reason
            batch.publish(names.events, self._bus.make_event(*about, transition.numbers))
        for morph in transition.morphs:
            reason, compared, cause = transition.why, transition.compared, transition.cause
            event = self._bus.make_event("morph_decided", morph.instance, reason, compared, morph.id, cause)
            batch.publish(names.events, event)
        await batch.send()
        if record is not None:
            log.info("%s %s: %s", transition.kind, transition.subject, record.reason)

    async def _answer(self, entry: str, order: Order) -> None:
        """Carry out an order. One that fails is answered, too: it would stay in the stream and fail again."""
        why = ""
        with self._failures.survived("orders"):
            try:
                await self._carry_out(entry, order)
            except Exception as error:
                why = described(error)
                raise
        if why:
            told = f"the controller failed to carry out this order: {why}; its log has the traceback"
            await self._bus.catalogue.settle(entry, Answer(id=order.id, status=500, error=told))

    async def _carry_out(self, entry: str, order: Order) -> None:
        if isinstance(order, WeighLevers):
            await self._bus.catalogue.settle(entry, await self.what_if(order))
            return
        await self._observe()
        result = carry_out(order, self._contents, await self._facts(order))
        settle = self._bus.catalogue.settle
        is_settled = await settle(entry, result.answer, write=result.write, remove=result.remove)
        for worker, command in result.commands if is_settled else ():
            await self._bus.publish(self._bus.names.control(worker), command)

    async def _facts(self, order: CatalogueOrder) -> Facts:
        seen, found, bad_intent = self._observation(), Plan(), ""
        if isinstance(order, PlanModel | DeployModel):
            try:
                validate(order.intent)
                found = self._planned(order, seen)
            except IntentError as error:
                bad_intent = str(error)
        path = path_of(order, self._contents)
        return Facts(
            now_ms=seen.now_ms,
            checkpoint=await asyncio.to_thread(_checkpoint, path) if path else "",
            by_settings=named_by_settings(seen.workers.values()),
            plan=found,
            bad_intent=bad_intent,
            max_model_len=self._settings.worker.max_model_len,
        )

    def _planned(self, order: PlanModel | DeployModel, seen: Observation) -> Plan:
        card = self._contents.models.get(order.name)
        if card is None:
            return Plan()
        devices = [device for device in seen.workers.values() if device.takes_orders]
        profiles = profiles_of(self._contents, card)
        question = Question(card=card, intent=order.intent, profiles=profiles, devices=devices)
        return planned(question, self._memory(seen), self._placing)


async def _no_morpher(order: WeighLevers) -> Answer:
    return Answer(id=order.id, status=409, error="this controller morphs nothing")


def _checkpoint(path: str) -> Checkpoint | str:
    try:
        return read_checkpoint(Path(path))
    except BadCheckpoint as error:
        return str(error)
