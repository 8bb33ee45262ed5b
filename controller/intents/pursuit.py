"""Whether another configuration is worth a change of what serves, for what its intent wants. Pure.

The two costs of a change are compared by name: what the intent minimises, as it is and as it would be, both
estimated from one profile. For its own sake a change must promise `MARGIN` less: estimates are wrong by some
per cent, and what is as good as it was is not moved.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.deployments import Estimate, Intent, Objective
from bus.messages import Number
from controller.intents.intents import COST_UNITS, is_guess, minimised, name_of, objective

MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of `now` and `then`, in the unit of what is minimised."""

    minimised: Objective
    now: float
    then: float
    words: str
    is_guess: bool = False  # that it would be so

    @property
    def is_better(self) -> bool:
        return self.then <= (1 - MARGIN) * self.now and not self.is_guess

    @property
    def is_no_worse(self) -> bool:
        return self.then <= self.now and not self.is_guess

    @property
    def numbers(self) -> dict[str, Number]:
        """Of the event that tells of the change."""
        return {f"{self.minimised}_now": self.now, f"{self.minimised}_then": self.then}


def compare(now: Estimate, then: Estimate, intent: Intent) -> Comparison:
    """`now`: of the configuration that serves."""
    what = objective(intent)
    before, after = minimised(now, intent), minimised(then, intent)
    units = {"latency": "s", "memory": "bytes", "gpu_hours": "h", "cost": COST_UNITS[intent.cost]}
    unit = units[what]
    return Comparison(
        minimised=what,
        now=before,
        then=after,
        words=f"{what} is {before:.4g} {unit} as {name_of(now)} and {after:.4g} as {name_of(then)}",
        is_guess=is_guess(then) and not is_guess(now),
    )
