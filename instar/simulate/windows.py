"""An instance as the monitor shows it: smoothed over reports, by the rules of `monitor.smoothing`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bus.settings import MonitorSettings
from instar.simulate.engine import SimulatedInstance

SETTLED = 0.01  # sequences and blocks that count as none
ROUNDING = 1e-6  # of a report


class Smoothed:
    """The averages of one instance, with weight `smoothing` for the newest report, and its last report."""

    def __init__(self, instance: SimulatedInstance, settings: MonitorSettings) -> None:
        self._instance, self._settings = instance, settings
        self.kv_used = self.running = self.waiting = 0.0
        self.last_used = self.waiting_tokens = 0

    @property
    def load(self) -> float:
        """Sequences there."""
        return self.running + self.waiting

    @property
    def kv_usage(self) -> float:
        return min(1.0, self.kv_used / self._instance.scheduler.blocks.capacity)

    @property
    def is_settled(self) -> bool:
        """True if a long idle instance would show the same."""
        return self.load + self.kv_used < SETTLED

    @property
    def settles_in(self) -> int:
        """Reports until `is_settled`, if nothing runs or waits any more; not too many, but for rounding."""
        left = 1 - self._settings.smoothing
        if self.is_settled or not left:
            return 1
        return max(1, math.ceil(math.log(SETTLED / (self.load + self.kv_used)) / math.log(left) - ROUNDING))

    def forget(self) -> None:
        """Begin anew, after a time without reports."""
        self.kv_used = self.running = self.waiting = 0.0

    def observe(self, times: Sequence[float]) -> list[int]:
        """Take the reports at these times, between which steps end and nothing else happens.

        Returns the blocks that are needed at each: those in use and those of the prompts that wait.
        """
        instance, weight = self._instance, self._settings.smoothing
        queue = instance.waiting if instance.has_queue else ()
        num_running, num_waiting = instance.num_running, len(queue)
        self.waiting_tokens = sum(len(seq.token_ids) for seq in queue)
        kv_used, running, waiting = self.kv_used, self.running, self.waiting
        all_used = instance.used_at(times)
        for used in all_used:
            kv_used += weight * (used - kv_used)
            running += weight * (num_running - running)
        for _ in all_used if waiting or num_waiting else ():
            waiting += weight * (num_waiting - waiting)
        self.kv_used, self.running, self.waiting, self.last_used = kv_used, running, waiting, all_used[-1]
        blocks_waiting = -(-self.waiting_tokens // instance.limits.block_tokens)
        return [used + blocks_waiting for used in all_used] if blocks_waiting else all_used
