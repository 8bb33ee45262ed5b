"""The one thread that owns the engine. Others hand it work through a queue and get results by callbacks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from bus.messages import Event, InstanceTelemetry, PageCounts, Submit
from bus.morphs import Morph, MorphReport
from bus.policy import Envelope
from worker.distributed.messages import Peer
from worker.engine.engine import Engine, StepResult, instance_telemetry
from worker.morph.manager import MorphManager
from worker.morph.reflex_loop import ReflexLoop
from worker.parallel.grouping import Grouping
from worker.profiler.runner import ProfileRunner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's numbers at one step boundary."""

    steps: int
    instances: list[InstanceTelemetry]
    pages: PageCounts


class EngineThread:
    """Runs the engine. Calls of other threads return at once and take effect in order, between two steps."""

    def __init__(
        self,
        engine: Engine,
        pages: Callable[[], PageCounts],
        morphs: MorphManager,
        grouping: Grouping | None = None,
        *,
        snapshot_s: float,
        on_results: Callable[[int, list[StepResult]], None],
        on_snapshot: Callable[[Snapshot], None],
        on_reports: Callable[[list[MorphReport]], None],
        on_events: Callable[[list[Event]], None] = lambda events: None,
        on_death: Callable[[BaseException], None],
        measuring: ProfileRunner | None = None,
    ) -> None:
        self._engine, self._pages, self._snapshot_s = engine, pages, snapshot_s
        self._on_results, self._on_snapshot, self._on_death = on_results, on_snapshot, on_death
        self._morphs, self._on_reports, self._on_events = morphs, on_reports, on_events
        self._reflexes = ReflexLoop(morphs)
        self._measuring = measuring or ProfileRunner()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        morphs.wake = engine.wake = self._wake
        if engine.stages:
            engine.stages.wake = self._wake
        self.use_grouping(grouping)
        self._epoch = 0
        self._is_paused = self._is_stopping = False
        self._num_steps = 0
        self._busy_s = 0.0
        self._step_began: float | None = None
        self._progressed_at = 0.0
        self._snapshot_due = 0.0
        self._is_told = True  # no step since the last snapshot
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ----------------------------------------------------------------------------- from other threads

    def start(self) -> None:
        self._thread.start()

    def submit(self, instance_id: str, request: Submit) -> None:
        arrived = time.monotonic()
        self._inbox.put(lambda: self._submit(instance_id, request, arrived))

    def cancel(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._inbox.put(lambda: self._cancel(ids))

    def morph(self, command: Morph, peers: Mapping[str, Peer] | None = None) -> None:
        """Begin a morph (`MorphManager.begin`)."""
        self._inbox.put(lambda: self._morphs.begin(command, peers))

    def grant(self, envelope: Envelope) -> None:
        """Let the reflex of an instance do what `envelope` allows (`ReflexLoop.grant`)."""
        self._inbox.put(lambda: self._reflexes.grant(envelope))

    def cancel_morph(self, morph_id: str) -> None:
        """Cancel the morph or the profile with this id."""
        self._inbox.put(lambda: self._cancel_morph(morph_id))

    def call(self, verb: Callable[[], None]) -> None:
        """Call `verb` in the engine's thread, between two steps."""
        self._inbox.put(verb)

    def prepare_communicator(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """Make the communicator of a group that may form."""
        if grouping := self._grouping:
            self._inbox.put(lambda: grouping.prepare_communicator(members, peers))

    def request_split(self) -> None:
        """Ask the group of this worker, if it is in one, to split."""
        if grouping := self._grouping:
            self._inbox.put(grouping.request_split)

    def use_grouping(self, grouping: Grouping | None) -> None:
        """Join groups as `grouping` says; None: join none. Only in the engine's thread or before `start`."""
        self._grouping = grouping
        if grouping:
            grouping.post = self._inbox.put
            grouping.on_progress = self._progress

    @property
    def is_in_group(self) -> bool:
        return self._grouping is not None and self._grouping.executor is not None

    def fence(self, epoch: int) -> None:
        """Drop everything; results from here on belong to `epoch`."""
        self._inbox.put(lambda: self._fence(epoch))

    def pause(self) -> None:
        """Run no further step until `resume`, since nothing takes the results."""
        self._inbox.put(lambda: setattr(self, "_is_paused", True))

    def resume(self) -> None:
        self._inbox.put(lambda: setattr(self, "_is_paused", False))

    def stop(self, within_s: float = 10.0) -> None:
        self._inbox.put(lambda: setattr(self, "_is_stopping", True))
        self._thread.join(within_s)

    def step_seconds(self) -> float:
        """Return how long the current step has run without a sign of progress; 0.0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - max(began, self._progressed_at)

    def busy_seconds(self) -> float:
        """Return the time spent in steps since the start, the current one included."""
        began = self._step_began
        return self._busy_s + (0.0 if began is None else time.monotonic() - began)

    # ----------------------------------------------------------------------------- the engine's thread

    def _run(self) -> None:
        try:
            self._engine.bind_thread()
            while not self._is_stopping:
                self._receive()
                self._carry_on_morphs()
                if self._is_stopping:
                    break
                self._step()
            if self._grouping:
                self._grouping.close()
            self._engine.close()
            self._measuring.cancel_all("the worker leaves")
            if reports := self._morphs.close():
                self._on_reports(reports)
        except BaseException as error:  # noqa: BLE001 whatever it was, the process must not sit there dead
            self._on_death(error)

    @property
    def _may_step(self) -> bool:
        return self._engine.can_step(is_paused=self._is_paused)

    def _receive(self) -> None:
        """Carry out the calls in the queue; with nothing to do, sleep until one comes."""
        patience_s = 0.0 if self._may_step else self._patience_s
        try:
            self._inbox.get(block=patience_s != 0, timeout=patience_s)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    @property
    def _patience_s(self) -> float | None:
        """Seconds that the thread may sleep; None: until something comes."""
        measuring_s = self._measuring.patience_s if self._engine.is_alone else None
        telling_s = None if self._is_told else max(0.0, self._snapshot_due - time.monotonic())
        waits = (self._morphs.patience_s, self._reflexes.patience_s, measuring_s, telling_s)
        known = [one for one in waits if one is not None]
        return min(known, default=None)

    def _carry_on_morphs(self) -> None:
        if events := self._reflexes.act():
            self._on_events(events)
        if reports := self._morphs.advance(self._may_step, self._engine.busy_until):
            self._reflexes.hear(reports)
            self._report()  # first: a report of an end carries the numbers after it
            self._on_reports(reports)
            self._report()
        # In a group the other members would wait for a measurement here.
        if self._engine.is_alone and self._measuring.advance(is_busy=self._may_step):
            self._report()
        # A stage that ended in the last step before the engine became idle has given its pages back.
        if not self._is_told and time.monotonic() >= self._snapshot_due:
            self._report()

    def _step(self) -> None:
        engine, before = self._engine, self._engine.num_steps
        self._step_began = began = time.monotonic()
        results = engine.step(is_paused=self._is_paused)
        ended = time.monotonic()
        self._step_began = None
        if not results and engine.num_steps == before:
            return
        self._is_told = False
        self._busy_s += ended - began
        self._num_steps += 1
        if results:
            self._on_results(self._epoch, results)
        if results and not engine.has_work:
            engine.check_integrity()
            self._report()
        elif ended >= self._snapshot_due:
            self._report()

    def _wake(self) -> None:
        self._inbox.put(lambda: None)

    def _progress(self) -> None:
        self._progressed_at = time.monotonic()

    def _report(self) -> None:
        self._snapshot_due = time.monotonic() + self._snapshot_s
        self._is_told = True
        self._on_snapshot(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return the numbers of now. Only in the engine's thread or before `start`."""
        instances = [instance_telemetry(instance) for instance in self._engine.instances.values()]
        return Snapshot(self._num_steps, instances, self._pages())

    def _submit(self, instance_id: str, request: Submit, arrived: float) -> None:
        self._engine.submit(instance_id, request, arrived)
        if request.sampling.grammar:  # while it is compiled there may be no step that would report it
            self._is_told = False

    def _cancel(self, request_ids: list[str]) -> None:
        self._engine.cancel(request_ids)
        self._report()

    def _cancel_morph(self, morph_id: str) -> None:
        self._morphs.cancel(morph_id)
        self._measuring.cancel(morph_id)

    def _fence(self, epoch: int) -> None:
        self._engine.reset()
        self._engine.check_integrity()
        self._morphs.fence(epoch)
        self._measuring.cancel_all(f"epoch {self._epoch} ended: the worker had lost its lease")
        self._epoch = epoch
        self._report()
