"""The planner's answer to a question: what it would do now, also under load that is not there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bus.deployments import WeighLevers
from bus.levers import LeverPlan
from bus.policy import Policy
from controller.morphing.copies import Copies
from controller.morphing.groups import Group
from controller.morphing.parallelism import degrees_below
from controller.morphing.track import Waiting
from controller.morphing.weighing import weigh_long, weigh_part, weigh_pressure
from controller.planning.lever_costs import LeverCosts


def what_if(
    order: WeighLevers,
    groups: Iterable[Group],
    waiting: dict[str, Waiting],
    policy: Policy,
    costs: LeverCosts,
    at_s: float,
    copies: Mapping[str, Copies] | None = None,
) -> list[LeverPlan]:
    """Return the plans for what waits and for the requests that the order adds. Nothing is remembered.

    In mode manual the plans are those of mode default.
    """
    rules = policy.in_force() or replace(policy, mode="default").in_force() or policy
    there, plans = list(groups), list[LeverPlan]()
    for model in sorted({group.model for group in there if order.model in ("", group.model)}):
        of_model = [group for group in there if group.model == model]
        long = waiting.get(model)
        if order.requests and _is_long(order, of_model):
            long = _with_long(order, long, at_s)
        elif order.requests:
            of_model = _spread(order, [_at_full_speed(group, costs) for group in of_model])
        if long:
            free, waited_s = of_model, at_s - long.since_s
            plans.append(weigh_long(of_model, free, free, free, long, rules, waited_s, costs)[0])
        plans += weigh_pressure(of_model, rules, costs, (copies or {}).get(model))
        for group in of_model if long is None else []:
            if lower := degrees_below(group, policy.scale_down_free):
                plans.append(weigh_part(of_model, group, lower, rules, costs))
    return plans


def _is_long(order: WeighLevers, groups: Sequence[Group]) -> bool:
    return all(order.tokens > group.max_tokens for group in groups)


def _with_long(order: WeighLevers, long: Waiting | None, at_s: float) -> Waiting:
    if long is None:
        return Waiting(order.tokens, order.requests, 1, at_s, at_s)
    return replace(long, tokens=max(long.tokens, order.tokens), count=long.count + order.requests)


def _spread(order: WeighLevers, groups: Sequence[Group]) -> list[Group]:
    """Give each request to the instance that holds it and has most room; it runs there if there is room."""
    there = {group.instance: group for group in groups}
    kv_tokens = math.ceil(order.prompt_tokens + order.output_tokens / 2)  # as long as it is on average
    for _ in range(order.requests):
        group = max(
            (one for one in there.values() if order.tokens <= one.max_tokens),
            key=lambda one: (one.free_tokens - one.queued_tokens, one.instance),
        )
        if group.waiting < 1 and kv_tokens <= group.free_tokens:
            after = replace(group, used_tokens=group.used_tokens + kv_tokens, running=group.running + 1)
        else:
            queued = group.queued_tokens + kv_tokens
            after = replace(group, queued_tokens=queued, waiting=group.waiting + 1)
        there[group.instance] = replace(after, load=group.load + 1)
    return list(there.values())


def _at_full_speed(group: Group, costs: LeverCosts) -> Group:
    """Return an instance in which nothing waits, at the speed that it has when something does."""
    speed, basis = costs.tokens_per_s(group.tp)
    if group.waiting >= 1 or speed <= group.tokens_per_s:
        return group
    return replace(group, tokens_per_s=speed, speed_basis=basis)
