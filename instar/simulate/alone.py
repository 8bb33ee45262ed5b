"""A request that has an instance at rest for itself: its steps are computed at once, without the scheduler.

`SimulatedCluster._runs_alone` states when this is the same. Somebody else who comes meanwhile, or a forecast
that is acted on, ends the shortcut: the scheduler then does what it would have done until now.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from instar.replay.outcomes import RequestOutcome


@dataclass(slots=True)
class LoneRun:
    """The request, when it was admitted, and its steps.

    ends: of the steps. num_prompts: the first ones, which compute the prompt and then the first token.
    """

    outcome: RequestOutcome
    began_s: float
    ends: list[float]
    num_prompts: int
    block_tokens: int

    def used_at(self, times: Sequence[float]) -> list[int]:
        """Return the KV blocks in use at these times, as `SimulatedInstance.used_at` does."""
        ends, block_tokens, first = self.ends, self.block_tokens, self.num_prompts - 1
        last, rounded = len(ends) - 1, self.outcome.prompt_asked + block_tokens - 1
        counts = (bisect_right(ends, at_s, 0, last) for at_s in times)  # of steps that have ended
        return [(rounded + max(0, count - first)) // block_tokens for count in counts]
