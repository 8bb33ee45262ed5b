"""A translation of groups of workers into what the planner weighs, and of its plans into merges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bus.levers import NEVER_S, LeverPlan
from bus.messages import LayerShape
from bus.morphs import HalfOrder
from bus.policy import Policy
from bus.precisions import PRECISIONS, KVPrecision, Precision, is_below
from bus.shapes import LOSS_ROUNDING, CommonShape, common_shape, loss_of, loss_of_kv, whole_loss
from controller.morphing.copies import Copies
from controller.morphing.groups import Group
from controller.morphing.parallelism import Merge, degrees_below, merges_for, parts_of
from controller.morphing.track import Waiting
from controller.planning.lever_costs import LeverCosts, observe_speed
from controller.planning.levers import weigh
from controller.planning.situation import (
    LeverSituation,
    LongNeed,
    MergeOffer,
    Objectives,
    PartOffer,
    ServingInstance,
    SwapRung,
)

NO_COSTS: Final = LeverCosts()


@dataclass(frozen=True, slots=True)
class WeighedMerge:
    """A merge and the layers that its members get first; None: they are alike. Text: why there are none.

    parting: the group that parts before, since it is too small and of another degree. kv: what the KV caches
    of all members get first; None: they are alike.
    """

    merge: Merge
    common: CommonShape | str | None
    parting: Group | None = None
    kv: KVPrecision | None = None


def weigh_long(
    groups: Sequence[Group],
    free: Sequence[Group],
    partable: Sequence[Group],
    swappable: Sequence[Group],
    waiting: Waiting,
    policy: Policy,
    waited_s: float,
    costs: LeverCosts = NO_COSTS,
) -> tuple[LeverPlan, list[WeighedMerge]]:
    """Weigh what to do about long requests.

    free: the groups that may become one now. partable: those of them that may part first. swappable: those
    of them whose layers may lose bits.
    policy: with its mode applied. After `long_patience_s` no group is expected to make room any more.
    """
    is_overdue = waited_s >= policy.long_patience_s
    offers = [
        _weighed(merge, policy) for merge in merges_for(free, waiting.tokens, policy.max_tp)
    ] or _after_parting(free, partable, waiting.tokens, policy)
    names = {group.instance for group in swappable}
    situation = LeverSituation(
        model=groups[0].model if groups else "",
        instances=[
            one if one.name in names else replace(one, rungs=())
            for one in (serving(group, policy) for group in groups)
        ],
        long=LongNeed(
            tokens=waiting.tokens,
            count=waiting.count,
            waited_s=waited_s,
            queue_s=min(
                (_until_room(group, waiting.tokens) for group in groups if not is_overdue), default=NEVER_S
            ),
        ),
        merges=[_offer(one, waiting.tokens) for one in offers],
        objectives=objectives(policy),
        costs=costs,
    )
    return weigh(situation)[0], offers


def taken_merges(plan: LeverPlan, offers: Iterable[WeighedMerge]) -> list[WeighedMerge]:
    """Return the merges that a plan takes, also those for which a group parts first."""
    taken = [one.targets for one in plan.taken if one.lever in ("merge", "part")]
    return [one for one in offers if _targets(one) in taken]


def _after_parting(
    free: Sequence[Group], partable: Sequence[Group], num_tokens: int, policy: Policy
) -> list[WeighedMerge]:
    """Return a merge for each group that is too small, with those that it would part into."""
    found = []
    for group in partable:
        if group.max_tokens >= num_tokens or not (lower := degrees_below(group, policy.scale_down_free)):
            continue
        parts = parts_of(group, lower[0])
        merges = merges_for([*(one for one in free if one is not group), *parts], num_tokens, policy.max_tp)
        with_parts = (one for one in merges if {*_names(one)} & {*group.instances})
        found += [_weighed(one, policy, group) for one in [*with_parts][:1]]
    return found


def _targets(one: WeighedMerge) -> list[str]:
    return list(one.parting.instances) if one.parting else _names(one.merge)


def weigh_part(
    groups: Sequence[Group],
    group: Group,
    degrees: Iterable[int],
    policy: Policy,
    costs: LeverCosts = NO_COSTS,
) -> LeverPlan:
    """Weigh whether a group parts, and how far."""
    parts = [
        PartOffer(instances=group.instances, tp_before=group.tp, tp=tp, load=group.load) for tp in degrees
    ]
    calm = [replace(serving(one, policy), waiting=0.0, running=one.load) for one in groups]
    situation = LeverSituation(
        model=group.model, instances=calm, parts=parts, objectives=objectives(policy), costs=costs
    )
    return weigh(situation)[-1]


def weigh_pressure(
    groups: Sequence[Group], policy: Policy, costs: LeverCosts = NO_COSTS, copies: Copies | None = None
) -> list[LeverPlan]:
    """Weigh what to do for instances of one model in which requests wait for KV blocks."""
    if not groups:
        return []
    situation = LeverSituation(
        model=groups[0].model,
        instances=[serving(group, policy) for group in groups],
        spares=copies.spares if copies else (),
        no_spare=copies.refusal if copies else "",
        objectives=objectives(policy),
        costs=costs,
    )
    return weigh(situation)


def learn_speeds(costs: LeverCosts, groups: Iterable[Group]) -> LeverCosts:
    """Take note of the throughput of the instances in which requests wait."""
    for group in groups:
        if group.waiting >= 1:
            costs = observe_speed(costs, group.tp, group.tokens_per_s)
    return costs


def objectives(policy: Policy) -> Objectives:
    return Objectives(
        ttft_slo_s=policy.ttft_slo_s, loss_budget=policy.most_loss, kv_usage_high=policy.kv_usage_high
    )


def serving(group: Group, policy: Policy) -> ServingInstance:
    """Return an instance as the planner sees it. policy: with its mode applied."""
    tokens = group.block_tokens
    lost = max(0.0, _lost_by_layers(group, group.layers)) + _lost_by_kv(group, group.kv_precision)
    blocks = (group.kv_tokens or group.max_tokens) // tokens
    return ServingInstance(
        name=group.instance,
        tp=group.tp,
        block_tokens=tokens,
        blocks=blocks,
        used=-(-group.used_tokens // tokens),
        needed=-(-(group.used_tokens + group.queued_tokens) // tokens),
        running=group.running or max(0.0, group.load - group.waiting),
        waiting=group.waiting,
        oldest_wait_s=group.oldest_wait_s,
        tokens_per_s=group.tokens_per_s,
        speed_basis=group.speed_basis,
        spare_blocks=group.spare_tokens // tokens,
        rungs=_rungs(group, policy.precision),
        kv_blocks=int((group.kv_gain - 1) * blocks) if _may_convert(group) else 0,
        kv_loss=group.kv_loss or 0.0,
        loss_left=max(0.0, _budget(group, policy) - lost),
        max_model_len=group.max_model_len,
        is_movable=group.tp == 1,
        weight_bytes=group.weight_bytes,
    )


def _may_convert(group: Group) -> bool:
    """Return True if its KV cache may go to 8 bits, as far as the budget allows it."""
    is_allowed = group.kv_loss is not None and not is_below("int8", group.rest.coarsest)
    return is_allowed and group.kv_precision == "full"


def _budget(group: Group, policy: Policy) -> float:
    """Return the most that it may lose beyond its shape at rest."""
    left = group.rest.loss_left
    return policy.most_loss if left is None else min(policy.most_loss, left)


def _lost_by_layers(group: Group, layers: Sequence[LayerShape]) -> float:
    """Return its loss with these layers, beyond that at rest; below 0 with more bits."""
    return loss_of(layers, group.losses) - loss_of(_at_rest(group), group.losses)


def _lost_by_kv(group: Group, precision: KVPrecision) -> float:
    """Return its loss with the KV cache in a precision, beyond that at rest."""
    return loss_of_kv(precision, group.kv_rest, group.kv_loss)


def _weighed(merge: Merge, policy: Policy, parting: Group | None = None) -> WeighedMerge:
    """Return a merge and what its members get first, so that all are alike."""
    common, kv = levelled(merge, min(_budget(group, policy) for group in merge.groups))
    return WeighedMerge(merge, common, parting, kv)


def levelled(merge: Merge, budget: float) -> tuple[CommonShape | str | None, KVPrecision | None]:
    """Return the layers and the precision of KV that a merge's members get first; None: they are alike.

    Text instead of layers: why there are none. What layers and KV lose together is within the budget. The KV
    goes to 8 bits if that leaves it so, since a long request needs room.
    """
    full = [group for group in merge.groups if group.kv_precision == "full"]
    others = [group for group in merge.groups if group.kv_precision != "full"]
    if not full or not others:
        return levelled_layers(merge, budget, "int8" if others else "full"), None
    if all(map(_may_convert, full)):
        common = levelled_layers(merge, budget, "int8")
        if not isinstance(common, str) and _lost_with(merge, common, "int8") <= budget + LOSS_ROUNDING:
            return common, "int8"
    if all(group.used_tokens * group.kv_gain <= (group.kv_tokens or group.max_tokens) for group in others):
        return levelled_layers(merge, budget, "full"), "full"
    names = ", ".join(group.instance for group in others)
    return f"KV is in int8 at {names}, which holds too much for full precision, and not at the others", None


def _lost_with(merge: Merge, common: CommonShape | None, kv: KVPrecision) -> float:
    """Return the most that a member then loses. common: the layers of all; None: those that each has."""
    return max(
        _lost_by_layers(group, common.layers if common else group.layers) + _lost_by_kv(group, kv)
        for group in merge.groups
    )


def _at_rest(group: Group) -> list[LayerShape]:
    return [LayerShape(attention=group.rest.precision, ffn=group.rest.precision)]


def levelled_layers(merge: Merge, budget: float, kv: KVPrecision) -> CommonShape | str | None:
    """Return the layers that the members of a merge get first; None if they are alike.

    kv: what the KV caches of all will be in. The layers may lose what that leaves of the budget.
    """
    if len({group.layers for group in merge.groups}) == 1:
        return None
    members, first = merge.groups, merge.groups[0]
    if len({len(group.layers) for group in members}) > 1:
        return "their numbers of layers differ"
    return common_shape(
        [group.layers for group in members],
        first.losses,
        max(0.0, budget - max(_lost_by_kv(group, kv) for group in members)),
        resting=first.rest.precision,
        may_rise=lambda member, orders: _has_room_for(members[member], orders),
    )


def _has_room_for(group: Group, orders: Sequence[HalfOrder]) -> bool:
    """Return True if the KV can give the blocks that halves with more bits take, as far as this is known."""
    blocks = 0.0
    for one in orders:
        before = group.layers[one.layer].of(one.part)
        blocks += (_saved(group, before) - _saved(group, one.precision)) / 2
    return blocks * group.block_tokens <= group.free_tokens


def _saved(group: Group, precision: Precision) -> float:
    return group.layer_blocks.get(precision, 0.0)


def _rungs(group: Group, wished: Precision) -> list[SwapRung]:
    """Return the precisions that layers may go to: down to the wished and the coarsest one."""
    rest, num_layers = group.rest, len(group.layers)
    lowest = min(PRECISIONS.index(wished), PRECISIONS.index(rest.coarsest))
    found = []
    for precision in PRECISIONS[PRECISIONS.index(rest.precision) + 1 : lowest + 1]:
        above = [one for layer in group.layers for one in (layer.attention, layer.ffn)]
        halves = sum(is_below(precision, one) for one in above)
        whole = sum(
            is_below(precision, one.attention) and is_below(precision, one.ffn) for one in group.layers
        )
        blocks = _saved(group, precision) - _saved(group, rest.precision)
        if not whole or blocks <= 0:
            continue
        loss = whole_loss(precision, group.losses) - whole_loss(rest.precision, group.losses)
        found.append(
            SwapRung(
                precision=precision,
                layers=halves - whole,
                begun=halves - 2 * whole,
                blocks=blocks,
                loss=max(0.0, loss) / num_layers,
                nbytes=group.layer_bytes.get(precision, 0),
            )
        )
    return found


def _offer(one: WeighedMerge, num_tokens: int) -> MergeOffer:
    merge, common = one.merge, one.common
    tokens = merge.groups[0].block_tokens
    kv_tokens = sum(group.kv_tokens or group.max_tokens for group in merge.groups)
    change = common if isinstance(common, CommonShape) else None
    missing, speed = merge.missing(num_tokens), sum(group.tokens_per_s for group in merge.groups)
    refusal = common if isinstance(common, str) else ""
    if missing and not speed:
        refusal = f"its members hold {merge.used_tokens} tokens, of {merge.kv_tokens_after} that it would"
    return MergeOffer(
        instances=tuple(_names(merge)),
        tp_before=merge.groups[0].tp,
        tp=merge.tp,
        load=sum(group.load for group in merge.groups),
        blocks=(min(group.kv_at(merge.tp) for group in merge.groups) - kv_tokens) // tokens,
        are_neighbours=merge.are_neighbours,
        holds=max(1, (merge.kv_tokens_after - merge.used_tokens) // num_tokens),
        room_s=missing / speed if missing and speed else 0.0,
        parted=one.parting.instances if one.parting else (),
        halves=max(map(len, change.orders)) if change else 0,
        loss=(change.loss if change else 0.0) + (_added_by_kv(merge, one.kv) if one.kv else 0.0),
        is_kv_converted=one.kv is not None,
        refusal=refusal,
    )


def _added_by_kv(merge: Merge, precision: KVPrecision) -> float:
    """Return the most that the conversion adds to a member's loss."""
    return max(_lost_by_kv(one, precision) - _lost_by_kv(one, one.kv_precision) for one in merge.groups)


def _names(merge: Merge) -> list[str]:
    return [group.instance for group in merge.groups]


def _until_room(group: Group, num_tokens: int) -> float:
    """Return how long until `group` has room for a sequence; NEVER_S if it never holds one so long."""
    if num_tokens > group.max_tokens:
        return NEVER_S
    missing = num_tokens - group.free_tokens
    if missing <= 0:
        return 0.0
    return min(NEVER_S, missing / group.tokens_per_s) if group.tokens_per_s > 0 else NEVER_S
