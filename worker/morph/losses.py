"""The predicted loss of halves in fewer bits, and the choice of the halves that lose least. Pure.

Losses are shares of the perplexity (0.01: one per cent more) and add up over halves (MorphServe, Table 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from bus.messages import PARTS
from bus.precisions import ASSUMED_LOSSES, PRECISIONS, Precision, is_below, lowest
from worker.morph.plan import Half

Halves = Mapping[Half, Precision]
Measured = Mapping[Precision, Mapping[str, Sequence[float]]]  # loss of each layer's half, by part
Pages = Callable[[Half, Precision], int]  # pages of a half's variant
MayTouch = Callable[[Halves, Half], bool]  # True: the half may lose bits in this shape


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of each half alone in each precision that the instance has.

    `assumed` lists the precisions without a profile. `best` is the one with the most bits that a half can be
    held in, which loses nothing: full, or that of a quantised checkpoint.
    """

    shares: Mapping[Half, Mapping[Precision, float]] = field(default_factory=dict)
    assumed: tuple[Precision, ...] = ()
    best: Precision = "full"

    @property
    def precisions(self) -> list[Precision]:
        """The precisions that a half can be held in, most bits first."""
        return [self.best, *next(iter(self.shares.values()), {})]

    def of(self, half: Half, precision: Precision) -> float:
        """Return the loss of `half` in `precision`; 0.0 in the best."""
        return self.shares[half][precision] if is_below(precision, self.best) else 0.0

    def total(self, halves: Halves, resting: Precision = "full") -> float:
        """Return the loss of a whole shape beyond that at rest."""
        return sum(
            self.of(half, precision) - self.of(half, resting)
            for half, precision in halves.items()
            if is_below(precision, resting)
        )


def losses_of(
    num_layers: int, precisions: Iterable[Precision], measured: Measured, best: Precision = "full"
) -> Losses:
    """Return the table of a model. best: the most bits that its layers can have.

    A precision that is not `measured` gets a share of ASSUMED_LOSSES for every half alike. Noise may make
    fewer bits look better than more: they count as equal.
    """
    held = set(precisions)
    below = [precision for precision in PRECISIONS if precision in held and is_below(precision, best)]
    shares: dict[Half, dict[Precision, float]] = {}
    for half in (Half(layer, part) for layer in range(num_layers) for part in PARTS):
        row, least = dict[Precision, float](), 0.0
        for precision in below:
            if found := measured.get(precision):
                loss = found[half.part][half.layer]
            else:
                loss = ASSUMED_LOSSES[precision] / (num_layers * len(PARTS))
            row[precision] = least = max(least, loss)
        shares[half] = row
    return Losses(shares, tuple(precision for precision in below if precision not in measured), best)


def whole_losses(num_layers: int, measured: Measured) -> dict[Precision, float]:
    """Return the loss of a whole model in each measured precision."""
    table = losses_of(num_layers, measured, measured)
    return {
        precision: sum(row[precision] for row in table.shares.values())
        for precision in PRECISIONS
        if precision in measured
    }


class HalfStep(NamedTuple):
    """One half to one precision. The least goes first."""

    cost: float  # cost of each page
    place: int  # place of its layer, for equal costs
    rank: int  # rank of the precision, for equal places
    half: Half
    precision: Precision


@dataclass(frozen=True, slots=True)
class Choice:
    """The halves to swap and the precision of each; pages and loss that this saves and costs.

    Where halves go back, both numbers are below 0.
    """

    halves: dict[Half, Precision]
    pages: int
    loss: float


def choose_relief(
    halves: Halves,
    losses: Losses,
    pages: Pages,
    *,
    allowed: Sequence[Precision],
    order: Sequence[int],
    wanted_pages: float,
    budget: float,
    may_touch: MayTouch = lambda halves, half: True,
) -> Choice:
    """Choose the halves that lose least for each page until `wanted_pages` are saved.

    allowed: the precisions that a half may go down to. order: of layers, where losses are equal. budget: the
    loss that may be added. may_touch: whether a half may go down in a shape.

    Each half offers its best next step. A step that exceeds the budget is left out; smaller ones may follow.
    """
    place = {layer: i for i, layer in enumerate(order)}
    now, chosen, saved, lost = dict(halves), dict[Half, Precision](), 0, 0.0

    def best_step(half: Half) -> HalfStep | None:
        steps = []
        for rank, precision in enumerate(allowed):
            freed = pages(half, now[half]) - pages(half, precision)
            cost = losses.of(half, precision) - losses.of(half, now[half])
            if is_below(precision, now[half]) and freed > 0 and lost + cost <= budget:
                steps.append(HalfStep(cost / freed, place[half.layer], rank, half, precision))
        return min(steps, default=None) if may_touch(now, half) else None

    for step in _in_turn(halves, best_step):
        if saved >= wanted_pages:
            break
        saved += pages(step.half, now[step.half]) - pages(step.half, step.precision)
        lost += losses.of(step.half, step.precision) - losses.of(step.half, now[step.half])
        now[step.half] = chosen[step.half] = step.precision
    return Choice(chosen, saved, lost)


def choose_return(
    halves: Halves,
    losses: Losses,
    pages: Pages,
    *,
    goal: Precision,
    order: Sequence[int],
    spare_pages: float,
) -> Choice:
    """Choose the halves whose return regains most for each page, while `spare_pages` suffice.

    goal: the fewest bits that all would go back to; where the instance lacks this precision, the next one
    with more. A half may stop on the way. Where losses are equal, the last of `order` goes first.
    """
    place = {layer: i for i, layer in enumerate(order)}
    most = lowest(one for one in losses.precisions if not is_below(one, goal))
    offered = [one for one in losses.precisions if not is_below(most, one)]
    now, chosen, taken, gained = dict(halves), dict[Half, Precision](), 0, 0.0

    def best_step(half: Half) -> HalfStep | None:
        steps = []
        for rank, precision in enumerate(offered):
            needed = pages(half, precision) - pages(half, now[half])
            if is_below(now[half], precision) and taken + needed <= spare_pages:
                gain = losses.of(half, now[half]) - losses.of(half, precision)
                steps.append(HalfStep(-gain / max(1, needed), -place[half.layer], rank, half, precision))
        return min(steps, default=None)

    for step in _in_turn(halves, best_step):
        taken += pages(step.half, step.precision) - pages(step.half, now[step.half])
        gained += losses.of(step.half, now[step.half]) - losses.of(step.half, step.precision)
        now[step.half] = chosen[step.half] = step.precision
    return Choice(chosen, -taken, -gained)


def _in_turn(halves: Iterable[Half], best_step: Callable[[Half], HalfStep | None]) -> Iterator[HalfStep]:
    """Yield the least step of all halves, again and again; steps only get dearer as others are taken."""
    heap = [step for half in halves if (step := best_step(half))]
    heapify(heap)
    while heap:
        before = heappop(heap)
        step = best_step(before.half)
        if step == before:
            yield step
            step = best_step(before.half)
        if step:
            heappush(heap, step)
