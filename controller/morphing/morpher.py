"""The loops of morphing: envelopes for the reflexes of instances, and what the planner takes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from bus.client import Bus, BusFull, BusUnavailable, Restart
from bus.clock import MessageClock, seconds_of
from bus.deployments import Answer, WeighLevers
from bus.levers import LeverPlan
from bus.messages import Demand, Event, Metrics
from bus.morphs import MorphReport
from bus.settings import MonitorSettings
from controller.failures import Failures
from controller.morphing.copies import Copies, CopyDecision, CopyState, adjust
from controller.morphing.decision import MorphDecision, costs_of, weighed
from controller.morphing.envelopes import Floors, Granted, due, envelopes, hear_floor, raised
from controller.morphing.forecast import Forecast, expected_blocks, observe_all
from controller.morphing.groups import groups_of
from controller.morphing.pressure import MoveDecision, PressureState, relieve_pressure
from controller.morphing.resting import Rests
from controller.morphing.scaling import hear, scale_down, scale_up, waiting_by_model
from controller.morphing.track import Freshness, State, observe, sent, unsent
from controller.morphing.weighing import learn_speeds
from controller.morphing.what_if import what_if
from controller.planning.lever_costs import LeverCosts, observe_cost, predict

log = logging.getLogger("controller")

GRANT_S = 0.5  # between two looks at what instances may do


class Morpher:
    """Four loops.

    `grant` tells instances what they may do by themselves, which precision requests wait for, and what is
    expected. `decide` takes metrics, `answer` what gateways ask for, `confirm` what became of morphs.
    """

    def __init__(
        self,
        monitor: MonitorSettings,
        bus: Bus,
        failures: Failures,
        resting: Callable[[], Rests] = dict,
        copies: Callable[[], Mapping[str, Copies]] = dict,
    ) -> None:
        """`resting` returns the shapes that deployments rest in, `copies` those that can be copied."""
        self._bus, self._failures = bus, failures
        self._resting, self._copies = resting, copies
        self._freshness = Freshness(
            stale_s=monitor.stale_s, gap_s=monitor.stale_s + max(monitor.interval_s, monitor.idle_interval_s)
        )
        self._start_afresh()
        bus.on_restart(self._restarted)

    def _start_afresh(self) -> None:
        self._state = State()
        self._clock = MessageClock()
        self._granted: Granted = {}
        self._floors: Floors = {}
        self._forecasts: dict[str, Forecast] = {}  # forecasts by instance
        self._metrics: tuple[float, Metrics] | None = None  # the last, and when they were made
        self._costs, self._pressure, self._copying = LeverCosts(), PressureState(), CopyState()

    def _restarted(self, restart: Restart) -> None:
        if restart.data_lost:  # another server, maybe another clock; pending morphs are lost with the rest
            self._start_afresh()

    async def grant(self) -> None:
        """Send envelopes when they change and before they are stale. One that is lost comes again."""
        while True:
            await self._try(self._grant())
            await asyncio.sleep(GRANT_S)

    async def _grant(self) -> None:
        policy, workers = await asyncio.gather(self._bus.read_policy(), self._bus.workers())
        now_s = time.monotonic()
        loads = (
            {one.id: one.running + one.waiting for one in self._metrics[1].instances} if self._metrics else {}
        )
        before = [name for name, (envelope, _) in self._granted.items() if envelope.floor]
        floors = raised(self._floors, workers, now_s, loads, before)
        held = self._state.reshaping(self._clock.now(now_s))
        moved, expected = dict[str, int](), dict[str, int]()
        if self._is_informed(now_s):
            moved, expected = {**self._pressure.moved}, expected_blocks(self._forecasts)
        wanted = envelopes(workers, policy, self._resting(), floors, expected, moved, held)
        self._granted = {name: one for name, one in self._granted.items() if name in wanted}
        for worker, envelope in due(self._granted, wanted, now_s):
            await self._bus.publish(self._bus.names.control(worker), envelope)
            self._granted = {**self._granted, envelope.instance: (envelope, now_s)}

    def _is_informed(self, now_s: float) -> bool:
        """Return True unless the monitor has been silent for `stale_s`."""
        made_s = self._metrics[0] if self._metrics else float("-inf")
        return self._clock.now(now_s) <= made_s + self._freshness.stale_s

    async def confirm(self) -> None:
        """Follow reports from the oldest event on: what is pending and when the last morph was."""
        async with self._bus.reader(self._bus.names.events, MorphReport, Event, start="0") as reader:
            async for batch in reader:
                for entry_id, message in batch:
                    if isinstance(message, MorphReport):
                        with self._failures.survived("morphs"):
                            self._state = observe(self._state, message, seconds_of(entry_id))
                            self._costs = observe_cost(self._costs, message)

    async def decide(self) -> None:
        """Judge metrics as they come; late ones (a busy machine, a stopped process) by their age."""
        async with self._bus.reader(self._bus.names.metrics, Metrics) as reader:
            async for batch in reader:
                now_s = time.monotonic()
                windows = [(self._clock.observe(entry_id, now_s), metrics) for entry_id, metrics in batch]
                self._metrics = windows[-1]
                await self._try(self._judge(windows))
                await self._try(self._foresee())

    async def answer(self) -> None:
        """Make groups as gateways ask for them: their requests do not wait for the next metrics."""
        async with self._bus.reader(self._bus.names.demand, Demand) as reader:
            async for batch in reader:
                now_s = time.monotonic()
                for entry_id, demand in batch:
                    with self._failures.survived("morphs"):
                        self._state = hear(self._state, demand, self._clock.observe(entry_id, now_s))
                        self._floors = hear_floor(self._floors, demand, now_s)
                await self._try(self._scale_up())

    async def what_if(self, order: WeighLevers) -> Answer:
        """Weigh what is there and what `order` adds to it, and do nothing. Raises BusUnavailable."""
        policy, workers = await asyncio.gather(self._bus.read_policy(), self._bus.workers())
        if self._metrics is None:
            return Answer(id=order.id, status=409, error="the monitor has sent no metrics yet; ask again")
        (made_s, metrics), now_s = self._metrics, self._clock.now(time.monotonic())
        groups = groups_of(metrics, workers, now_s - made_s, self._resting())
        served = sorted({group.model for group in groups})
        if order.model and order.model not in served:
            there = f"; there are: {', '.join(served)}" if served else ""
            return Answer(id=order.id, status=404, error=f"no instance of {order.model!r} serves{there}")
        waiting = waiting_by_model(self._state, now_s)
        return Answer(
            id=order.id,
            status=200,
            plans=what_if(order, groups, waiting, policy, self._costs, now_s, self._copies()),
            error="mode manual: nothing of it would be done" if policy.mode == "manual" else "",
        )

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            with self._failures.survived("morphs"):
                await work
        except BusUnavailable:
            await self._bus.wait_up()
        except BusFull as full:
            log.debug("a morph waits: %s", full)

    async def _judge(self, windows: Iterable[tuple[float, Metrics]]) -> None:
        policy, workers = await asyncio.gather(self._bus.read_policy(), self._bus.workers())
        for at_s, metrics in windows:
            lag_s, rests = self._clock.now(time.monotonic()) - at_s, self._resting()
            groups = groups_of(metrics, workers, lag_s, rests)
            self._costs = learn_speeds(self._costs, groups)
            about = policy, at_s, self._freshness, self._costs
            self._state, parting = scale_down(self._state, groups, *about)
            await self._send(parting, at_s)
            before = self._pressure.moved
            copies = self._copies()
            self._pressure, moves, plans = relieve_pressure(self._pressure, groups, *about, copies)
            if self._pressure.moved != before:
                await self._grant()  # first, or the reflex takes loss for what moves
            await self._tell(moves, plans)
            taken = self._pressure.plans.values()
            self._copying, orders = adjust(self._copying, taken, groups, copies, *about)
            for one in orders:
                await self._copy(one)

    async def _tell(self, moves: Iterable[MoveDecision], plans: Iterable[LeverPlan]) -> None:
        """Order gateways to move requests, and say what was weighed."""
        for move in moves:
            about = move.instance, move.reason, move.numbers
            await self._publish(self._bus.make_event("move_decided", *about, weighed=move.plan))
        for plan in plans:
            about = plan.subject, f"{plan.need}; {weighed(plan)}", costs_of(plan)
            await self._publish(self._bus.make_event("levers_weighed", *about, weighed=plan.in_brief()))

    async def _publish(self, event: Event) -> None:
        await self._bus.publish(self._bus.names.events, event)

    async def _copy(self, decision: CopyDecision) -> None:
        """Order the deployer, and say why, both or neither."""
        batch, names = self._bus.batch(), self._bus.names
        about = decision.subject, decision.reason, decision.numbers
        batch.publish(names.orders, decision.order)
        event = self._bus.make_event("copy_decided", *about, weighed=decision.plan)
        batch.publish(names.events, event)
        await batch.send()
        log.info("%s: %s", decision.subject, decision.reason, extra=decision.numbers)

    async def _foresee(self) -> None:
        """Forecast from the last metrics, and tell at once whom it concerns."""
        policy, workers = await asyncio.gather(self._bus.read_policy(), self._bus.workers())
        if self._metrics is None:  # Redis may have lost its data meanwhile
            return
        at_s, metrics = self._metrics
        share = (policy.in_force() or policy).kv_usage_high
        before = expected_blocks(self._forecasts)
        self._forecasts, scored = observe_all(self._forecasts, metrics, workers, share, at_s)
        for one in scored:
            await self._bus.event("forecast_scored", one.instance, one.words, **one.numbers)
        if expected_blocks(self._forecasts) != before:
            await self._grant()

    async def _scale_up(self) -> None:
        policy, workers = await asyncio.gather(self._bus.read_policy(), self._bus.workers())
        if self._metrics is None:
            return
        (made_s, metrics), now_s = self._metrics, self._clock.now(time.monotonic())
        groups = groups_of(metrics, workers, now_s - made_s, self._resting())
        held = self._state.reshaping(now_s)
        self._state, merging = scale_up(self._state, groups, policy, now_s, self._freshness, self._costs)
        await self._send(merging, now_s)
        if self._state.reshaping(now_s) - held:
            await self._grant()

    async def _send(self, decisions: Iterable[MorphDecision], at_s: float) -> None:
        """Send each command with its event, both or neither. After a broken connection it counts as sent."""
        for decision in decisions:
            morph_id = f"morph-{uuid.uuid4().hex[:12]}"
            for instance in decision.instances:
                self._state = sent(self._state, instance, decision.lever, morph_id, at_s)
            batch, names = self._bus.batch(), self._bus.names
            about = decision.instance, decision.reason, decision.numbers, morph_id, decision.cause
            try:
                batch.publish(names.control(decision.worker), decision.command(morph_id))
                event = self._bus.make_event("morph_decided", *about, weighed=decision.plan)
                batch.publish(names.events, event)
                await batch.send()
            except BusUnavailable:
                raise
            except Exception:
                self._state = unsent(self._state, morph_id)
                raise
            if decision.predicted_s:
                self._costs = predict(self._costs, morph_id, decision.predicted_s)
            log.info("%s of %s: %s", morph_id, decision.instance, decision.reason, extra=decision.numbers)
