"""Numbers with a spread and a basis, and straight lines through them. Pure.

Results are sums of measured values times weights: independent spreads add in squares, each times its weight.
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
    """A value within value - down .. value + up."""

    value: float
    down: float = 0.0
    up: float = 0.0
    basis: Basis = "measured"

    def weakened(self, basis: Basis) -> Uncertain:
        """Return it with no better basis than `basis`."""
        return replace(self, basis=weakest((self.basis, basis)))

    def __rmul__(self, factor: float) -> Uncertain:
        return combine([(factor, self)])

    def __add__(self, other: Uncertain) -> Uncertain:
        return combine([(1.0, self), (1.0, other)])

    def at_least(self, least: float) -> Uncertain:
        """Return it cut off below `least`, which noise cannot change."""
        return replace(self, value=max(least, self.value), down=min(self.down, max(0.0, self.value - least)))

    def quantity(self) -> Quantity:
        """Return it as a message."""
        low, high = self.value - self.down, self.value + self.up
        return Quantity(value=self.value, low=low, high=high, basis=self.basis)


Points = Sequence[tuple[float, Uncertain]]  # x, and what was found there


def exactly(value: float, basis: Basis = "measured") -> Uncertain:
    """Return a value without spread."""
    return Uncertain(value, basis=basis)


def within(low: float, value: float, high: float) -> Uncertain:
    """Return a value that is assumed between two limits."""
    return Uncertain(value, value - low, high - value, "assumed")


def repeated(values: Sequence[float]) -> Uncertain:
    """Return median and quartiles: one disturbed repetition moves neither far."""
    return _between_quartiles(statistics.median(values), values)


def averaged(values: Sequence[float]) -> Uncertain:
    """Return mean and quartiles, for what a total has many of: slow ones count, too."""
    return _between_quartiles(statistics.fmean(values), values)


def _between_quartiles(value: float, values: Sequence[float]) -> Uncertain:
    if len(values) == 1:
        return Uncertain(value)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return Uncertain(value, max(0.0, value - low), max(0.0, high - value))


def weakest(bases: Iterable[Basis]) -> Basis:
    """Return the weakest basis; "measured" if there are none."""
    return max(bases, key=BASES.index, default="measured")


def combine(terms: Iterable[tuple[float, Uncertain]]) -> Uncertain:
    """Return the sum of weight times value; spreads are taken as independent."""
    used = [(weight, one) for weight, one in terms if weight]
    downs = (weight * (one.down if weight > 0 else one.up) for weight, one in used)
    ups = (weight * (one.up if weight > 0 else one.down) for weight, one in used)
    return Uncertain(
        sum(weight * one.value for weight, one in used),
        math.hypot(*downs),
        math.hypot(*ups),
        weakest(one.basis for _, one in used),
    )


def line_at(points: Points, x: float) -> Uncertain:
    """Return the value at `x` on the line of least squares; with one point a constant."""
    mean, spread = _moments(points)
    slope_weights = [(one - mean) / spread if spread else 0.0 for one, _ in points]
    return combine(
        (1 / len(points) + (x - mean) * weight, found)
        for weight, (_, found) in zip(slope_weights, points, strict=True)
    )


def slope_of(points: Points) -> Uncertain:
    """Return the slope of the line of least squares; 0 if all points have one x."""
    mean, spread = _moments(points)
    return combine(((x - mean) / spread if spread else 0.0, found) for x, found in points)


def _moments(points: Points) -> tuple[float, float]:
    mean = statistics.fmean(x for x, _ in points)
    return mean, sum((x - mean) ** 2 for x, _ in points)


def between(points: Points, x: float, *, is_convex: bool = False) -> Uncertain:
    """Return the value at `x` on straight lines from point to point, which are in the order of x.

    Beyond the outermost points the last line goes on. `is_convex`: for what grows with the square of x, too
    (attention over a prompt), the curve of the last three goes on, if it exceeds their spread.
    """
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
            straight += (x - left[0]) * (x - right[0]) * curve
    return straight.weakened("extrapolated")


def _curve(three: Points) -> Uncertain:
    """Return the second divided difference: the factor of x squared."""
    (a, at_a), (b, at_b), (c, at_c) = three
    return 1 / ((a - b) * (a - c)) * at_a + 1 / ((b - a) * (b - c)) * at_b + 1 / ((c - a) * (c - b)) * at_c
