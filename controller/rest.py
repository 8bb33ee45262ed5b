"""The shape that an instance has when nothing presses, and that the policy goes back to. Pure.

What workers serve by their settings rests in full precision on one worker. A deployment rests in the
configuration that its intent chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bus.messages import InstanceCard
from bus.precisions import LOWEST, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """`coarsest`: the fewest bits that layers may be swapped to meanwhile."""

    precision: Precision = "full"
    coarsest: Precision = LOWEST
    tp: int = 1


Rests = Mapping[str, Rest]  # by instance
Resting = Callable[[], Rests]  # as it is now
BY_SETTINGS = Rest()


def rest_of(card: InstanceCard, rests: Rests) -> Rest | None:
    """None: it was deployed, and not known how. Then it is left alone."""
    return rests.get(card.id) if card.deployed else BY_SETTINGS


def nobody() -> Rests:
    """No deployments."""
    return {}
