"""Numbers with a spread and a basis, and straight lines through them. Pure.

Everything here is a sum of measured values times weights that depend on where they were measured alone, so
independent spreads add in squares, each times its weight. That is how extrapolating from one and two layers
to eighty makes a small noise large, and the estimate says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bus.deployments import Basis, Quantity

BASES: tuple[Basis, ...] = ("measured", "extrapolated", "assumed")  # the weakest part names the whole


@dataclass(frozen=True, slots=True)
class Uncertain:
    """value - down .. value + up."""

    value: float
    down: float = 0.0
    up: float = 0.0
    basis: Basis = "measured"

    def weakened(self, basis: Basis) -> Uncertain:
        """No better founded than that."""
        return replace(self, basis=weakest((self.basis, basis)))

    def times(self, factor: float) -> Uncertain:
        return combine([(factor, self)])

    def plus(self, other: Uncertain) -> Uncertain:
        return combine([(1.0, self), (1.0, other)])

    def minus(self, other: Uncertain) -> Uncertain:
        return combine([(1.0, self), (-1.0, other)])

    def at_least(self, least: float) -> Uncertain:
        """For what cannot be below it, whatever the noise says."""
        return replace(self, value=max(least, self.value), down=min(self.down, max(0.0, self.value - least)))

    def quantity(self) -> Quantity:
        return Quantity(
            value=self.value, low=self.value - self.down, high=self.value + self.up, basis=self.basis
        )


Points = Sequence[tuple[float, Uncertain]]  # x, and what was found there


def exactly(value: float, basis: Basis = "measured") -> Uncertain:
    return Uncertain(value, basis=basis)


def within(low: float, value: float, high: float, basis: Basis = "assumed") -> Uncertain:
    return Uncertain(value, value - low, high - value, basis)


def repeated(values: Sequence[float]) -> Uncertain:
    """Median and quartiles: one repetition that something else slowed down moves neither far."""
    middle = statistics.median(values)
    if len(values) == 1:
        return Uncertain(middle)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Uncertain(middle, middle - low, high - middle)


def averaged(values: Sequence[float]) -> Uncertain:
    """Mean and quartiles: of what one total has many of. Those that are slow now and then are in it, too."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Uncertain(mean)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Uncertain(mean, max(0.0, mean - low), max(0.0, high - mean))


def weakest(bases: Iterable[Basis]) -> Basis:
    return max(bases, key=BASES.index, default="measured")


def combine(terms: Iterable[tuple[float, Uncertain]]) -> Uncertain:
    """The sum of weight times value; the spreads are taken as independent."""
    used = [(weight, one) for weight, one in terms if weight]
    downs = (weight * (one.down if weight > 0 else one.up) for weight, one in used)
    ups = (weight * (one.up if weight > 0 else one.down) for weight, one in used)
    return Uncertain(
        sum(weight * one.value for weight, one in used),
        math.hypot(*downs),
        math.hypot(*ups),
        weakest(one.basis for _, one in used),
    )


# --------------------------------------------------------------------------- one line through all points


def line_at(points: Points, x: float) -> Uncertain:
    """Least squares; with two points the solution of two equations, with one a constant."""
    mean, spread = _moments(points)
    slope_weights = [(one - mean) / spread if spread else 0.0 for one, _ in points]
    return combine(
        (1 / len(points) + (x - mean) * weight, found)
        for weight, (_, found) in zip(slope_weights, points, strict=True)
    )


def slope_of(points: Points) -> Uncertain:
    """Least squares; 0 where all points have one x."""
    mean, spread = _moments(points)
    return combine(((x - mean) / spread if spread else 0.0, found) for x, found in points)


def _moments(points: Points) -> tuple[float, float]:
    mean = statistics.fmean(x for x, _ in points)
    return mean, sum((x - mean) ** 2 for x, _ in points)


# --------------------------------------------------------------------------- from point to point


def between(points: Points, x: float, *, is_convex: bool = False) -> Uncertain:
    """From point to point by straight lines, and beyond the outermost along the last of them. `points` by
    rising x. Away from the points it is extrapolated. `is_convex`: what grows with the square of x beside x
    itself (attention over a prompt) keeps, beyond the last point, the curve of the last three, if they show
    more of one than their spread."""
    if len(points) == 1:
        only, found = points[0]
        return found if x == only else found.weakened("assumed")
    for at, found in points:
        if at == x:
            return found
    left, right = next(((one, two) for one, two in pairwise(points) if x < two[0]), tuple(points[-2:]))
    straight = line_at((left, right), x)
    if is_convex and x > points[-1][0] and len(points) > 2:
        curve = _curve(points[-3:])
        if curve.value - curve.down > 0:
            straight = straight.plus(curve.times((x - left[0]) * (x - right[0])))
    return straight.weakened("extrapolated")


def _curve(three: Points) -> Uncertain:
    """The second divided difference: the factor of x squared."""
    (a, at_a), (b, at_b), (c, at_c) = three
    return combine(
        [
            (1 / ((a - b) * (a - c)), at_a),
            (1 / ((b - a) * (b - c)), at_b),
            (1 / ((c - a) * (c - b)), at_c),
        ]
    )
