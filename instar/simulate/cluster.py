"""A cluster of simulated instances, event by event. Time is in seconds from the beginning of the run.

The cost is in proportion to the scheduled steps and to the reports of busy instances: an idle instance at
rest costs nothing, and is not made before its first request. Same input, same result.

Between two events of an instance its reports follow from what it does. So they are taken together, before its
next event or when somebody reads them. `is_plain` takes each report and each step by itself; the results are
the same.
"""

from __future__ import annotations

import gc
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from bus.morphs import MorphOutcome, MorphReport
from bus.policy import Policy
from bus.settings import MonitorSettings, WorkerSettings
from controller.morphing.forecast import expected_blocks, observe_each
from instar.replay.outcomes import UNFINISHED, RequestOutcome
from instar.replay.schemas import Arrival
from instar.simulate.calibration import EngineCalibration
from instar.simulate.engine import SimulatedInstance, Tally
from instar.simulate.gateway import ActiveInstance, SimulatedGateway
from instar.simulate.morphs import MorphingInstance
from instar.simulate.relief import SimulatedMorphs
from instar.simulate.windows import Smoothed
from worker.morph.losses import losses_of

SAMPLE_S: Final = 1.0
TOO_LONG: Final = "400 context_length_exceeded"  # the gateway's answer
Outage = tuple[float, float]  # from when until when
EVENTS_PER_CALL: Final = 5000  # between two calls of `progress`


@dataclass(slots=True)
class Record:
    """The results of a simulation beside the outcomes of the requests."""

    outcomes: list[RequestOutcome] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    morphs: list[MorphReport] = field(default_factory=list)
    levers: Counter[tuple[str, MorphOutcome]] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    events_in: Counter[int] = field(default_factory=Counter)
    preemptions: int = 0
    below_s: float = 0.0  # sum over all instances
    seconds: float = 0.0


class Unmeasured(Exception):
    """More sequences run at once than the calibration covers."""


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's collector of cycles: nothing here makes any, and it looks at all instances."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SimulatedCluster:
    """The event loop: arrivals, steps, morphs, and the reports of busy instances."""

    _settles = False  # True: reports take note of the steps that have ended, so each is taken by itself

    def __init__(
        self,
        calibration: EngineCalibration,
        num_workers: int,
        policy: Policy | None = None,
        *,
        monitor: MonitorSettings | None = None,
        most_running: int | None = None,
        outage: Outage | None = None,
        is_plain: bool = False,
    ) -> None:
        """Make a cluster at rest.

        policy: of the reflexes; None: all layers stay as they are. most_running: more sequences in an
        instance raise Unmeasured. outage: while the controller is down.
        """
        self.record = Record()
        self.instances: dict[int, ActiveInstance] = {}  # instances that ever had a request
        self._calibration, self._policy, self._outage = calibration, policy, outage
        self._in_force = policy.in_force() if policy else None
        self._losses = losses_of(calibration.num_layers, calibration.variants, calibration.losses)
        self._monitor = monitor or MonitorSettings()
        self._most_running, self._is_plain = most_running, is_plain
        self._takes_whole = not (is_plain or self._settles or most_running == 0)
        self._report_s = WorkerSettings().telemetry_s
        self._reports_per_window = max(1, round(self._monitor.interval_s / self._report_s))
        self._active: dict[int, ActiveInstance] = {}
        self._watched: dict[int, ActiveInstance] = {}  # active ones whose reports are taken one by one
        self._settling: dict[int, list[ActiveInstance]] = {}  # by the report at which they may be at rest
        self._gateway = SimulatedGateway(calibration, num_workers, self._active, self._catch_up)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._is_ticking = False
        self._ticks = 0  # number of the last report
        self._sampled_s = -SAMPLE_S
        self._homes: dict[int, ActiveInstance] = {}  # request -> where it is
        self.now_s = 0.0

    def run(
        self,
        arrivals: Iterable[Arrival],
        drain_s: float,
        progress: Callable[[float, int], None] = lambda at_s, num_open: None,
    ) -> Record:
        """Run until `drain_s` after the last arrival; what has not ended then is unfinished.

        Raises Unmeasured.
        """
        record = self.record
        record.outcomes = [
            RequestOutcome(number, one.at_s, one.prompt_tokens, one.output_tokens)
            for number, one in enumerate(arrivals)
        ]
        coming = sorted(record.outcomes, key=lambda one: one.due_s)
        ends_s = (coming[-1].due_s if coming else 0.0) + drain_s
        coming.reverse()
        with _without_collector():
            self._go_through(coming, ends_s, progress)
        self._end(ends_s)
        return record

    def _go_through(
        self, coming: list[RequestOutcome], ends_s: float, progress: Callable[[float, int], None]
    ) -> None:
        """Let everything happen until `ends_s`. coming: the requests, the last one first."""
        events, count = self._events, 0
        while True:
            if coming and (not events or coming[-1].due_s <= events[0][0]):
                outcome = coming.pop()
                self.now_s = outcome.due_s
                self._arrive(outcome)
            elif events and events[0][0] <= ends_s:
                self.now_s, _, work, about = heapq.heappop(events)
                work(*about)
            else:
                return
            count += 1
            if count % EVENTS_PER_CALL == 0:
                progress(self.now_s, len(self._homes))

    def _end(self, ends_s: float) -> None:
        record = self.record
        if self._homes:
            self.now_s = ends_s
        for number in self._homes:
            record.outcomes[number].error, record.outcomes[number].ended_s = UNFINISHED, ends_s
        self._homes.clear()
        for one in self._active.values():
            self._catch_up(one)
        for one in self.instances.values():
            one.instance.settle(ends_s)
            one.instance.end_below(self.now_s)
            record.below_s += one.instance.below_s
            record.preemptions += one.instance.scheduler.num_preemptions
        record.seconds = self.now_s

    def _at(self, moment_s: float, work: Callable[..., None], *about: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment_s, self._num_events, work, about))

    # ------------------------------------------------------------------------------------- requests

    def _arrive(self, outcome: RequestOutcome) -> None:
        """Choose an instance as the gateway does, and send the request to it."""
        outcome.sent_s = self.now_s
        number = self._gateway.choose(outcome.prompt_asked + outcome.output_asked)
        if number is None:
            outcome.error, outcome.status, outcome.ended_s = TOO_LONG, 400, self.now_s
            return
        self._send(self._activate(number), outcome)

    def _send(self, one: ActiveInstance, outcome: RequestOutcome) -> None:
        self._catch_up(one)
        one.num_own += 1
        one.num_since += 1
        one.tokens_since += outcome.prompt_asked + outcome.output_asked
        self._homes[outcome.number] = one
        self._gateway.show(one)
        self._at(self.now_s + self._calibration.transit_s, self._submit, one, outcome)

    def _submit(self, one: ActiveInstance, outcome: RequestOutcome) -> None:
        if self._runs_alone(one, outcome):
            self._catch_up(one)
            one.instance.run_alone(outcome, self.now_s)
            self._push_step(one)
            return
        self._change(one, lambda: one.instance.submit(outcome, self.now_s))

    def _runs_alone(self, one: ActiveInstance, outcome: RequestOutcome) -> bool:
        """Return True if scheduler and reflex have nothing to choose until the request ends or another comes.

        Nothing else is there, it is admitted at once, gets each of its blocks when it needs it, and even with
        all of them the reflex is at ease.
        """
        instance, num_tokens = one.instance, outcome.prompt_asked + outcome.output_asked
        num_blocks = -(-num_tokens // instance.limits.block_tokens)
        return (
            self._takes_whole
            and not instance.has_work
            and min(outcome.prompt_asked, outcome.output_asked) > 0
            and num_tokens <= instance.limits.max_model_len
            and num_blocks < instance.blocks.num_free
            and one.morphs.lets_alone(num_blocks)
        )

    def _ended(self, instance: SimulatedInstance, outcome: RequestOutcome) -> None:
        one = self._homes.pop(outcome.number)
        one.num_own -= 1
        self._gateway.show(one)

    def _count_tokens(self, times: Sequence[float], count: int) -> None:
        events_in, first = self.record.events_in, 0
        while first < len(times):
            second = int(times[first])
            last = bisect_left(times, second + 1, first)
            events_in[second] += (last - first) * count
            first = last

    # ------------------------------------------------------------------------------------- steps

    def _change(self, one: ActiveInstance, change: Callable[[], None]) -> None:
        """Make a change that the instance takes note of at its next boundary, which may be now."""
        self._catch_up(one)
        version = one.instance.version
        change()
        if not one.instance.is_stepping:
            self._boundary(one)
        elif one.instance.version != version:
            self._push_step(one)

    def _push_step(self, one: ActiveInstance) -> None:
        instance = one.instance
        self._at(instance.ends[-1], self._stepped, one, instance.version)

    def _stepped(self, one: ActiveInstance, version: int) -> None:
        if version == one.instance.version and one.instance.is_stepping:
            self._catch_up(one)
            one.instance.finish()
            self._boundary(one)

    def _boundary(self, one: ActiveInstance) -> None:
        """Ask the reflex, carry on its morph, and begin the next steps."""
        instance, morphs, now_s = one.instance, one.morphs, self.now_s
        instance.take_in()
        self._carry_on(one, morphs)
        if instance.has_work:
            instance.start(now_s + morphs.spent_s, morphs.is_quiet)
        if instance.is_stepping:
            if self._most_running is not None and instance.num_running > self._most_running:
                raise Unmeasured(f"{instance.num_running} sequences at once (at {now_s:.1f} s)")
            self._push_step(one)
        self._watch(one)

    def _carry_on(self, one: ActiveInstance, morphs: SimulatedMorphs) -> None:
        """Ask a reflex, and carry on its morph. one: the instance, or the leader of a group."""
        before_s = morphs.running.due_s if morphs.running else None
        for report in morphs.at_boundary():
            self.record.morphs.append(report)
            self.record.levers[morphs.lever, report.state] += 1
        due_s = morphs.running.due_s if morphs.running else None
        if due_s is not None and due_s != before_s:
            self._at(due_s, self._go_on, one)

    def _renewed_s(self, at_s: float) -> float:
        """Return when the controller renewed all envelopes last."""
        is_down = self._outage is not None and self._outage[0] <= at_s < self._outage[1]
        return self._outage[0] if self._outage and is_down else at_s

    def _go_on(self, one: ActiveInstance) -> None:
        """Let the instance come to a boundary, where its morph goes on."""
        self._change(one, lambda: one.instance.interrupt(self.now_s))

    # ------------------------------------------------------------------------------------- reports

    def _activate(self, number: int) -> ActiveInstance:
        if one := self._active.get(number):
            return one
        self._gateway.wake(number)
        one = self.instances.get(number) or self._made(number)
        self.instances[number] = self._active[number] = one
        self._report()
        one.ticks, one.num_sampled = self._ticks, len(self.record.samples)
        if self._is_plain or self._settles or one.forecast.may_be_trusted:
            self._watched[number] = one
        return one

    def _report(self) -> None:
        """Have instances report from now on, if none does."""
        if not self._is_ticking:
            self._is_ticking = True
            self._ticks = int(self.now_s / self._report_s)
            for one in self._active.values():
                one.ticks = self._ticks
            self._at((self._ticks + 1) * self._report_s, self._tick, self._ticks + 1)

    def _made(self, number: int) -> ActiveInstance:
        instance = SimulatedInstance(
            number,
            self._gateway.name(number),
            self._calibration,
            self.record.tally,
            self._losses,
            is_stepwise=self._is_plain,
            on_tokens=self._count_tokens,
            on_ended=self._ended,
        )
        return ActiveInstance(instance, self._morphs_of(instance), Smoothed(instance, self._monitor))

    def _morphs_of(self, instance: MorphingInstance) -> SimulatedMorphs:
        return SimulatedMorphs(
            instance,
            self._calibration,
            self._in_force,
            lambda: self.now_s,
            lambda: self._renewed_s(self.now_s),
        )

    def _tick(self, ticks: int) -> None:
        """Take the reports that are looked at, and judge them if metrics are due."""
        self._ticks = ticks
        is_window = ticks % self._reports_per_window == 0
        if is_window:
            self._gateway.renew()
        looked_at = {one.instance.number: one for one in self._settling.pop(ticks, ())} | self._watched
        for number in looked_at.keys() & self._active.keys():
            one = looked_at[number]
            if self._settles:
                one.instance.settle(self.now_s)
            self._catch_up(one)
            if is_window:
                self._judge(one)
        if is_window:
            self._windowed()
        if is_window and self.now_s >= self._sampled_s + SAMPLE_S:
            self._sampled_s = self.now_s
            self.record.samples.append(self._gateway.new_sample(self.now_s))
            for one in self._watched.values():
                self._catch_up(one)
        self._is_ticking = not self._is_at_rest()
        if self._is_ticking:
            self._at((ticks + 1) * self._report_s, self._tick, ticks + 1)

    def _windowed(self) -> None:
        """Do what follows the metrics of a window."""

    def _catch_up(self, one: ActiveInstance) -> None:
        """Take the reports of an active instance until now, and add it to the samples."""
        first, one.ticks = one.ticks + 1, self._ticks
        if first <= self._ticks:
            every, report_s = self._reports_per_window, self._report_s
            needed = one.seen.observe([ticks * report_s for ticks in range(first, self._ticks + 1)])
            windows = range(-first % every, len(needed), every)
            if windows:
                one.num_since = one.tokens_since = 0
                self._forecast(one, [((first + i) * report_s, needed[i]) for i in windows])
        samples = self.record.samples
        if one.num_sampled < len(samples):
            self._gateway.add_to(samples[one.num_sampled :], one)
            one.num_sampled = len(samples)

    def _forecast(self, one: ActiveInstance, needs: Sequence[tuple[float, int]]) -> None:
        """Let the controller forecast the blocks that the instance needs, from those at some times."""
        if self._policy is None or self._policy.mode == "manual":
            return
        limit = self._policy.kv_usage_high * one.instance.blocks.capacity
        if self._outage:
            needs = [need for need in needs if self._renewed_s(need[0]) == need[0]]
        one.forecast, _ = observe_each(one.forecast, needs, limit)
        if one.forecast.may_be_trusted:
            self._watched[one.instance.number] = one

    def _judge(self, one: ActiveInstance) -> None:
        instance = one.instance
        if one.forecast.at_s == self.now_s and one.morphs.expect(
            expected_blocks({"": one.forecast}).get("", 0)
        ):
            self._go_on(one)
        is_moving = instance.has_work or one.morphs.running or not instance.shape.is_at_rest
        if not instance.is_stepping and is_moving:
            self._boundary(one)  # an idle worker looks now and then whether layers can go back
        if one.is_idle and one.instance.is_as_made and one.seen.is_settled:
            self._rest(one)
        else:
            self._gateway.show(one)
            self._watch(one)

    def _watch(self, one: ActiveInstance) -> None:
        """Have an instance looked at in every report if it may do something then, or when it may be at rest.

        Until its next event a forecast comes true once at most, since the blocks in use only grow.
        """
        instance, number = one.instance, one.instance.number
        is_waiting = not instance.is_stepping and (instance.has_work or one.morphs.running is not None)
        is_changed = one.is_idle and not one.instance.is_as_made
        if self._is_plain or self._settles or is_waiting or is_changed or one.forecast.may_be_trusted:
            self._watched[number] = one
            return
        self._watched.pop(number, None)
        if one.is_idle:
            every = self._reports_per_window
            ticks = -(-(self._ticks + one.seen.settles_in) // every) * every
            if one.settles != ticks:
                one.settles = ticks
                self._settling.setdefault(ticks, []).append(one)

    def _is_at_rest(self) -> bool:
        return not self._active

    def _rest(self, one: ActiveInstance) -> None:
        number = one.instance.number
        del self._active[number]
        self._watched.pop(number, None)
        one.seen.forget()
        self._gateway.rest(one)
