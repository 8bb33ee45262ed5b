"""The shape of an instance without pressure, which the reflex goes back to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bus.messages import InstanceCard
from bus.policy import Slowdown
from bus.precisions import LOWEST, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """A shape at rest.

    What workers serve by their settings rests in the most bits that it has on one worker, a deployment in the
    configuration that its intent chose. Under pressure layers may be swapped down to `coarsest`, as far as
    they lose no more than `loss_left`; None: as much as the policy allows.
    """

    precision: Precision = "full"
    coarsest: Precision = LOWEST
    loss_left: float | None = None  # share of the perplexity
    tp: int = 1
    slowdowns: Mapping[Precision, Slowdown] = field(default_factory=dict)  # by the profile of the model


Rests = Mapping[str, Rest]  # rests of deployments, by instance


def rest_of(card: InstanceCard, rests: Rests) -> Rest | None:
    """Return the shape at rest; None for a deployment that `rests` lacks: nothing morphs it by itself."""
    return rests.get(card.id) if card.deployed else Rest(precision=card.best)
