"""Shapes of layers that workers share: a group forms only of members whose layers have equal precisions.

Losses are estimates from those of whole models: half of a layer has its part of them. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bus.messages import PARTS, LayerShape
from bus.morphs import HalfOrder
from bus.precisions import ASSUMED_LOSSES, PRECISIONS, KVPrecision, Precision

Layers = Sequence[LayerShape]
MayRise = Callable[[int, Sequence[HalfOrder]], bool]  # whether a member has room for halves with more bits

# Sums of losses are rounded: a budget that is just used up is not exceeded.
LOSS_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class CommonShape:
    """The layers that all members get, by `orders` for each member; `loss` is added by the worst of these."""

    layers: tuple[LayerShape, ...]
    orders: tuple[tuple[HalfOrder, ...], ...]
    loss: float

    @property
    def num_halves(self) -> int:
        """The halves that change, at all members."""
        return sum(map(len, self.orders))

    @property
    def words(self) -> str:
        """The orders for people, as in `4 halves to int8`."""
        halves = [one.precision for order in self.orders for one in order]
        counts = [(precision, halves.count(precision)) for precision in PRECISIONS]
        return ", ".join(f"{count} halves to {precision}" for precision, count in counts if count)


def common_shape(
    members: Sequence[Layers],
    losses: Mapping[Precision, float],
    budget: float,
    *,
    resting: Precision = "full",
    may_rise: MayRise = lambda member, orders: True,
) -> CommonShape | str:
    """Return the shape that members get before they merge, or why there is none.

    The shape of the member with the fewest bits is taken if it costs fewer halves than going back to
    `resting` and stays within the `budget` of loss, or if there is no room to go back.
    """
    lowest = min(members, key=_bits)
    rest = tuple(LayerShape(attention=resting, ffn=resting) for _ in lowest)
    down, back = (_towards(members, target, losses) for target in (tuple(lowest), rest))
    is_allowed = loss_of(down.layers, losses) - loss_of(rest, losses) <= budget + LOSS_ROUNDING
    has_room = all(may_rise(member, order) for member, order in enumerate(back.orders) if order)
    if is_allowed and (down.num_halves < back.num_halves or not has_room):
        return down
    if has_room:
        return back
    lost = loss_of(down.layers, losses) - loss_of(rest, losses)
    return (
        f"their layers differ in precision: for {resting} there are too few free KV blocks, and the shape of "
        f"fewest bits loses {lost:.2%} of at most {budget:.2%}"
    )


def loss_of(layers: Iterable[LayerShape], losses: Mapping[Precision, float]) -> float:
    """Return the estimated loss of perplexity of a shape; `losses` are those of the whole model, measured."""
    halves = [half for layer in layers for half in (layer.attention, layer.ffn)]
    return sum(whole_loss(half, losses) for half in halves) / max(1, len(halves))


def loss_of_kv(precision: KVPrecision | None, rest: KVPrecision, loss: float | None) -> float:
    """Return the loss of a KV cache beyond that at rest; `loss`: of one in 8 bits, None: not measured.

    precision: None on the way between two, where some layers are in 8 bits.
    """
    return 0.0 if precision in ("full", rest) else loss or 0.0


def whole_loss(precision: Precision, losses: Mapping[Precision, float]) -> float:
    """Return the loss of a whole model in a precision, as measured or else as assumed."""
    return losses.get(precision, ASSUMED_LOSSES[precision])


def orders_between(now: Layers, target: Layers) -> tuple[HalfOrder, ...]:
    """Return the halves that differ, with the precision that each has in `target`."""
    return tuple(
        HalfOrder(layer=number, part=part, precision=wanted)
        for number, (one, other) in enumerate(zip(now, target, strict=True))
        for part in PARTS
        if (wanted := other.of(part)) != one.of(part)
    )


def _towards(
    members: Sequence[Layers], target: tuple[LayerShape, ...], losses: Mapping[Precision, float]
) -> CommonShape:
    orders = tuple(orders_between(member, target) for member in members)
    added = max(loss_of(target, losses) - loss_of(member, losses) for member in members)
    return CommonShape(target, orders, max(0.0, added))


def _bits(layers: Layers) -> float:
    """Return a number that is lower for a shape with fewer bits."""
    return -sum(PRECISIONS.index(layer.of(part)) for layer in layers for part in PARTS)
