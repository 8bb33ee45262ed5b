"""Each lever with its gain and its price. Pure.

All costs are in request-seconds. A request that waits a second, stands still for a second or gets a second's
less work done costs one. Loss costs as much as the time to the first token that the policy allows, for every
request that gets it, when the whole budget is spent: so the operator states the rate of exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from bus.levers import NEVER_S, CostBasis, LeverOption
from bus.shapes import LOSS_ROUNDING
from controller.planning.lever_costs import CONNECT_S, MOVE_S
from controller.planning.situation import (
    LeverSituation,
    LongNeed,
    MergeOffer,
    Objectives,
    PartOffer,
    ServingInstance,
)

_LEAST: Final = 1e-9  # of what others are divided by


def swap_for_long(situation: LeverSituation, long: LongNeed) -> LeverOption | None:
    """Return the cheapest swap after which one instance holds the request beside what it has."""
    found = []
    for one in situation.instances:
        missing = max(one.needed, one.used) + math.ceil(long.tokens / one.block_tokens) - one.blocks
        if (one.max_model_len and long.tokens > one.max_model_len) or missing <= 0:
            continue
        option = swap(situation, one, missing, 1.0)
        if option and option.blocks >= missing:
            found.append(option)
    return min(found, key=lambda option: option.price_s, default=None)


def merge(situation: LeverSituation, offer: MergeOffer) -> LeverOption:
    """Return the option: its members stand still, and the whole cluster gets less done while the group is.

    Where a group parts first, that is the lever, and all that follows is in its price.
    """
    costs, shape = situation.costs, list(offer.instances)
    if offer.refusal:
        return LeverOption(lever="merge", targets=shape, refusal=offer.refusal)
    kind, half, undo = costs.kinds["merge"], costs.kinds["swap"], costs.kinds["part"]
    speed, basis = costs.speed(offer.tp)
    alone = costs.speed(offer.tp_before)[0] * len(offer.instances)
    connect_s = 0.0 if offer.are_neighbours else CONNECT_S
    stalled_s = kind.stalled_s + offer.halves * half.stalled_s + (undo.stalled_s if offer.parted else 0.0)
    stalled_s += costs.kinds["kv"].stalled_s if offer.is_kv_converted else 0.0
    worker = costs.speeds.get(1, 0.0)
    price_s = (
        (stalled_s + undo.stalled_s) * offer.load
        + lost(situation, alone - speed)
        + _price_of_loss(offer.loss, offer.load, situation.objectives)
    )
    return LeverOption(
        lever="part" if offer.parted else "merge",
        targets=list(offer.parted) or shape,
        tp=offer.tp_before if offer.parted else offer.tp,
        blocks=offer.blocks,
        tokens_per_s=round((speed - alone) * worker, 1),
        loss=offer.loss,
        stalled_s=stalled_s,
        nbytes=round(kind.nbytes + offer.halves * half.nbytes),
        duration_s=min(NEVER_S, offer.room_s)
        + costs.seconds("merge")
        + connect_s
        + (costs.seconds("part") if offer.parted else 0.0)
        + costs.seconds("swap", offer.halves)
        + (costs.seconds("kv") if offer.is_kv_converted else 0.0),
        price_s=price_s,
        basis=_weaker(kind.basis, basis),
    )


def resize(situation: LeverSituation, one: ServingInstance) -> list[LeverOption]:
    if one.spare_blocks <= 0:
        return []
    kind = situation.costs.kinds["resize"]
    option = LeverOption(
        lever="resize",
        targets=[one.name],
        blocks=one.spare_blocks,
        stalled_s=kind.stalled_s,
        duration_s=situation.costs.seconds("resize"),
        price_s=kind.stalled_s * one.running,
        basis=kind.basis,
    )
    return [option]


def convert_kv(situation: LeverSituation, one: ServingInstance) -> list[LeverOption]:
    """Return the option to hold the KV cache in 8 bits, if the budget of loss allows it."""
    if one.kv_blocks <= 0 or one.kv_loss > one.loss_left + LOSS_ROUNDING:
        return []
    kind = situation.costs.kinds["kv"]
    price_s = kind.stalled_s * one.running + _price_of_loss(one.kv_loss, one.load, situation.objectives)
    option = LeverOption(
        lever="kv",
        targets=[one.name],
        precision="int8",
        blocks=one.kv_blocks,
        loss=one.kv_loss,
        stalled_s=kind.stalled_s,
        duration_s=situation.costs.seconds("kv"),
        price_s=price_s,
        basis=kind.basis,
    )
    return [option]


def swap(situation: LeverSituation, one: ServingInstance, missing: float, share: float) -> LeverOption | None:
    """Return the swap of one precision that loses least for what is missing, or brings most of it.

    share: of its time that the worker gives to it.
    """
    kind, found = situation.costs.kinds["swap"], []
    for rung in one.rungs:
        allowed = rung.layers if rung.loss <= 0 else math.floor((one.loss_left + LOSS_ROUNDING) / rung.loss)
        layers = min(rung.layers, allowed, rung.begun + math.ceil(missing / rung.blocks))
        if layers <= rung.begun:
            continue
        halves, loss = 2 * layers - rung.begun, layers * rung.loss
        price_s = kind.stalled_s * halves * one.running
        option = LeverOption(
            lever="swap",
            targets=[one.name],
            layers=layers,
            precision=rung.precision,
            blocks=int((layers - rung.begun) * rung.blocks),
            loss=loss,
            stalled_s=kind.stalled_s * halves,
            nbytes=round(layers * rung.nbytes),
            duration_s=situation.costs.seconds("swap", halves, share),
            price_s=price_s + _price_of_loss(loss, one.load, situation.objectives),
            basis=kind.basis,
        )
        found.append((-min(missing, option.blocks), option.price_s, option))
    return min(found, key=lambda each: each[:2])[2] if found else None


def move(one: ServingInstance, free: Mapping[str, int]) -> list[LeverOption]:
    """Return moves of what waits, to the instances with most room first.

    Each request loses its place in the queue, and comes last elsewhere: that is as far as it goes.
    """
    left, found = one.missing, []
    for name, blocks in sorted(free.items(), key=lambda each: (-each[1], each[0])):
        if name == one.name or blocks <= 0 or left <= 0 or not one.is_movable:
            continue
        taken = min(left, blocks)
        moved = one.waiting * taken / one.missing
        found.append(
            LeverOption(
                lever="move",
                targets=[one.name, name],
                blocks=taken,
                duration_s=MOVE_S,
                price_s=MOVE_S * moved,
            )
        )
        left -= taken
    return found


def more(situation: LeverSituation, one: ServingInstance) -> list[LeverOption]:
    """Return the option: an instance more, like the smallest there is, to which queued requests go."""
    if not situation.spares:
        return []
    kind, (speed, _) = situation.costs.kinds["load"], situation.costs.tokens_per_s(1)
    blocks = min(each.blocks for each in situation.instances)
    nbytes = max(each.weight_bytes for each in situation.instances)
    moved = one.waiting * min(1.0, blocks / max(1, one.missing))
    option = LeverOption(
        lever="more",
        targets=[situation.spares[0]],
        blocks=blocks,
        tokens_per_s=round(speed, 1),
        nbytes=nbytes or round(kind.nbytes),
        duration_s=situation.costs.load_s(nbytes) + MOVE_S,
        price_s=MOVE_S * moved,
        basis=kind.basis,
    )
    return [option]


def room(one: ServingInstance, objectives: Objectives) -> int:
    """Return the blocks that others may fill: none where requests wait."""
    return 0 if one.waiting else max(0, int(objectives.kv_usage_high * one.blocks) - one.needed)


def part(situation: LeverSituation, offer: PartOffer) -> LeverOption:
    """Return the option: all members stand still, and get more done from then on."""
    costs, kind = situation.costs, situation.costs.kinds["part"]
    together, basis = costs.speed(offer.tp_before)
    speed = _speed_of_parts(situation, offer)
    best = _speed_of_parts(situation, replace(offer, tp=1))
    return LeverOption(
        lever="part",
        targets=list(offer.instances),
        tp=offer.tp,
        tokens_per_s=round((speed - together) * costs.speeds.get(1, 0.0), 1),
        stalled_s=kind.stalled_s,
        nbytes=round(kind.nbytes),
        duration_s=costs.seconds("part"),
        price_s=kind.stalled_s * offer.load + lost(situation, best - speed),
        basis=_weaker(kind.basis, basis),
    )


def stay(situation: LeverSituation, offers: Sequence[PartOffer]) -> LeverOption:
    """Return the option to leave a group as it is."""
    first = offers[0]
    together, basis = situation.costs.speed(first.tp_before)
    best = _speed_of_parts(situation, replace(first, tp=1))
    price_s = lost(situation, best - together)
    return LeverOption(lever="queue", targets=list(first.instances), price_s=price_s, basis=basis)


def _speed_of_parts(situation: LeverSituation, offer: PartOffer) -> float:
    return situation.costs.speed(offer.tp)[0] * offer.tp_before / offer.tp


def lost(situation: LeverSituation, speed: float) -> float:
    """Return the price of so much throughput less, in that of one worker, for as long as groups are kept."""
    return situation.load * max(0.0, speed) / max(situation.speed, _LEAST) * situation.costs.hold_s


def _price_of_loss(loss: float, load: float, objectives: Objectives) -> float:
    return loss / max(objectives.loss_budget, _LEAST) * objectives.ttft_slo_s * load if loss > 0 else 0.0


def _weaker(one: CostBasis, other: CostBasis) -> CostBasis:
    return "assumed" if "assumed" in (one, other) else one
