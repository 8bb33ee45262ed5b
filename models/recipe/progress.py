"""One line on stderr every few seconds while training."""

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe.schedule import Schedule
    from recipe.training import Counts


def say(text: str) -> None:
    """Print a line for the person who started the script."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Progress:
    """Smooths the loss and reports it with speed and time left."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.loss = 0.0
        self.shown_at = time.monotonic()
        self.shown_tokens: int | None = None

    def show(self, schedule: "Schedule", counts: "Counts", loss: float) -> None:
        """Take in one step's loss; write a line when `every_s` have passed since the last."""
        self.loss = loss if not self.loss else 0.95 * self.loss + 0.05 * loss
        if self.shown_tokens is None:
            self.shown_tokens, self.shown_at = counts.tokens, time.monotonic()
        passed_s = time.monotonic() - self.shown_at
        if passed_s < self.every_s and not schedule.is_done:
            return
        rate = (counts.tokens - self.shown_tokens) / max(passed_s, 1e-9)
        self.shown_at, self.shown_tokens = time.monotonic(), counts.tokens
        left_min = max(0.0, schedule.budget_s - schedule.active_s) / 60
        say(
            f"step {counts.steps:5d}  {schedule.progress:5.1%}  {counts.tokens / 1e6:6.2f}M tokens  "
            f"loss {self.loss:.3f}  lr x{schedule.lr_factor:.2f}  {rate:6.0f} tok/s  {left_min:.1f} min left"
        )
