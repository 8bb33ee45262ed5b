"""The planner's answer to requests that wait for KV blocks. Pure.

The reflex of a worker resizes and swaps by itself. The planner moves queued requests where others have room,
and tells the reflex for how many blocks it need take no loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bus.levers import LeverPlan
from bus.messages import Number
from bus.policy import Policy
from controller.morphing.copies import Copies
from controller.morphing.decision import costs_of, weighed
from controller.morphing.groups import Group
from controller.morphing.track import Freshness
from controller.morphing.weighing import weigh_pressure
from controller.planning.lever_costs import LeverCosts

MOVE_AGAIN_S: Final = 1.0  # until metrics show what a move did


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveDecision:
    """Queued requests that gateways take back from an instance, each its share.

    Of the tokens of prompts that queue there (`queued_tokens`), `tokens` go.
    """

    instance: str
    epoch: int
    reason: str
    numbers: Mapping[str, Number]
    plan: LeverPlan  # what was weighed


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureState:
    """The plans of now, the last moves and the blocks that those of now bring, by instance."""

    plans: Mapping[str, LeverPlan] = field(default_factory=dict)
    moved_s: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)


def relieve_pressure(
    state: PressureState,
    groups: Iterable[Group],
    policy: Policy,
    at_s: float,
    freshness: Freshness,
    costs: LeverCosts,
    copies: Mapping[str, Copies] | None = None,
) -> tuple[PressureState, list[MoveDecision], list[LeverPlan]]:
    """Judge metrics. Returns also the moves to order, and the plans that take other levers than before."""
    rules = policy.in_force()
    if rules is None:
        return PressureState(), [], []
    by_model: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        if group.age_s <= freshness.stale_s:
            by_model[group.model].append(group)
    by_name = {group.instance: group for there in by_model.values() for group in there}
    plans = [
        plan
        for model, there in by_model.items()
        for plan in weigh_pressure(there, rules, costs, (copies or {}).get(model))
    ]
    moved_s = {name: when for name, when in state.moved_s.items() if at_s < when + MOVE_AGAIN_S}
    moves, moved = [], dict[str, int]()
    for plan in plans:
        name, levers = plan.subject, _levers(plan)
        if "move" in levers and name not in moved_s:
            moved_s[name] = at_s
            moved[name] = sum(one.blocks for one in plan.taken if one.lever == "move")
            moves.append(_move(plan, by_name[name]))
    before = {name: _levers(plan) for name, plan in state.plans.items()}
    news = [plan for plan in plans if before.get(plan.subject) != _levers(plan)]
    return (
        PressureState(plans={plan.subject: plan for plan in plans}, moved_s=moved_s, moved=moved),
        moves,
        news,
    )


def _levers(plan: LeverPlan) -> tuple[str, ...]:
    return tuple(one.lever for one in plan.taken)


def _move(plan: LeverPlan, group: Group) -> MoveDecision:
    moved = [one for one in plan.taken if one.lever == "move"]
    tokens, epoch = sum(one.blocks for one in moved) * group.block_tokens, group.epochs[0]
    to = ", ".join(one.targets[1] for one in moved)
    numbers: dict[str, Number] = {"epoch": epoch, "tokens": tokens, "queued_tokens": group.queued_tokens}
    numbers |= costs_of(plan)
    reason = f"{plan.need}: prompts of {tokens} tokens go to {to}; {weighed(plan)}"
    return MoveDecision(
        instance=plan.subject, epoch=epoch, reason=reason, numbers=numbers, plan=plan.in_brief()
    )
