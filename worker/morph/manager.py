"""Begin the morphs of one worker, carry them on at step boundaries, and report their ends.

A morph that cannot be done now waits as long as its command says, and is then deferred with the numbers. Of
two that would mix, the later one ends as a conflict.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any

from bus.messages import Number
from bus.morphs import ConvertCache, Deploy, Morph, MorphOutcome, MorphReport, Resize, Retire, Swap
from worker.engine.engine import DEVICE_ERRORS
from worker.memory import BrokenInvariant, MappingFailed
from worker.morph.convert_kv import ConvertKVRun
from worker.morph.resize import ResizeRun
from worker.morph.run import EXCLUSIVE, Job, NotApplied, Peers, Run
from worker.morph.swap import HalvesInProgress, SwapRun
from worker.morph.target import MemberTarget, Target
from worker.shape.copier import Copier, Pace

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1000  # ids of morphs, for a command that comes again
CHECK_S = 60.0  # a whole check, which takes milliseconds, waits for an idle boundary for so long at most
# The books or the device are broken: no going on.
FATAL: tuple[type[Exception], ...] = (BrokenInvariant, AssertionError, *DEVICE_ERRORS)

Starter = Callable[[Any, Peers], Run]  # makes the run of a command; raises NotApplied


class MorphManager:
    """The morphs of one worker. `begin`, `cancel` and `fence` return at once; `advance` does the work.

    `starters` has the kinds of morphs that this worker runs. Packages above this one add theirs.
    """

    def __init__(
        self,
        worker: str,
        targets: Mapping[str, Target],
        *,
        step_share: float = 0.025,
        copy_share: float = 1.0,
    ) -> None:
        """Make a manager of the morphs of `targets`.

        step_share: the share of a busy engine's time for work between its steps. copy_share: the same for
        copying; below 1 where that takes cores or memory from the steps.
        """
        self.targets: dict[str, Target] = {}
        self.starters: dict[type[Morph], Starter] = {
            Swap: lambda command, peers: SwapRun(command, self.targets[command.instance], self._in_progress),
            Resize: lambda command, peers: ResizeRun(command, self.targets[command.instance]),
            ConvertCache: lambda command, peers: ConvertKVRun(command, self.targets[command.instance]),
        }
        self.epoch = 0
        # Called in another thread: `advance` is due.
        self.wake: Callable[[], None] = lambda: None
        # Returns why a command of this type cannot begin here now, beside its epoch and other morphs, or "".
        self.obstacle: Callable[[type[Morph]], str] = lambda kind: ""
        # Moves some KV pages to an instance that misses them, from others than the given; False: none had to.
        self.share_kv: Callable[[Container[str]], bool] = lambda but: False
        self.reclaim: Callable[[], None] = lambda: None  # unmaps pages that no step uses any more
        self._why_no_deploy = ""
        self.worker = worker
        self._pace = Pace(step_share)
        self._copiers: list[Copier] = []
        self._is_busy = False
        self._busy_until = 0.0  # time.monotonic(), also while the engine waits for other devices
        # By instance: the share of the time (0..1) that morphs may take at least, for its requests.
        self.urgencies: Mapping[str, float] = {}
        self._share_wanted = 0.0  # the largest, also of those that swaps were ordered for
        self._is_awaiting = False  # the engine waits for a copy
        self._copier = self._add_copier(lambda: max(copy_share, self._share_wanted))
        self._in_progress = HalvesInProgress()
        self._jobs: dict[str, Job] = {}
        self._known: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._reports: list[MorphReport] = []
        self._is_hurried = False
        self._unchecked: dict[str, float] = {}  # when instances are checked as a whole, at the latest
        for target in targets.values():
            self.add(target)

    def make_copier(self, share: float) -> Copier:
        """Make a thread that copies for morphs. share: of the time, while the engine is busy."""
        return self._add_copier(lambda: share)

    def _add_copier(self, share: Callable[[], float]) -> Copier:
        def share_now() -> float:
            is_busy = self._is_busy or time.monotonic() < self._busy_until
            return share() if is_busy and not self._is_awaiting else 1.0

        copier = Copier(lambda: self.wake(), share_now)
        self._copiers.append(copier)
        return copier

    def add(self, target: Target) -> None:
        """Morph an instance from now on."""
        self.equip(target)
        self.targets[target.instance.id] = target

    def equip(self, target: MemberTarget) -> None:
        """Let a member copy in this worker's thread."""
        target.copier = self._copier

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    def is_morphing(self, instance: str) -> bool:
        """Return True while a morph of `instance` runs."""
        return any(job.command.instance == instance for job in self._jobs.values())

    @property
    def patience_s(self) -> float | None:
        """Seconds that an idle engine may sleep before `advance` is due; None: until it is woken."""
        # The step after a busy boundary may have ended the wait of a morph, and nothing else wakes it.
        if self._reports or self._is_hurried or self._is_busy:
            return 0.0
        deadlines = (job.run.deadline for job in self._jobs.values())
        due = min((each for each in deadlines if each is not None), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    # ----------------------------------------------------------------------------- commands

    def begin(self, command: Morph, peers: Peers | None = None, reason: str = "") -> None:
        """Begin a morph. A command that comes again changes nothing and is not answered again.

        peers: the workers that take part in a Transform, or in a Deploy of several stages. reason: why this
        worker itself ordered it, for the reports.
        """
        if command.id in self._known:
            return
        self._known.append(command.id)
        job = Job(command, self.worker, self.epoch, reason)
        try:
            self._start(job, peers or {})
        except NotApplied as end:
            self._tell(job.report(end.state, end.reason, end.numbers))
            return
        self._jobs[command.id] = job
        self._is_hurried = True
        self._tell(job.report("running", reason or "begun"))

    def cancel(self, morph_id: str) -> None:
        """Cancel a morph, unless it is unknown or beyond return; the old shape goes on serving."""
        job = self._jobs.get(morph_id)
        if job and not job.run.is_beyond_return:
            self._abort(job, "cancelled")

    def fence(self, epoch: int) -> None:
        """Begin an epoch: give up the morphs of the old one, unless they must go on to their end."""
        for job in list(self._jobs.values()):
            if not job.run.is_beyond_return:
                self._abort(job, f"epoch {job.epoch} ended: the worker had lost its lease")
        self.epoch = epoch

    def give_up(self, instance: str, reason: str) -> None:
        """Give up the swaps, resizes and KV conversions of an instance that is lost.

        A conversion ends half-way too: nothing will read its cache again.
        """
        for job in list(self._jobs.values()):
            if job.command.instance == instance and job.kind not in EXCLUSIVE - {"kv"}:
                self._abort(job, reason)

    def refuse_deploys(self, reason: str) -> None:
        """Refuse models from now on, and give up one that is being loaded."""
        self._why_no_deploy = reason
        for job in list(self._jobs.values()):
            if job.kind == "deploy":
                self._abort(job, reason)

    def close(self) -> list[MorphReport]:
        """Give up all morphs and release the variants; no step may follow. Returns the last reports."""
        for job in list(self._jobs.values()):
            self._abort(job, "the worker leaves")
        for copier in self._copiers:
            copier.close()
        for target in self.targets.values():
            target.variants.release()
        reports, self._reports = self._reports, []
        return reports

    # ----------------------------------------------------------------------------- at a boundary

    def advance(self, is_busy: bool, busy_until: float = 0.0) -> list[MorphReport]:
        """Carry on the morphs for as long as the pace allows.

        is_busy: the engine has a step to run now. busy_until: `Engine.busy_until`; copies keep their share of
        the time till then, also while no step can run.
        """
        self._is_busy, self._busy_until = is_busy, busy_until
        try:
            self.reclaim()
        except MappingFailed as error:
            log.warning("pages that no step uses any more cannot be unmapped, and stay taken: %s", error)
        self._share_wanted = max([0.0, *self.urgencies.values(), *map(self._urgency, self._jobs.values())])
        self._pace.begin(is_busy, self._share_wanted)
        if self._jobs:
            self._is_hurried = False
            for job in list(self._jobs.values()):
                self._carry_on(job)
            # The first in line may have used up the time: next time another is the first.
            if len(self._jobs) > 1:
                first = next(iter(self._jobs))
                self._jobs[first] = self._jobs.pop(first)
        if self._unchecked:
            self._check_rest()
        if len(self.targets) > 1 and is_busy:
            self._share()
        reports, self._reports = self._reports, []
        return reports

    def _share(self) -> None:
        """Move KV pages to instances that miss them, but none of one that is resized by order.

        Some move at every boundary, whatever the pace: to preempt and recompute a sequence takes longer.
        """
        resized = {job.command.instance for job in self._jobs.values() if job.kind == "resize"}
        while self.share_kv(resized):
            self._pace.spent()
            if not self._pace.has_time:
                return

    def _carry_on(self, job: Job) -> None:
        try:
            while self._pace.has_time:
                can_go_on = job.step()
                job.boundary_s += self._pace.spent()
                if news := job.news():
                    self._tell(job.report("running", news))
                if not can_go_on and not self._await_copy(job):
                    return
            self._is_hurried = True
        except StopIteration:
            self._end(job, "applied", job.reason_applied)
        except NotApplied as end:
            self._end(job, end.state, end.reason, end.numbers)
        except FATAL:
            raise
        except Exception as error:  # whatever it was, the old shape serves
            log.warning("morph %s failed", job.command.id, exc_info=error)
            self._end(job, "failed", f"{type(error).__name__}: {error}")

    def _urgency(self, job: Job) -> float:
        """Return the share of the time (0..1) that a morph may take at least."""
        ordered = job.command.urgency if isinstance(job.command, Swap) else 0.0
        return max(ordered, self.urgencies.get(job.command.instance, 0.0))

    def _await_copy(self, job: Job) -> bool:
        """Wait for pages or the next copy of an urgent morph, if there is time. Return True if it came.

        Without a step beside it a copy takes least, and a step with prompts would take much longer.
        """
        left_s = self._pace.left_s
        if not (left_s and self._is_busy and job.run.awaits_copies and self._urgency(job)):
            return False
        self._is_awaiting = True
        cache = self.targets[job.command.instance].resizer.cache
        has_ended = cache.await_growth(left_s) or self._copier.wait(left_s)
        self._is_awaiting = False
        awaited_s = self._pace.spent()
        job.boundary_s += awaited_s
        job.awaited_s += awaited_s
        return has_ended

    # ----------------------------------------------------------------------------- beginnings and ends

    def _start(self, job: Job, peers: Peers) -> None:
        """Give `job` its run. Raises NotApplied."""
        command, kind = job.command, type(job.command)
        if command.epoch != self.epoch:
            raise NotApplied("stale", f"it is for epoch {command.epoch}; this is {self.epoch}")
        is_here = command.instance in self.targets
        if kind is Deploy and is_here:
            raise NotApplied("conflict", f"{command.instance} is served here already; retire it first")
        if kind is not Deploy and not is_here:
            there_are = ", ".join(self.targets) or "none"
            raise NotApplied("failed", f"there is no instance {command.instance}; there are {there_are}")
        self._refuse_conflict(job)
        if reason := self.obstacle(kind) or (self._why_no_deploy if kind in (Deploy, Retire) else ""):
            raise NotApplied("conflict", reason)
        if kind not in self.starters:
            raise NotApplied(
                "failed", f"this worker runs no {job.kind}: it has several models, or no worker.group_host"
            )
        job.start(self.starters[kind](command, peers))
        self._refuse_conflict(job)

    def _refuse_conflict(self, job: Job) -> None:
        for other in self._jobs.values():
            job.refuse_beside(other)

    def _abort(self, job: Job, reason: str) -> None:
        try:
            job.undo()
        except FATAL:
            raise
        except Exception as error:
            log.warning("morph %s could not be undone", job.command.id, exc_info=error)
            reason = f"{reason}; undoing it failed: {error}"
        self._end(job, "failed", reason)

    def _end(
        self, job: Job, state: MorphOutcome, reason: str, numbers: Mapping[str, Number] | None = None
    ) -> None:
        report = job.report(state, reason, numbers)
        del self._jobs[job.command.id]
        self._is_hurried |= bool(self._jobs)  # another may have waited for this one alone
        if target := self.targets.get(instance := job.command.instance):
            target.check_integrity(is_brief=self._is_busy)
            if self._is_busy:
                self._unchecked.setdefault(instance, time.monotonic() + CHECK_S)
        self._tell(report)

    def _check_rest(self) -> None:
        """Make up for what checks under load left out: at an idle boundary, or when it is due under load."""
        now = time.monotonic()
        for instance, due in list(self._unchecked.items()):
            if (not self._is_busy or now >= due) and not self.is_morphing(instance):
                del self._unchecked[instance]
                if target := self.targets.get(instance):
                    target.check_integrity()

    def _tell(self, report: MorphReport) -> None:
        if report.state != "running":
            outcome = f"{report.state}: {report.reason}" if report.reason else report.state
            log.info("%s %s of %s %s", report.kind, report.id, report.target, outcome, extra=report.numbers)
        self._reports.append(report)
