"""The planner's answer to requests that wait for KV blocks. Pure.

The reflex of a worker resizes and swaps by itself. The planner moves queued requests where others have room,
and withholds loss from instances whose plan takes none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from bus.levers import LeverPlan
from bus.messages import Number
from bus.policy import Policy
from controller.morphing.decision import costs_of, weighed
from controller.morphing.groups import Group
from controller.morphing.track import Freshness
from controller.morphing.weighing import weigh_pressure
from controller.planning.lever_costs import MOVE_S, LeverCosts

MOVE_AGAIN_S: Final = 1.0  # until metrics show what a move did

Levers = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveDecision:
    """Queued requests that gateways take back from an instance, each its share.

    Of the tokens of prompts that queue there (`queued_tokens`), `tokens` go.
    """

    instance: str
    epoch: int
    reason: str
    numbers: Mapping[str, Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureState:
    """The levers taken now and the last moves, by instance. The `withheld` take no loss now."""

    taken: Mapping[str, Levers] = field(default_factory=dict)
    moved_s: Mapping[str, float] = field(default_factory=dict)
    withheld: frozenset[str] = frozenset()


def relieve_pressure(
    state: PressureState,
    groups: Iterable[Group],
    policy: Policy,
    at_s: float,
    freshness: Freshness,
    costs: LeverCosts,
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
    plans = [plan for there in by_model.values() for plan in weigh_pressure(there, rules, costs)]
    moved_s = {name: when for name, when in state.moved_s.items() if at_s < when + MOVE_AGAIN_S}
    moves, taken, withheld = [], dict[str, Levers](), set[str]()
    for plan in plans:
        name, levers = plan.subject, tuple(one.lever for one in plan.taken)
        taken[name] = levers
        if "swap" not in levers and "move" in levers and plan.wait_s <= MOVE_S:  # nothing is left to wait
            withheld.add(name)
        if "move" in levers and name not in moved_s:
            moved_s[name] = at_s
            moves.append(_move(plan, by_name[name]))
    news = [plan for plan in plans if state.taken.get(plan.subject) != taken[plan.subject]]
    return PressureState(taken=taken, moved_s=moved_s, withheld=frozenset(withheld)), moves, news


def _move(plan: LeverPlan, group: Group) -> MoveDecision:
    moved = [one for one in plan.taken if one.lever == "move"]
    tokens, epoch = sum(one.blocks for one in moved) * group.block_tokens, group.epochs[0]
    to = ", ".join(one.targets[1] for one in moved)
    numbers: dict[str, Number] = {"epoch": epoch, "tokens": tokens, "queued_tokens": group.queued_tokens}
    numbers |= costs_of(plan)
    reason = f"{plan.need}: prompts of {tokens} tokens go to {to}; {weighed(plan)}"
    return MoveDecision(instance=plan.subject, epoch=epoch, reason=reason, numbers=numbers)
