"""The price of relief: how long requests wait with halves of layers swapped, and without. Pure.

A request gets its first token when it has blocks and the prompts before its own are computed. Both go on side
by side, so it waits for the longer of the two. A swap takes time from the steps, and fewer bits may make each
step longer, or shorter. Where prompts take longest, more blocks shorten nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bus.policy import Slowdown
from bus.precisions import Precision
from worker.morph.losses import Halves
from worker.morph.reflex import Load

Slowdowns = Mapping[Precision, Slowdown]
NONE: Final = Slowdown()


@dataclass(frozen=True, slots=True)
class Waits:
    """Predicted seconds until the last request that waits now has its first token."""

    without_s: float
    with_s: float

    @property
    def is_shorter(self) -> bool:
        """True if relief shortens the wait."""
        return self.with_s < self.without_s


def slowdown_of(halves: Halves, slowdowns: Slowdowns) -> Slowdown:
    """Return the slowdown of steps in this shape: the mean over its halves. Unknown ones slow nothing."""
    found = [slowdowns.get(precision, NONE) for precision in halves.values()]
    count = max(1, len(found))
    return Slowdown(sum(one.prompt for one in found) / count, sum(one.decode for one in found) / count)


def is_predictable(load: Load) -> bool:
    """Return True if both waits can be predicted: prompts were computed here, and requests have ended."""
    return load.prompt_rate > 0 and load.residence_s > 0


def predict_waits(
    load: Load,
    *,
    missing: int,
    blocks: int,
    before: Halves,
    after: Halves,
    slowdowns: Slowdowns,
    work_s: float,
) -> Waits:
    """Return the waits without relief and with relief that brings `blocks` of the `missing` ones.

    before, after: the shapes. work_s: the time that the swap takes from the steps.

    The wait for blocks is predicted as in `Load.predicted_wait_s`, but that the whole cache comes free in the
    time that a request runs: until it is full, the prompts are what is waited for.
    """
    now, then = slowdown_of(before, slowdowns), slowdown_of(after, slowdowns)
    block_s = load.residence_s / max(1, load.kv_blocks)
    left_s = max(0, missing - blocks) * block_s * then.decode / now.decode
    compute_s = load.predicted_compute_s
    return Waits(
        without_s=max(compute_s, load.waited_s + missing * block_s),
        with_s=work_s + max(compute_s * then.prompt / now.prompt, left_s),
    )
