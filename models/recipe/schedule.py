"""When to stop and how fast to learn, by time spent in steps rather than by the clock on the wall.

A run that is stopped for a while (SIGSTOP, a suspended laptop) or compiles a new shape loses none of its
schedule: a step counts for at most a few times the usual step.
"""

from dataclasses import dataclass, replace

STALL_FACTOR = 3.0  # a step that took longer than this many usual steps was interrupted
REWARMED_TO = 0.5  # of the full rates, where a finished run is extended
SMOOTHING = 0.1  # weight of the newest step in the usual step


@dataclass(slots=True)
class Schedule:
    """Warm up, hold, then decay linearly to zero at the end of the budget; the end can be brought forward."""

    budget_s: float
    warmup_share: float = 0.02
    decay_share: float = 0.5
    long_rows_share: float = 0.3  # the last part of the budget, trained on rows of the full context
    active_s: float = 0.0
    usual_step_s: float = 0.0
    decay_start_s: float = -1.0
    decay_from: float = 1.0

    def __post_init__(self) -> None:
        if self.decay_start_s < 0:
            self.decay_start_s = self.budget_s * (1 - self.decay_share)

    @property
    def is_done(self) -> bool:
        """True if the budget is used up."""
        return self.active_s >= self.budget_s

    @property
    def progress(self) -> float:
        """Share of the budget used, 0 to 1."""
        return min(1.0, self.active_s / self.budget_s)

    @property
    def has_long_rows(self) -> bool:
        """True if this part trains on rows of the full context."""
        return self.progress >= 1 - self.long_rows_share

    @property
    def lr_factor(self) -> float:
        """The factor of every learning rate now, 0 to 1."""
        warmup_s = self.warmup_share * self.budget_s
        if self.active_s < self.decay_start_s:
            return min(1.0, (self.active_s + self.usual_step_s) / warmup_s) if warmup_s else 1.0
        if self.is_done:
            return 0.0
        return self.decay_from * (self.budget_s - self.active_s) / (self.budget_s - self.decay_start_s)

    def count_step(self, step_s: float, *, is_first_of_shape: bool) -> None:
        """Add a step's time. The first of a shape includes compilation and counts as a usual one."""
        if is_first_of_shape:
            step_s = self.usual_step_s
        elif self.usual_step_s:
            step_s = min(step_s, STALL_FACTOR * self.usual_step_s)
        self.active_s += step_s
        self.usual_step_s += SMOOTHING * (step_s - self.usual_step_s) if self.usual_step_s else step_s

    def finish_within(self, cooldown_s: float) -> None:
        """Start decaying now, from the present rate, and end after `cooldown_s`; never later than planned."""
        if self.active_s + cooldown_s >= self.budget_s:
            return
        self.decay_from = self.lr_factor
        self.decay_start_s = self.active_s
        self.budget_s = self.active_s + cooldown_s

    def extended(self, extra_s: float) -> "Schedule":
        """Return a finished schedule and `extra_s` more: rewarmed, full rows, decaying throughout."""
        return replace(
            self,
            budget_s=self.active_s + extra_s,
            long_rows_share=1.0,
            decay_start_s=self.active_s,
            decay_from=REWARMED_TO,
            usual_step_s=0.0,
        )
