"""Profiles in the engine's thread, advanced between steps within a bounded share of its time."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from worker.morph.manager import FATAL
from worker.profiler.profiler import Profiler, ProfileSteps
from worker.shape.copier import Pace

log = logging.getLogger(__name__)

POLL_S = 0.05  # interval while a profile waits for another thread


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """The progress of a profile or, once, its end; `problem` says why it was not measured."""

    id: str
    progress: str
    is_over: bool = False
    problem: str = ""


@dataclass(slots=True)
class _Job:
    profiler: Profiler
    tell: Callable[[ProfileProgress], None]
    steps: ProfileSteps
    reported: str = ""


class ProfileRunner:
    """The profiles to measure, one after the other. Call `advance` at every step boundary."""

    def __init__(self, share: float = 0.025, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take `share` of a busy engine's time."""
        self._pace = Pace(share, clock)
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._waits = False

    @property
    def patience_s(self) -> float | None:
        """The time an engine without work may sleep before `advance` is due; None: until it is woken."""
        if not self._jobs:
            return None
        return POLL_S if self._waits else 0.0

    def begin(self, name: str, profiler: Profiler, tell: Callable[[ProfileProgress], None]) -> None:
        """Add a profile; `tell` is called in this thread. Repeating a name changes nothing."""
        self._jobs.setdefault(name, _Job(profiler, tell, profiler.steps()))

    def cancel(self, name: str, reason: str = "cancelled") -> None:
        """End the profile of this name, if there is one."""
        if name in self._jobs:
            self._end(name, reason)

    def cancel_all(self, reason: str) -> None:
        for name in list(self._jobs):
            self._end(name, reason)

    def advance(self, is_busy: bool) -> bool:
        """Advance the first profile as far as the pace allows.

        Return True if a profile ended: its pages are free again.
        """
        if not self._jobs:
            return False
        name, job = next(iter(self._jobs.items()))
        self._pace.begin(is_busy)
        try:
            while self._pace.has_time:
                self._waits = not next(job.steps)
                self._pace.spent()
                if job.profiler.progress != job.reported:
                    job.reported = job.profiler.progress
                    job.tell(ProfileProgress(name, job.reported))
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

    def _end(self, name: str, problem: str = "") -> None:
        """End a profile and free its pages. Raises MappingFailed, after which the pool cannot go on."""
        job = self._jobs.pop(name)
        self._waits = False
        job.steps.close()
        job.profiler.check_integrity()
        job.tell(ProfileProgress(name, job.reported, is_over=True, problem=problem))
