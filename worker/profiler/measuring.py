"""Profiles on their way, in the engine's thread: carried on between steps, a bounded share of the time."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from worker.engine.engine import DEVICE_ERRORS
from worker.memory import BrokenInvariant
from worker.profiler.profiler import Profiler, ProfileSteps
from worker.shape.copier import Pace

log = logging.getLogger(__name__)

POLL_S = 0.05  # while another thread works for it
# The books or the device are broken: no going on.
FATAL: tuple[type[Exception], ...] = (BrokenInvariant, AssertionError, *DEVICE_ERRORS)


@dataclass(frozen=True, slots=True)
class News:
    """Of one profile: how far it is or, once, that it is over; `problem` says why it was not measured."""

    id: str
    progress: str
    is_over: bool = False
    problem: str = ""


@dataclass(slots=True)
class _Job:
    profiler: Profiler
    tell: Callable[[News], None]
    steps: ProfileSteps | None = None
    told: str = ""


class Measuring:
    """One profile after the other, in the order of their coming. `advance` at every boundary."""

    def __init__(self, share: float = 0.025, clock: Callable[[], float] = time.perf_counter) -> None:
        """share: of the time of a busy engine."""
        self._pace = Pace(share, clock)
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._waits = False

    @property
    def patience_s(self) -> float | None:
        """How long an engine without work may sleep before `advance` is due; None: until it is woken."""
        if not self._jobs:
            return None
        return POLL_S if self._waits else 0.0

    def begin(self, name: str, profiler: Profiler, tell: Callable[[News], None]) -> None:
        """tell: called in this thread. The same name again changes nothing."""
        self._jobs.setdefault(name, _Job(profiler, tell))

    def cancel(self, name: str, reason: str = "cancelled") -> None:
        """Of one that is not here nothing is said."""
        if name in self._jobs:
            self._end(name, reason)

    def cancel_all(self, reason: str) -> None:
        for name in list(self._jobs):
            self._end(name, reason)

    def advance(self, is_busy: bool) -> bool:
        """Carry on the first, for as long as the pace allows. True if a profile came to its end: pages are
        others' again."""
        if not self._jobs:
            return False
        name, job = next(iter(self._jobs.items()))
        self._pace.begin(is_busy)
        try:
            while self._pace.has_time:
                job.steps = job.steps or job.profiler.steps()
                self._waits = not next(job.steps)
                self._pace.spent()
                self._tell_progress(name, job)
                if self._waits:
                    return False
        except StopIteration:
            self._end(name)
        except FATAL:
            raise
        except Exception as error:
            log.warning("measuring %s failed", name, exc_info=error)
            self._end(name, str(error) or type(error).__name__)
        return name not in self._jobs

    def _tell_progress(self, name: str, job: _Job) -> None:
        if job.profiler.progress != job.told:
            job.told = job.profiler.progress
            job.tell(News(name, job.told))

    def _end(self, name: str, problem: str = "") -> None:
        """With every page back. Raises MappingFailed: then pages are lost to others, and no going on."""
        job = self._jobs.pop(name)
        self._waits = False
        if job.steps:
            job.steps.close()
            job.profiler.check_integrity()
        job.tell(News(name, job.told, is_over=True, problem=problem))
