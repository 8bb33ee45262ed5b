"""The morphs of the cluster that run and the last that ended.

A worker that dies does not answer: its morphs then count as failed, until a report says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from bus.messages import Event, Number, WorkerCard
from bus.morphs import KIND_OF, Cause, Morph, MorphKind, MorphOutcome, MorphReport, Transform
from gateway.stats import LATENCY, Distribution

KEPT: Final = 256  # ended morphs that are kept
CARDS_S: Final = 3.0  # after a transform, at most, the cards of all its members are read
SILENT_S: Final = 30.0  # the gateway that gives the orders of several steps reports more often
UNHEARD_S: Final = 90.0  # longer than a worker's watchdog lets a step take: then the order was lost
WITHHELD_S: Final = (
    900.0  # why an instance was not morphed is told for so long, as decisions on the dashboard
)
# From a swap of one small layer to one of a large model.
SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, *LATENCY)
PAUSES: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
ORDER: Final[Cause] = "order"
# What GET /admin/morphs/{morph} has, in this order.
_SHOWN: Final = (
    *("id", "kind", "target", "worker", "workers", "epoch", "state", "reason", "decided", "cause", "numbers"),
    *("started", "ended"),
)


@dataclass(slots=True, eq=False)
class MorphRecord:
    """One morph. Times are seconds since 1970, except `ordered_at`, of this process's monotonic clock."""

    id: str
    kind: MorphKind
    target: str
    worker: str  # worker that answers
    workers: list[str]  # workers that take part; in a transform, in shard order
    epoch: int
    started: float
    ordered_at: float = 0.0
    state: MorphOutcome = "running"
    reason: str = ""
    numbers: dict[str, Number] = field(default_factory=dict)
    ended: float | None = None
    decided: str = ""  # why it was ordered, and what
    cause: str = ""  # the same in a word
    patience_s: float = UNHEARD_S
    is_heard: bool = False  # True: its worker has reported
    is_assumed: bool = False  # True: the end was not reported, and the worker is gone
    lost_since: float | None = None  # since when its worker is missing
    steps: list[str] = field(default_factory=list)  # ids of the morphs that it consists of
    heard_at: float = 0.0  # time of the last report, by this process's clock
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    @property
    def pause_s(self) -> float | None:
        """Seconds between steps that its worker's engine spent on it, in all; None: not reported."""
        known = {"boundary_seconds", "moving_seconds"} & self.numbers.keys()
        return sum(self.numbers[name] for name in known) if known else None

    async def wait(self, within_s: float) -> None:
        """Wait until the morph has ended, for `within_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.has_ended.wait()

    def as_json(self) -> dict[str, Any]:
        """Return the morph as JSON; `steps` only for a transform of several."""
        shown = {name: getattr(self, name) for name in _SHOWN}
        return shown | {"steps": self.steps} if self.steps else shown


class Morphs:
    """The owner of the entries.

    `outcomes`, `decisions`, `seconds` and `pauses` count the morphs that ended since this process listens,
    `forecasts` the forecasts whose time has come.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.outcomes: Counter[tuple[MorphKind, MorphOutcome]] = Counter()
        self.decisions: Counter[tuple[MorphKind, str, MorphOutcome]] = Counter()  # ends, with the cause
        self.forecasts: Counter[bool] = Counter()  # forecasts of pressure, by whether it came
        self.seconds = {kind: Distribution(SECONDS) for kind in KIND_OF.values()}
        self.pauses = {kind: Distribution(PAUSES) for kind in KIND_OF.values()}
        self._entries: dict[str, MorphRecord] = {}  # morphs in the order of their first report
        self._decided: dict[str, tuple[str, str]] = {}  # decision and cause by morph id
        self._withheld: dict[str, Event] = {}  # the last by instance
        self._clock = clock

    def get(self, morph_id: str) -> MorphRecord | None:
        return self._entries.get(morph_id)

    def recent(self, num: int) -> list[MorphRecord]:
        """Return the running morphs and the last that ended, up to `num` in all; the latest last."""
        ended = [entry for entry in self._entries.values() if not entry.is_running]
        room = max(0, num - (len(self._entries) - len(ended)))
        hidden = set(ended[: max(0, len(ended) - room)])
        return [entry for entry in self._entries.values() if entry not in hidden]

    def transform_of(self, worker: str) -> MorphRecord | None:
        """Return the running transform of this worker; of one in several steps, the current step."""
        return next((one for one in self._transforms(worker) if one.is_running), None)

    def changing(self, worker: str, tp: int) -> str:
        """Return "joining" or "parting" while a transform changes the worker's degree, and CARDS_S longer."""
        transforms = self._transforms(worker)
        last = transforms[-1] if transforms else None
        if last is None or last.state not in ("running", "applied"):
            return ""
        is_over = last.ended is not None and time.time() - last.ended > CARDS_S
        after = int(last.numbers.get("tp_after", tp))
        if is_over or after == tp:
            return ""
        return "joining" if after > tp else "parting"

    def _transforms(self, worker: str) -> list[MorphRecord]:
        """Return the worker's transforms, the latest last; of those in several steps the steps."""
        transforms = (one for one in self._entries.values() if one.kind == "transform" and not one.steps)
        return [one for one in transforms if worker in one.workers]

    def ordered(self, command: Morph, worker: str, decided: str) -> MorphRecord:
        """Enter a morph that this gateway orders. A quick worker may have reported it already."""
        workers = command.workers if isinstance(command, Transform) else [worker]
        kind, now = KIND_OF[type(command)], time.time()
        entry = self._entry(command.id, kind, command.instance, worker, workers, command.epoch, now)
        entry.patience_s = UNHEARD_S + command.wait_s
        entry.decided, entry.cause = decided, ORDER
        return entry

    def unsent(self, entry: MorphRecord) -> None:
        """Remove a morph whose order the bus did not take. If it did after all, a report enters it again."""
        self._entries.pop(entry.id, None)

    def on_report(self, report: MorphReport, *, is_history: bool = False) -> MorphRecord:
        workers, started = report.workers or [report.worker], report.started_ms / 1000
        about = report.id, report.kind, report.target, report.worker
        entry = self._entry(*about, workers, report.epoch, started)
        entry.is_heard, entry.heard_at, entry.steps = True, self._clock(), report.steps
        if not entry.is_running and not (entry.is_assumed and report.state != "running"):
            return entry  # a late or repeated report of a morph that has ended
        entry.started, entry.is_assumed = started, False
        entry.state, entry.reason, entry.numbers = report.state, report.reason, dict(report.numbers)
        if report.state != "running":
            ended_ms = report.started_ms if report.ended_ms is None else report.ended_ms
            self._end(entry, ended_ms / 1000)
            if not is_history and not entry.steps:  # steps are counted one by one
                self._count(entry)
        return entry

    def on_event(self, event: Event, *, is_history: bool = False) -> None:
        """Note why a morph was decided, why none was, or whether a forecast was right."""
        if event.kind == "relief_withheld":
            self._withheld.pop(event.subject, None)
            while len(self._withheld) >= KEPT:
                del self._withheld[next(iter(self._withheld))]
            self._withheld[event.subject] = event
        if event.kind == "forecast_scored" and not is_history:
            self.forecasts[bool(event.numbers.get("is_right"))] += 1
        if event.kind == "morph_decided" and event.morph_id:
            if entry := self._entries.get(event.morph_id):
                entry.decided, entry.cause = event.reason, event.cause
                return
            while len(self._decided) >= KEPT:
                del self._decided[next(iter(self._decided))]
            self._decided[event.morph_id] = event.reason, event.cause

    def withheld(self, instance: str) -> dict[str, Any] | None:
        """Return why the instance was not morphed last, and when; None if that is WITHHELD_S ago."""
        event = self._withheld.get(instance)
        if event is None or time.time() - event.at_ms / 1000 > WITHHELD_S:
            return None
        return {"reason": event.reason, "at": event.at_ms / 1000}

    def worker_gone(self, worker: str, epoch: int, how: str) -> None:
        """Take the running morphs of this epoch, and of earlier ones, for failed."""
        for entry in self._running():
            if entry.worker == worker and entry.epoch <= epoch:
                self._assume_failed(entry, f"{worker} (epoch {entry.epoch}) {how} before it answered")

    def sweep(self, workers: dict[str, WorkerCard], lost_after_s: float) -> None:
        """Take morphs for failed whose worker is gone, has another epoch or never took the order."""
        now = self._clock()
        for entry in self._running():
            card = workers.get(entry.worker)
            if card is not None and card.epoch != entry.epoch:
                self.worker_gone(entry.worker, entry.epoch, f"became epoch {card.epoch}")
                continue
            if card is not None:
                entry.lost_since = None
            elif entry.lost_since is None:
                entry.lost_since = now
            elif now - entry.lost_since > lost_after_s:
                self.worker_gone(entry.worker, entry.epoch, "is gone")
                continue
            if entry.steps and now - entry.heard_at > SILENT_S:
                self._assume_failed(entry, "the gateway that gave the orders is gone; the steps done stay")
            elif not entry.is_heard and now - entry.ordered_at > entry.patience_s:
                self._assume_failed(entry, f"{entry.worker} did not take the order; give it again")

    def _running(self) -> Iterable[MorphRecord]:
        return [entry for entry in self._entries.values() if entry.is_running]

    def _entry(self, morph_id: str, *about: Any) -> MorphRecord:
        """Return the entry of an id, a new one with what is known `about` it if there is none."""
        if morph_id in self._entries:
            return self._entries[morph_id]
        entry = self._entries[morph_id] = MorphRecord(morph_id, *about)
        entry.ordered_at = self._clock()
        entry.decided, entry.cause = self._decided.pop(morph_id, ("", ""))
        ended = [one.id for one in self._entries.values() if not one.is_running]
        for old in ended[: max(0, len(ended) - KEPT)]:
            del self._entries[old]
        return entry

    def _assume_failed(self, entry: MorphRecord, reason: str) -> None:
        entry.state, entry.reason, entry.is_assumed = "failed", reason, True
        self._end(entry, time.time())

    def _end(self, entry: MorphRecord, at: float) -> None:
        entry.ended = at
        entry.has_ended.set()

    def _count(self, entry: MorphRecord) -> None:
        self.outcomes[entry.kind, entry.state] += 1
        self.decisions[entry.kind, entry.cause or "unknown", entry.state] += 1
        took_s = max(0.0, (entry.ended or entry.started) - entry.started)
        self.seconds[entry.kind].observe(took_s)
        if (pause_s := entry.pause_s) is not None:
            self.pauses[entry.kind].observe(pause_s)
