"""An instance as the monitor shows it: smoothed over reports, by the rules of `monitor.smoothing`."""

from __future__ import annotations

from bus.settings import MonitorSettings
from instar.simulate.engine import SimulatedInstance

SETTLED = 0.01  # sequences and blocks that count as none


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
    def blocks_needed(self) -> int:
        """Blocks in use and of the prompts that wait, in the last report."""
        return self.last_used + -(-self.waiting_tokens // self._instance.limits.block_tokens)

    @property
    def is_settled(self) -> bool:
        """True if a long idle instance would show the same."""
        return self.load + self.kv_used < SETTLED

    def forget(self) -> None:
        """Begin anew, after a time without reports."""
        self.kv_used = self.running = self.waiting = 0.0

    def observe(self, now_s: float) -> None:
        """Take a report of the instance."""
        instance, weight = self._instance, self._settings.smoothing
        waiting = instance.waiting if instance.has_queue else ()
        self.last_used = instance.used_at(now_s)
        self.waiting_tokens = sum(len(seq.token_ids) for seq in waiting)
        self.kv_used += weight * (self.last_used - self.kv_used)
        self.running += weight * (instance.num_running - self.running)
        self.waiting += weight * (len(waiting) - self.waiting)
