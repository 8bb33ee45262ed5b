"""More and fewer instances of a model: copies of its deployment, for as long as they are needed. Pure.

A copy is made on a worker on which nothing runs, if the planner takes that for several windows. It is retired
when the others have had room for all requests for a while, and at once when something else waits for a place.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bus.deployments import DeployModel, Intent, RetireModel
from bus.levers import LeverPlan
from bus.messages import Number
from bus.policy import Policy
from controller.morphing.decision import costs_of, weighed
from controller.morphing.groups import Group
from controller.morphing.track import Freshness
from controller.planning.lever_costs import LeverCosts

AGAIN_S: Final = 5.0  # until an order shows in the records
HOLD_TIMES: Final = 10  # a copy is kept for so many times as long as it took to load, after its last use


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A deployment that can be copied, the workers free for that, and its copies.

    made: by instance the deployment of each copy that serves. unwanted: copies that must go at once, with the
    reason. refusal: why none can be made.
    """

    original: str = ""
    intent: Intent = field(default_factory=Intent)
    spares: tuple[str, ...] = ()
    made: Mapping[str, str] = field(default_factory=dict)
    unwanted: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyState:
    """How many windows in a row took a copy, by model, and since when each copy is not needed.

    ordered_s: the last order for a copy of each model, and to retire each copy.
    """

    wanted: Mapping[str, int] = field(default_factory=dict)
    unneeded_s: Mapping[str, float] = field(default_factory=dict)
    ordered_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDecision:
    """An order to deploy a copy or to retire one."""

    order: DeployModel | RetireModel
    subject: str
    reason: str
    numbers: Mapping[str, Number]
    plan: LeverPlan | None = None  # what was weighed


def adjust(
    state: CopyState,
    plans: Iterable[LeverPlan],
    groups: Sequence[Group],
    copies: Mapping[str, Copies],
    policy: Policy,
    at_s: float,
    freshness: Freshness,
    costs: LeverCosts,
) -> tuple[CopyState, list[CopyDecision]]:
    """Judge one window. plans: what is taken for all instances under pressure.

    No copy of a model counts as not needed while a report of one of its instances is stale.
    """
    rules = policy.in_force()
    if rules is None:
        return CopyState(), []
    pause_s = max(rules.cooldown_s, AGAIN_S)
    ordered_s = {name: when for name, when in state.ordered_s.items() if at_s < when + pause_s}
    made, wanted = list[CopyDecision](), dict[str, int]()
    for plan in plans:
        taken = [one for one in plan.taken if one.lever == "more"]
        there = copies.get(plan.model)
        if not taken or there is None or plan.model in ordered_s:
            continue
        wanted[plan.model] = state.wanted.get(plan.model, 0) + 1
        if wanted[plan.model] >= rules.windows:
            ordered_s[plan.model] = at_s
            made.append(_more(plan, there, taken[0].targets[0]))
    unneeded_s = dict[str, float]()
    for model, there in copies.items():
        going = dict(there.unwanted)
        leaving = {one for one, name in there.made.items() if name in going or name in ordered_s}
        of_model = [one for one in groups if one.model == model and one.instance not in leaving]
        loading_s = costs.load_s(max((one.weight_bytes for one in of_model), default=0))
        hold_s = max(rules.cooldown_s, HOLD_TIMES * loading_s)
        is_known = all(one.age_s <= freshness.stale_s for one in groups if one.model == model)
        used = sum(one.used_tokens + one.queued_tokens for one in groups if one.model == model)
        idle_s = {
            instance: state.unneeded_s.get(instance, at_s)
            for instance in there.made
            if is_known and instance not in leaving and _is_unneeded(instance, of_model, used, rules)
        }
        if idle_s and at_s >= (since_s := min(idle_s.values())) + hold_s:
            first = min(idle_s, key=idle_s.__getitem__)
            why = f"the other instances have had room for all requests for {at_s - since_s:.0f} s"
            going[there.made[first]] = why
            idle_s = {}  # one at a time: the others had its room beside them
        unneeded_s |= idle_s
        made += [_fewer(name, why) for name, why in going.items() if name not in ordered_s]
        ordered_s |= {name: at_s for name in going if name not in ordered_s}
    return CopyState(wanted=wanted, unneeded_s=unneeded_s, ordered_s=ordered_s), made


def _more(plan: LeverPlan, there: Copies, worker: str) -> CopyDecision:
    order = DeployModel(id=uuid.uuid4().hex[:12], name=plan.model, intent=there.intent, copies=there.original)
    reason = f"{plan.need}: {there.original} is deployed once more, as {order.id}; {worker} is free"
    return CopyDecision(
        order=order,
        subject=plan.subject,
        reason=f"{reason}; {weighed(plan)}",
        numbers=costs_of(plan),
        plan=plan.in_brief(),
    )


def _fewer(deployment: str, why: str) -> CopyDecision:
    order = RetireModel(id=uuid.uuid4().hex[:12], deployment=deployment)
    return CopyDecision(order=order, subject=deployment, reason=f"{why}: {deployment} retires", numbers={})


def _is_unneeded(instance: str, staying: Sequence[Group], used_tokens: int, rules: Policy) -> bool:
    """Return True if nothing waits, and the others that stay have room for all that runs."""
    others = [group for group in staying if group.instance != instance]
    room = rules.kv_usage_low * sum(group.kv_tokens or group.max_tokens for group in others)
    is_seen = len(others) < len(staying)
    return is_seen and used_tokens <= room and all(group.waiting < 1 for group in staying)
