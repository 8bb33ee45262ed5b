"""Observe, decide, apply: orders, cards, metrics and reports in; records, commands and events out.

Four loops over one state. Orders and transitions take turns: each knows what the one before it changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bus.catalogue import Contents
from bus.checkpoints import BadCheckpoint, Checkpoint, read_checkpoint
from bus.client import Bus, BusFull, BusUnavailable, LiveWorker, Restart
from bus.deployments import (
    DeployModel,
    Intent,
    ModelCard,
    Order,
    PlanModel,
    RegisterModel,
    RemoveModel,
    RetireModel,
)
from bus.messages import Event, Metrics, Morph, MorphReport
from bus.settings import Settings
from controller.deployments.adopting import folders_of_unknown
from controller.deployments.free_memory import FreeMemory, room_of
from controller.deployments.observation import Observation, WorkerView, named_by_settings
from controller.deployments.orders import Facts, carry_out, intent_of, path_of
from controller.deployments.planner import ChosenPlan, Question, RefusedPlan, answer_of, estimates_of, planned
from controller.deployments.profiling import profiles_of, rests_of
from controller.deployments.reconcile import reconcile
from controller.deployments.transitions import Transition
from controller.morphing.view import Rests
from controller.planning.intent import IntentError, validate
from controller.planning.placement import LoadWindow, Placing
from controller.planning.plan import Plan

log = logging.getLogger("controller")

ORDERS = (RegisterModel, RemoveModel, PlanModel, DeployModel, RetireModel)
KEPT = 4096  # reports, complaints and commands that are remembered
LOOK_S = 0.5  # at what is deployed, at most
PURSUE_S = 5.0  # between two looks for other ways to serve what serves
REASK_S = 2.0  # the very same is not asked before, where nothing is loaded by the answer: a plan takes 0.1 s


class Deployer:
    """Owns models and deployments. `start_afresh` of the bus's data: what was known is written again."""

    def __init__(self, settings: Settings, bus: Bus) -> None:
        self._bus = bus
        self._stale_s = settings.monitor.stale_s
        self._pause_s = min(LOOK_S, settings.controller.interval_s)
        self._grace_s = settings.controller.grace_s
        self._max_model_len = settings.worker.max_model_len
        self._contents = Contents()
        self._workers: list[LiveWorker] = []
        self._metrics: tuple[float, Metrics] | None = None  # the last, and when they came
        chosen = settings.controller
        self._window = LoadWindow(chosen.load_window_s)
        self._cooldown_ms = round(1000 * chosen.change_cooldown_s)
        self._placing = Placing(chosen.placement, chosen.placement_threshold)
        self._reports: OrderedDict[str, MorphReport] = OrderedDict()
        self._complaints: OrderedDict[str, str] = OrderedDict()
        self._progress: OrderedDict[str, str] = OrderedDict()
        self._heard: OrderedDict[str, int] = OrderedDict()
        self._sent: OrderedDict[str, int] = OrderedDict()
        self._settled_at_s = time.monotonic() + self._grace_s
        self._is_manual = False  # the policy that morphs
        self._pursued_s = float("-inf")  # other ways for what serves were looked for last
        self._loads_known_s = time.monotonic() + chosen.load_window_s
        self._answers: dict[Hashable, tuple[float, ChosenPlan | RefusedPlan]] = {}  # and until when
        self._is_lost = False  # what Redis had, and it is not written again yet
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._has_history = asyncio.Event()  # of reports: what an earlier controller ordered
        bus.on_restart(self._restarted)

    def _restarted(self, restart: Restart) -> None:
        self._settled_at_s = time.monotonic() + self._grace_s
        self._is_lost |= restart.data_lost
        self._news.set()

    # ------------------------------------------------------------------------------------- loops

    async def take(self) -> None:
        """For ever: orders, in turn. What an earlier controller left is carried out, too: who waits for it
        no longer has withdrawn it."""
        async with self._bus.reader(self._bus.names.orders, *ORDERS, start="0") as reader:
            async for batch in reader:
                for entry, order in batch:
                    await self._try(self._answer(entry, order))
                self._news.set()

    async def listen(self) -> None:
        """For ever: reports of morphs, from the oldest there is; complaints of those that measure."""
        events = self._bus.names.events
        async with self._bus.reader(events, MorphReport, Event, start="0") as reader:
            while True:
                batch = await reader.read()
                for _, told in batch:
                    self._hear(told)
                if not batch:
                    self._has_history.set()

    async def watch(self) -> None:
        """For ever: memory and load."""
        async with self._bus.reader(self._bus.names.metrics, Metrics) as reader:
            async for batch in reader:
                now_s, metrics = time.monotonic(), batch[-1][1]
                self._metrics = now_s, metrics
                for one in metrics.workers:
                    self._window.see(one.worker, now_s, one.busy)

    async def bring_about(self) -> None:
        """For ever: what is wished for."""
        await self._has_history.wait()
        while True:
            await self._try(self.step())
            try:
                async with asyncio.timeout(self._pause_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turn:
                await work
        except BusUnavailable:
            self._settled_at_s = time.monotonic() + self._grace_s
            await self._bus.wait_up()
        except BusFull as full:
            log.debug("a deployment waits: %s", full)

    def _hear(self, told: MorphReport | Event) -> None:
        if isinstance(told, MorphReport):
            _remember(self._reports, told.id, told)
            self._news.set()
        elif told.kind in ("profile_failed", "profile_progress"):
            book = self._complaints if told.kind == "profile_failed" else self._progress
            _remember(book, told.morph_id, told.reason)
            _remember(self._heard, told.morph_id, time.time_ns() // 1_000_000)
            self._news.set()

    # ------------------------------------------------------------------------------------- one turn

    async def step(self) -> None:
        """Observe, decide, apply. Raises BusUnavailable, BusFull."""
        await self._observe()
        seen = self._picture()
        seen = replace(seen, checkpoints=await _checkpoints(folders_of_unknown(self._contents, seen)))
        if seen.may_change:
            self._pursued_s = time.monotonic()
        for transition in reconcile(self._contents, seen, self._plan_for(seen)):
            await self._apply(transition)

    async def _observe(self) -> None:
        self._workers, contents, policy = await asyncio.gather(
            self._bus.workers(), self._bus.catalogue.read(), self._bus.read_policy()
        )
        self._is_manual = policy.mode == "manual"
        if self._is_lost:
            await self._write_again(contents)
            contents = await self._bus.catalogue.read()
            self._is_lost = False
        self._contents = contents

    async def _write_again(self, there: Contents) -> None:
        """Redis lost its data: what it had is what we know."""
        lacking = [one for one in self._contents.records if one not in there.records]
        await self._bus.catalogue.write(*lacking)
        if lacking:
            log.info("wrote %d records again that Redis had lost", len(lacking))

    def _picture(self) -> Observation:
        now_s = time.monotonic()
        pages = {}
        if self._metrics and now_s - self._metrics[0] <= self._stale_s:
            pages = {(one.worker, one.epoch): one.pages for one in self._metrics[1].workers}
        return Observation(
            now_ms=time.time_ns() // 1_000_000,
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
            may_change=not self._is_manual and now_s >= self._pursued_s + PURSUE_S,
            is_load_known=now_s >= self._loads_known_s,
            cooldown_ms=self._cooldown_ms,
        )

    def rests(self) -> Rests:
        """How deployments rest, as far as is known: none before the first look."""
        return rests_of(self._contents)

    def _room(self, seen: Observation) -> FreeMemory:
        metrics = self._metrics[1] if self._metrics else None
        return room_of(metrics, seen.workers.values(), self._contents)

    def _plan_for(self, seen: Observation) -> Any:
        room, now_s = self._room(seen), time.monotonic()
        self._answers = {key: one for key, one in self._answers.items() if now_s < one[0]}

        def plan(question: Question) -> ChosenPlan | RefusedPlan:
            if known := self._answers.get(question.key):
                return known[1]
            found = planned(question, room, self._window, now_s, self._placing)
            answer = answer_of(found, question.current)
            if isinstance(answer, RefusedPlan) or question.gone:  # what if others went: nobody loads by that
                self._answers[question.key] = now_s + REASK_S, answer
            return answer

        return plan

    async def _apply(self, transition: Transition) -> None:
        """Record, commands and event go out together or not at all."""
        batch = self._bus.batch()
        if transition.record is not None:
            if transition.removed:
                batch.erase(transition.record)
            else:
                batch.write(transition.record)
        if transition.erased is not None:
            batch.erase(transition.erased)
        for worker, command in transition.commands:
            batch.publish(self._bus.names.control(worker), command)
        if transition.told and transition.record is not None:
            batch.publish(self._bus.names.events, self._event(transition))
        for command in transition.morphs:
            batch.publish(self._bus.names.events, self._why(command, transition))
        now_ms = time.time_ns() // 1_000_000
        for _, command in transition.commands:  # before: where nobody knows, it counts as sent
            _remember(self._sent, command.id, now_ms)
        await batch.send()
        if transition.told and transition.record is not None:
            log.info("%s %s: %s", transition.kind, transition.subject, transition.record.reason)

    def _event(self, transition: Transition) -> Event:
        assert transition.record is not None
        return Event(
            kind=transition.kind,
            source=self._bus.link.source,
            subject=transition.subject,
            reason=transition.record.reason,
            at_ms=time.time_ns() // 1_000_000,
            numbers=transition.numbers,
        )

    def _why(self, command: Morph, transition: Transition) -> Event:
        return Event(
            kind="morph_decided",
            source=self._bus.link.source,
            subject=command.instance,
            reason=transition.why,
            at_ms=time.time_ns() // 1_000_000,
            numbers=dict(transition.compared),
            morph_id=command.id,
            cause=transition.cause,
        )

    # ------------------------------------------------------------------------------------- orders

    async def _answer(self, entry: str, order: Order) -> None:
        await self._observe()
        facts = await self._facts(order)
        outcome = carry_out(order, self._contents, facts)
        is_settled = await self._bus.catalogue.settle(
            entry, outcome.answer, write=outcome.write, remove=outcome.remove
        )
        batch = self._bus.batch()
        for worker, command in outcome.commands if is_settled else ():
            batch.publish(self._bus.names.control(worker), command)
        await batch.send()

    async def _facts(self, order: Order) -> Facts:
        seen, found, bad_intent = self._picture(), None, ""
        intent = intent_of(order)
        if intent is not None:
            try:
                validate(intent)
                found = self._planned(order, intent, seen)
            except IntentError as error:
                bad_intent = str(error)
        path = path_of(order, self._contents)
        return Facts(
            now_ms=seen.now_ms,
            checkpoint=await asyncio.to_thread(_checkpoint, path) if path else "",
            by_settings=named_by_settings(seen.workers.values()),
            estimates=tuple(estimates_of(found)),
            unmet=found.reason if found and found.is_unmet else "",
            bad_intent=bad_intent,
            max_model_len=self._max_model_len,
        )

    def _planned(self, order: Order, intent: Intent, seen: Observation) -> Plan | None:
        card = self._model(order)
        if card is None:
            return None
        devices = [device for device in seen.workers.values() if device.takes_orders]
        question = Question(
            card=card, intent=intent, profiles=profiles_of(self._contents, card), devices=devices
        )
        return planned(question, self._room(seen), self._window, time.monotonic(), self._placing)

    def _model(self, order: Order) -> ModelCard | None:
        name = order.name if isinstance(order, PlanModel | DeployModel) else ""
        return self._contents.models.get(name)


async def _checkpoints(folders: Iterable[str]) -> dict[str, Checkpoint]:
    """Of those that are models."""
    found = {path: await asyncio.to_thread(_checkpoint, path) for path in folders}
    return {path: one for path, one in found.items() if isinstance(one, Checkpoint)}


def _checkpoint(path: str) -> Checkpoint | str:
    try:
        return read_checkpoint(Path(path))
    except BadCheckpoint as error:
        return str(error)


def _remember(kept: OrderedDict[str, Any], key: str, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > KEPT:
        kept.popitem(last=False)
