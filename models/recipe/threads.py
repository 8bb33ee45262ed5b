"""How many threads a step takes: the number that has been fastest lately.

On a machine shared with other work two threads can be slower than one: each parallel loop waits for the
thread whose core is taken. Measured on two cores with one busy neighbour: two threads fell from 3,300 to 400
tokens/s, less than one undisturbed core should make.
"""

from dataclasses import dataclass, field

import torch

PROBE_EVERY = 12  # steps; each probe costs at most the difference of one step
SMOOTHING = 0.5  # neighbours come and go: believe the last few steps


@dataclass
class ThreadChoice:
    """Uses the best count, and tries another one every few steps."""

    counts: tuple[int, ...]
    step_s: dict[int, float] = field(default_factory=dict)
    num_steps: int = 0
    used: int = 0

    def begin_step(self) -> None:
        """Set torch's thread count for this step."""
        self.num_steps += 1
        self.used = self._probed() if self.num_steps % PROBE_EVERY == 0 else self._fastest()
        torch.set_num_threads(self.used)

    def end_step(self, step_s: float) -> None:
        """Take in how long the step took."""
        before = self.step_s.get(self.used, step_s)
        self.step_s[self.used] = before + SMOOTHING * (step_s - before)

    def _fastest(self) -> int:
        return min(self.step_s, key=self.step_s.__getitem__, default=self.counts[-1])

    def _probed(self) -> int:
        """Try the counts in turn."""
        others = [n for n in self.counts if n != self._fastest()] or list(self.counts)
        return others[self.num_steps // PROBE_EVERY % len(others)]
