"""Begin the morphs of one worker, carry them on at step boundaries, and report their ends.

The engine's thread owns the manager. It decides nothing: a morph that cannot be done now waits as long as
its command says, and is then deferred with the numbers. At most one morph at a time touches a half of a
layer, and one resizes a cache: of two that would mix, the later one ends as a conflict.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping

from bus.messages import (
    Deploy,
    Morph,
    MorphOutcome,
    MorphReport,
    Number,
    Resize,
    Retire,
    Swap,
    Transform,
)
from worker.engine.engine import DEVICE_ERRORS
from worker.memory import BrokenInvariant
from worker.morph.interfaces import Deployments, Groups, Peers
from worker.morph.job import Job
from worker.morph.plan import plan_swap
from worker.morph.resize import ResizeRun
from worker.morph.run import NotApplied, Run
from worker.morph.swap import HalvesInProgress, SwapRun
from worker.morph.target import Target
from worker.shape.copier import Copier, Pace

log = logging.getLogger(__name__)

MAX_REMEMBERED = 1000  # ids of morphs, for a command that comes again
# The books or the device are broken: no going on.
FATAL: tuple[type[Exception], ...] = (BrokenInvariant, AssertionError, *DEVICE_ERRORS)


class MorphManager:
    """The morphs of one worker. `begin`, `cancel` and `fence` return at once; `advance` does the work."""

    def __init__(
        self,
        worker: str,
        targets: Mapping[str, Target],
        *,
        step_share: float = 0.025,
        copy_share: float = 1.0,
        groups: Groups | None = None,
        deployments: Deployments | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a manager of the morphs of `targets`.

        step_share: the share of a busy engine's time for work between its steps. copy_share: the share of
        the time for copying while the engine is busy; below 1 where copying takes cores or memory from the
        steps.
        """
        self.targets = dict(targets)
        self.wake: Callable[[], None] = lambda: None  # called in another thread: `advance` is due
        self._groups: Groups | None = None
        self._deployments = deployments
        self._why_no_deploy = ""
        self._worker, self._clock = worker, clock
        self._pace = Pace(step_share)
        self._copier = Copier(lambda: self.wake(), lambda: copy_share if self._is_busy else 1.0)
        self._is_busy = False
        self._in_progress = HalvesInProgress()
        for target in self.targets.values():
            target.copier = self._copier
        self._epoch = 0
        self._jobs: dict[str, Job] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        self._reports: list[MorphReport] = []
        self._is_hurried = False
        self.join_groups(groups)
        if deployments:
            deployments.attach(
                self._add, self._drop, lambda: self.wake(), lambda: self._is_busy, self._begin_own
            )

    def join_groups(self, groups: Groups | None) -> None:
        """Use `groups` from here on; None: this worker joins no group."""
        self._groups = groups
        if groups:
            groups.attach(self._why_no_group, self._let_part)

    def _why_no_group(self) -> str:
        if len(self.targets) > 1:
            return f"it serves {len(self.targets)} models"
        return "a morph is running there" if self._jobs else ""

    @property
    def num_running(self) -> int:
        return len(self._jobs)

    @property
    def patience_s(self) -> float | None:
        """Seconds that an idle engine may sleep before `advance` is due; None: until it is woken."""
        # After a busy boundary came a step: it may have ended what a morph waits for, and nobody else tells.
        if self._reports or self._is_hurried or self._is_busy:
            return 0.0
        due = min((job.deadline for job in self._jobs.values() if job.deadline is not None), default=None)
        return None if due is None else max(0.0, due - self._clock())

    # ----------------------------------------------------------------------------- commands

    def begin(self, command: Morph, peers: Peers | None = None) -> None:
        """Begin a morph. A command that comes again changes nothing and is not answered again.

        peers: the workers that take part in a Transform, or in a Deploy of several stages.
        """
        if command.id in self._known:
            return
        self._remember(command.id)
        job = Job(command, self._worker, self._epoch, self._clock)
        try:
            self._start(job, peers or {})
        except NotApplied as end:
            self._tell(job.report(end.state, end.reason, end.numbers))
            return
        self._jobs[command.id] = job
        self._is_hurried = True
        self._tell(job.report("running", "begun"))

    def cancel(self, morph_id: str) -> None:
        """Cancel a morph; the old shape goes on serving.

        Nothing is reported for an unknown id, and a transform that is beyond return is applied.
        """
        job = self._jobs.get(morph_id)
        if job and not job.is_beyond_return:
            self._abort(job, "cancelled")

    def fence(self, epoch: int) -> None:
        """Begin an epoch: give up the morphs of the old one, unless they must go on to their end."""
        for job in list(self._jobs.values()):
            if not job.is_beyond_return:
                self._abort(job, f"epoch {job.epoch} ended: the worker had lost its lease")
        self._epoch = epoch

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
        self._copier.close()
        if self._deployments:
            self._deployments.close()
        for target in self.targets.values():
            target.variants.release()
        reports, self._reports = self._reports, []
        return reports

    # ----------------------------------------------------------------------------- at a boundary

    def advance(self, is_busy: bool) -> list[MorphReport]:
        """Carry on the morphs for as long as the pace allows, and return their reports.

        is_busy: the engine has steps to run.
        """
        self._is_busy = is_busy
        if self._jobs:
            self._pace.begin(is_busy)
            self._is_hurried = False
            for job in list(self._jobs.values()):
                self._carry_on(job)
            # The first in line may have used up the time: next time another is the first.
            if len(self._jobs) > 1:
                first = next(iter(self._jobs))
                self._jobs[first] = self._jobs.pop(first)
        if self._deployments and len(self.targets) > 1 and is_busy:
            self._share(self._deployments)
        reports, self._reports = self._reports, []
        return reports

    def _share(self, deployments: Deployments) -> None:
        """Move KV pages to instances that miss them; one that is resized by order is left alone.

        Some pages move at every boundary, whatever the pace: an instance without blocks preempts a sequence
        and recomputes it, which takes longer.
        """
        if not self._jobs:
            self._pace.begin(is_busy=True)
        resized = {job.command.instance for job in self._jobs.values() if job.kind == "resize"}
        while deployments.share(resized):
            self._pace.spent()
            if not self._pace.has_time:
                return

    def _carry_on(self, job: Job) -> None:
        try:
            while self._pace.has_time:
                can_go_on = job.step()
                job.boundary_s += self._pace.spent()
                if job.has_news:
                    self._tell(job.report("running", job.news))
                if not can_go_on:
                    return
            self._is_hurried = True
        except StopIteration:
            self._end(job, "applied", job.already)
        except NotApplied as end:
            self._end(job, end.state, end.reason, end.numbers)
        except FATAL:
            raise
        except Exception as error:  # whatever it was, the old shape serves
            log.warning("morph %s failed", job.command.id, exc_info=error)
            self._end(job, "failed", f"{type(error).__name__}: {error}")

    # ----------------------------------------------------------------------------- beginnings and ends

    def _start(self, job: Job, peers: Peers) -> None:
        """Give `job` its run. Raises NotApplied."""
        command = job.command
        if command.epoch != self._epoch:
            raise NotApplied("stale", f"it is for epoch {command.epoch}; this is {self._epoch}")
        if isinstance(command, Deploy):
            self._start_deploy(job, command, peers)
            return
        target = self.targets.get(command.instance)
        if target is None:
            there_are = ", ".join(self.targets) or "none"
            raise NotApplied("failed", f"there is no instance {command.instance}; there are {there_are}")
        for other in self._jobs.values():
            job.refuse_beside(other)
        self._refuse_in_group(command)
        if isinstance(command, Transform):
            job.start(self._transform(command, peers))
        elif isinstance(command, Retire):
            job.start(self._can_deploy().retire(command))
        elif isinstance(command, Swap):
            job.start(self._swap(job, command, target))
            for other in self._jobs.values():
                job.refuse_beside(other)
        else:
            job.start(self._resize(command, target))

    def _begin_own(self, make: Callable[[int], Morph]) -> None:
        self.begin(make(self._epoch))

    def _start_deploy(self, job: Job, command: Deploy, peers: Peers) -> None:
        if command.instance in self.targets:
            raise NotApplied("conflict", f"{command.instance} is served here already; retire it first")
        for other in self._jobs.values():
            job.refuse_beside(other)
        self._refuse_in_group(command)
        job.start(self._can_deploy().deploy(command, peers))

    def _can_deploy(self) -> Deployments:
        """Return the deployments. Raises NotApplied where no model may come or go."""
        if self._deployments is None:
            raise NotApplied("failed", "this worker takes no models while it runs")
        if self._why_no_deploy:
            raise NotApplied("conflict", self._why_no_deploy)
        if self._groups and self._groups.is_in_group:
            raise NotApplied("conflict", "it is in a group; let the group part first")
        return self._deployments

    def _add(self, target: Target) -> None:
        target.copier = self._copier
        self.targets[target.instance.id] = target

    def _drop(self, instance: str) -> None:
        del self.targets[instance]

    def _let_part(self) -> None:
        assert self._groups
        if not self._jobs:
            self.begin(*self._groups.parting(self._epoch))

    def _refuse_in_group(self, command: Morph) -> None:
        """Raise NotApplied if the group of this worker forbids the command."""
        groups = self._groups
        if groups and (reason := groups.in_the_way):
            raise NotApplied("conflict", reason)
        if groups and groups.leader:
            raise NotApplied("conflict", f"it is in a group that {groups.leader} leads; order it there")

    def _transform(self, command: Transform, peers: Peers) -> Run:
        if self._groups is None or len(self.targets) > 1:
            raise NotApplied(
                "failed", "this worker joins no group: it has several models, or no worker.group_host"
            )
        return self._groups.transform(command, peers)

    def _swap(self, job: Job, command: Swap, target: Target) -> Run:
        order, variants = target.order_towards(command.precision), target.variants.precisions
        halves = plan_swap(command, target.instance.shape, variants, order)
        job.touches = frozenset(halves)
        return SwapRun(
            target,
            halves,
            command.precision,
            wait_s=command.wait_s,
            in_progress=self._in_progress,
            clock=self._clock,
        )

    def _resize(self, command: Resize, target: Target) -> Run:
        return ResizeRun(target, command.blocks, wait_s=command.wait_s, clock=self._clock)

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
        if target := self.targets.get(job.command.instance):
            target.check_integrity(with_pool=not self._is_busy)
        self._tell(report)

    def _tell(self, report: MorphReport) -> None:
        if report.state != "running":
            told = f"{report.state}: {report.reason}" if report.reason else report.state
            log.info("%s %s of %s %s", report.kind, report.id, report.target, told, extra=report.numbers)
        self._reports.append(report)

    def _remember(self, morph_id: str) -> None:
        self._known[morph_id] = None
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
