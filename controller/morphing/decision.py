"""A morph that the planner decided: a change of the degree of tensor parallelism, or a swap for one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from bus.groups import parted
from bus.levers import WEIGHED, LeverOption, LeverPlan
from bus.messages import Number
from bus.morphs import STANDS_S, Cause, ConvertCache, HalfOrder, Swap, Transform
from bus.policy import Policy
from bus.precisions import KVPrecision, Precision
from bus.shapes import CommonShape
from controller.morphing.groups import Group
from controller.morphing.parallelism import Merge
from controller.morphing.track import Lever, Waiting

WAIT_S = 1.0  # wait for pages before `deferred`: a running step may free some


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphDecision:
    """One morph, its reason and the numbers behind it. `worker` leads `instance`.

    A swap has `halves`, or `count` layers that go to `precision`. kv_dtype: what the KV cache goes to.
    """

    instance: str
    worker: str
    epoch: int
    lever: Lever
    reason: str
    cause: Cause  # the reason in a word
    numbers: dict[str, Number]
    tp: int
    epochs: dict[str, int]  # epochs by worker, in shard order at the higher degree
    instances: tuple[str, ...]  # all that it changes
    halves: tuple[HalfOrder, ...] = ()
    count: int = 0
    precision: Precision = "full"
    kv_dtype: KVPrecision | None = None
    predicted_s: float = 0.0  # until it is applied
    plan: LeverPlan | None = None  # what was weighed

    def command(self, morph_id: str) -> Transform | Swap | ConvertCache:
        """Return the command for the worker."""
        if self.kv_dtype:
            return ConvertCache(
                id=morph_id,
                epoch=self.epoch,
                instance=self.instance,
                kv_dtype=self.kv_dtype,
                wait_s=WAIT_S,
                stands_s=STANDS_S,
            )
        if self.halves or self.count:
            return Swap(
                id=morph_id,
                epoch=self.epoch,
                instance=self.instance,
                halves=list(self.halves),
                count=self.count,
                precision=self.precision,
                wait_s=WAIT_S,
                stands_s=STANDS_S,
                urgency=1.0,  # nothing else serves what waits for it
            )
        return Transform(
            id=morph_id,
            epoch=self.epoch,
            instance=self.instance,
            workers=list(self.epochs),
            epochs=self.epochs,
            tp=self.tp,
            wait_s=WAIT_S,
        )


def merging(merge: Merge, waiting: Waiting, plan: LeverPlan, policy: Policy, at_s: float) -> MorphDecision:
    """Return the decision to make one group."""
    epochs = dict(chain(*(zip(one.workers, one.epochs, strict=True) for one in merge.groups)))
    first = merge.groups[0]
    names = tuple(name for group in merge.groups for name in group.instances)
    of_all = f" (the longest of {waiting.count})" if waiting.count > 1 else ""
    reason = (
        f"a request of {waiting.tokens} tokens waits{of_all} and no instance has room for it: "
        f"{', '.join(merge.workers)} at degree {first.tp} become one of degree {merge.tp}, "
        f"which holds {merge.tokens_after}; {weighed(plan)}"
    )
    numbers: dict[str, Number] = {
        "waiting_tokens": waiting.tokens,
        "waiting": waiting.count,
        "waited_s": round(at_s - waiting.since_s, 3),
        "tp_before": first.tp,
        "tp_after": merge.tp,
        "tokens_after": merge.tokens_after,
        "used_tokens": merge.used_tokens,
        "load": round(sum(group.load for group in merge.groups), 2),
        "windows": waiting.times,
        "policy_revision": policy.revision,
        **costs_of(plan),
    }
    return replace(
        _decision(first, "scale_up", reason, numbers, plan),
        instances=names,
        epochs={name: epochs[name] for name in merge.workers},
        tp=merge.tp,
        predicted_s=next(one.duration_s for one in plan.taken if {*one.targets} == {*names}),
    )


def parting(
    group: Group, plan: LeverPlan, windows: int, policy: Policy, waiting: Waiting | None = None
) -> MorphDecision:
    """Return the decision to part a group, since no long request is left or another needs a larger one."""
    option = next(one for one in plan.taken if one.lever == "part" and one.targets == [*group.instances])
    tp = option.tp
    parts = "; ".join(", ".join(part) for part in parted(group.workers, tp))
    why = (
        f"a request of {waiting.tokens} tokens waits, which needs a larger group than this one of "
        f"{group.max_tokens},"
        if waiting
        else "no long request is left"
    )
    reason = (
        f"{why} and {1 - group.usage:.2f} of the KV is free, {policy.scale_down_free:g} "
        f"suffices: degree {group.tp} parts into degree {tp} ({parts}); {weighed(plan)}"
    )
    numbers: dict[str, Number] = {
        "longest_tokens": group.longest_tokens,
        "used_tokens": group.used_tokens,
        "kv_usage": round(group.usage, 4),
        "tp_before": group.tp,
        "tp_after": tp,
        "tokens_after": group.tokens_at[tp],
        "load": round(group.load, 2),
        "windows": windows,
        "policy_revision": policy.revision,
        **costs_of(plan),
    }
    decision = _decision(group, "scale_down", reason, numbers, plan)
    if waiting:
        return replace(decision, tp=tp)
    return replace(decision, cause="no_long_request", tp=tp, predicted_s=option.duration_s)


def levelling(merge: Merge, common: CommonShape, plan: LeverPlan) -> list[MorphDecision]:
    """Return the swaps after which the members of a merge have equal layers."""
    reason = (
        f"{', '.join(merge.workers)} get equal layers ({common.words}, {common.loss:.2%} more loss), then "
        f"become one of degree {merge.tp}; {weighed(plan)}"
    )
    numbers: dict[str, Number] = costs_of(plan) | {"loss": round(common.loss, 6)}
    return [
        replace(_decision(group, "level", reason, numbers, plan), halves=halves)
        for group, halves in zip(merge.groups, common.orders, strict=True)
        if halves
    ]


def levelling_kv(merge: Merge, precision: KVPrecision, plan: LeverPlan) -> list[MorphDecision]:
    """Return the conversions after which the KV caches of a merge's members are alike."""
    reason = (
        f"the KV caches of {', '.join(merge.workers)} are alike in {precision} before these become one of "
        f"degree {merge.tp}; {weighed(plan)}"
    )
    return [
        replace(_decision(group, "level", reason, costs_of(plan), plan), kv_dtype=precision)
        for group in merge.groups
        if group.kv_precision != precision
    ]


def swapping(group: Group, option: LeverOption, plan: LeverPlan, waiting: Waiting) -> MorphDecision:
    """Return the swap after which one instance holds a long request."""
    reason = (
        f"a request of {waiting.tokens} tokens waits and no instance has room for it: {group.instance} gets "
        f"about {option.blocks} KV blocks more ({option.words}); {weighed(plan)}"
    )
    numbers: dict[str, Number] = {"waiting_tokens": waiting.tokens, "loss": option.loss, **costs_of(plan)}
    return replace(
        _decision(group, "swap", reason, numbers, plan),
        count=option.layers,
        precision=option.precision,
        predicted_s=option.duration_s,
    )


def _decision(
    group: Group, lever: Lever, reason: str, numbers: dict[str, Number], plan: LeverPlan
) -> MorphDecision:
    """Return a decision that changes one group, for a long request."""
    return MorphDecision(
        instance=group.instance,
        worker=group.leader,
        epoch=group.epochs[0],
        lever=lever,
        reason=reason,
        cause="long_request",
        numbers=numbers,
        tp=group.tp,
        epochs=dict(zip(group.workers, group.epochs, strict=True)),
        instances=group.instances,
        plan=plan.in_brief(),
    )


def weighed(plan: LeverPlan) -> str:
    """Return what was weighed, for people."""
    return f"{WEIGHED}: {plan.reason}"


def costs_of(plan: LeverPlan) -> dict[str, Number]:
    """Return the cost of each lever that was possible, the cheapest of its kind, for programs."""
    found: dict[str, Number] = {}
    for one in plan.options:
        if not one.refusal:
            name = f"{one.lever}_cost_s"
            found[name] = min(found.get(name, one.cost_s), one.cost_s)
    return found
