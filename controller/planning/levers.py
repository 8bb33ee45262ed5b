"""The one planner: which levers meet the needs of a model, weighed against each other by their price. Pure.

The cheapest set that meets the objective is taken; if none meets it, the cheapest of all. Costs are in the
request-seconds of `controller.planning.options`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from itertools import product
from typing import Final

from bus.levers import NEVER_S, LeverName, LeverOption, LeverPlan
from bus.policy import RELIEF_SHARE, share_for
from controller.planning.options import (
    convert_kv,
    merge,
    more,
    move,
    part,
    resize,
    room,
    stay,
    swap,
    swap_for_long,
)
from controller.planning.situation import LeverSituation, LongNeed, PartOffer, ServingInstance

MARGIN: Final = 0.25  # a lever must gain so much more than its price: predictions err
ROUNDS: Final = 8  # long requests beyond what all options hold so many times over are not weighed
NO_COPIES: Final = "only a deployment can be copied (`instar deploy`)"
HOLDS_NO_MORE: Final = "one instance more holds no longer request"
ONLY_FOR_LONG: Final = "groups are made for long requests only"


def weigh(situation: LeverSituation) -> list[LeverPlan]:
    """Return a plan for each need: long requests, an instance under pressure, a group that could part."""
    plans = [_for_long(situation, situation.long)] if situation.long else []
    free = {one.name: room(one, situation.objectives) for one in situation.instances}
    pressed = [one for one in situation.instances if one.missing]
    for one in sorted(pressed, key=lambda each: (-each.missing, each.name)):
        plan = _for_pressure(situation, one, free)
        for option in plan.taken:
            if option.lever == "move":
                free[option.targets[1]] -= option.blocks
            elif option.lever == "more":
                situation = replace(situation, spares=(), no_spare=f"{one.name} takes {option.targets[0]}")
        plans.append(plan)
    groups = dict.fromkeys(offer.instances for offer in situation.parts)
    plans += [
        _for_part(situation, [one for one in situation.parts if one.instances == each]) for each in groups
    ]
    return plans


# ------------------------------------------------------------------------------------- a long request


@dataclass(frozen=True, slots=True)
class _Server:
    """An option that serves long requests: how many at a time, and how long each runs there.

    members: all instances that it changes. A group that parts first takes others with it.
    """

    option: LeverOption
    holds: int
    runs_s: float
    members: frozenset[str]


@dataclass(frozen=True, slots=True)
class _LongSearch:
    """The search for what serves `count` long requests best. The first server is the queue.

    left_s: how long they may still wait by the objective.
    """

    servers: Sequence[_Server]
    count: int
    left_s: float

    def best(self) -> list[_Server]:
        """Return the best set: the queue, or one server of each degree with others added while that helps.

        This is no search of all sets: with a hundred workers there are too many.
        """
        alone = sorted(([one] for one in self.servers[1:]), key=self.key)
        starts = {one.option.tp: [one] for (one,) in reversed(alone)}  # the best of each degree
        return min([list(self.servers[:1]), *map(self._grown, starts.values())], key=self.key)

    def outcome(self, chosen: Sequence[_Server]) -> tuple[float, float]:
        """Return the longest wait and the cost of what is taken beside the queue."""
        queue = self.servers[0]
        waits = _waits(self.count, [queue, *(one for one in chosen if one is not queue)])
        return max(waits), sum(waits) + sum(one.option.price_s for one in chosen)

    def key(self, chosen: Sequence[_Server]) -> tuple[bool, float, int]:
        """Return the order of sets: that meet the objective, of less cost, of fewer workers."""
        wait_s, cost_s = self.outcome(chosen)
        margin_s = MARGIN * sum(one.option.price_s for one in chosen)
        return wait_s > self.left_s, round(cost_s + margin_s, 6), sum(one.option.tp for one in chosen)

    def _grown(self, chosen: list[_Server]) -> list[_Server]:
        """Return the set with others beside it, as long as that is better."""
        while len(chosen) < self.count and (better := self._with_one_more(chosen)):
            chosen = better
        return chosen

    def _with_one_more(self, chosen: list[_Server]) -> list[_Server] | None:
        """Return the best set with one server more; None if none is better."""
        there = frozenset[str]().union(*(one.members for one in chosen))
        more = ([*chosen, one] for one in self.servers[1:] if not there & one.members)
        best = min(more, key=self.key, default=chosen)
        return best if self.key(best) < self.key(chosen) else None


def _for_long(situation: LeverSituation, long: LongNeed) -> LeverPlan:
    """Weigh the queue, a swap and merges, for several requests also several of them at once."""
    servers, refused = _long_servers(situation, long)
    count = min(long.count, ROUNDS * sum(one.holds for one in servers))
    search = _LongSearch(servers, count, situation.objectives.ttft_slo_s - long.waited_s)
    taken = search.best()
    wait_s, cost_s = search.outcome(taken)
    shown = {id(one): replace(one.option, cost_s=search.outcome([one])[1]) for one in servers}
    best = [shown[id(one)] for one in taken]
    several = f"{long.count} requests of up to {long.tokens} tokens wait"
    return _plan(
        situation.model,
        best[0].targets[0] if best[0].targets else situation.model,
        f"{several if long.count > 1 else f'a request of {long.tokens} tokens waits'} that no instance holds",
        [*shown.values(), *refused, _refused("more", HOLDS_NO_MORE)],
        best,
        cost_s=cost_s,
        wait_s=wait_s,
        meets=not search.key(taken)[0],
    )


def _long_servers(situation: LeverSituation, long: LongNeed) -> tuple[list[_Server], list[LeverOption]]:
    """Return what could serve long requests, the queue first, and what is not possible."""
    queue = LeverOption(lever="queue", targets=[], duration_s=long.queue_s, basis="measured")
    found = [
        (queue, 1, frozenset[str]()),
        *([(one, 1, frozenset(one.targets))] if (one := swap_for_long(situation, long)) else []),
        *(
            (merge(situation, offer), offer.holds, frozenset((*offer.instances, *offer.parted)))
            for offer in situation.merges
        ),
    ]
    highest, speed = max((one.tp for one in situation.instances), default=1), _speed_alone(situation)
    servers = [
        _Server(one, holds, long.tokens / speed / situation.costs.speed(tp)[0], members)
        for one, holds, members in found
        if not one.refusal and (tp := max(one.tp, 1) if one.targets else highest)
    ]
    return servers, [one for one, *_ in found if one.refusal]


def _speed_alone(situation: LeverSituation) -> float:
    """Return the tokens per second of a worker alone: by the costs, or more if one does more now."""
    costs = situation.costs
    seen = (one.tokens_per_s / costs.speed(one.tp)[0] for one in situation.instances)
    return max([costs.tokens_per_s(1)[0], *seen])


def _waits(count: int, servers: Sequence[_Server]) -> list[float]:
    """Return how long each of `count` requests waits if it takes the first place that comes free."""
    places = [(one.option.duration_s, i) for i, one in enumerate(servers) for _ in range(one.holds)]
    heapify(places)
    waits = []
    for _ in range(count):
        free_s, i = places[0]
        heapreplace(places, (free_s + servers[i].runs_s, i))
        waits.append(min(NEVER_S, free_s))
    return waits


# ------------------------------------------------------------------------------------- pressure


def _for_pressure(situation: LeverSituation, one: ServingInstance, free: Mapping[str, int]) -> LeverPlan:
    """Weigh resize, moves, KV in 8 bits, a swap and an instance more for what is missing, and their sets."""
    queue_s = one.queue_s(one.missing)
    queue = LeverOption(lever="queue", targets=[one.name], duration_s=queue_s, basis=one.speed_basis)
    queue = replace(queue, cost_s=one.waiting * queue_s / 2)
    sets = [[queue], *_sets(situation, one, free)]

    def key(chosen: list[LeverOption]) -> tuple[bool, float, int]:
        wait_s, cost_s = _outcome(one, chosen)
        margin_s = MARGIN * sum(option.price_s for option in chosen)
        return one.oldest_wait_s + wait_s > situation.objectives.ttft_slo_s, cost_s + margin_s, len(chosen)

    taken = min(sets, key=key)
    is_late, (_, cost_s) = key(taken)[0], _outcome(one, taken)
    alone = [replace(each[0], cost_s=_outcome(one, each)[1]) for each in sets if len(each) == 1]
    taken = [replace(each, cost_s=_outcome(one, [each])[1]) for each in taken]
    refused = [_refused("merge", ONLY_FOR_LONG)]
    if not situation.spares:
        refused.append(_refused("more", situation.no_spare or NO_COPIES))
    if not any(each.lever == "move" for chosen in sets for each in chosen):
        refused.append(_refused("move", "no other instance has KV blocks to spare"))
    return _plan(
        situation.model,
        one.name,
        f"{one.waiting:.0f} requests wait for {one.missing} KV blocks",
        [*alone, *(each for each in taken if each not in alone), *refused],
        taken,
        cost_s=cost_s,
        wait_s=_outcome(one, taken)[0],
        meets=not is_late,
    )


def _sets(
    situation: LeverSituation, one: ServingInstance, free: Mapping[str, int]
) -> Iterator[list[LeverOption]]:
    """Yield the sets of levers beside the queue: each is for what those before it leave missing."""
    levers = (resize(situation, one), move(one, free), convert_kv(situation, one))
    added = more(situation, one)
    for grown, moved, converted in product(*([[], each] if each else [[]] for each in levers)):
        chosen = [*grown, *moved, *converted]
        left = one.missing - sum(option.blocks for option in chosen)
        if chosen:
            yield chosen
        if added and left > 0:
            yield [*chosen, *added]
        wait_s = max(one.oldest_wait_s, one.queue_s(one.missing))
        wanted = share_for(wait_s, situation.objectives.ttft_slo_s)
        share = max(RELIEF_SHARE, wanted) if one.load else 1.0
        spent = sum(option.loss for option in chosen)
        rest = replace(one, loss_left=one.loss_left - spent)
        if left > 0 and (swapped := swap(situation, rest, left, share)):
            yield [*chosen, swapped]
            if added and left > swapped.blocks:
                yield [*chosen, swapped, *added]


def _outcome(one: ServingInstance, chosen: Sequence[LeverOption]) -> tuple[float, float]:
    """Return the longest wait and the cost of a set, by the share of blocks that each lever brings."""
    left, longest, mean = one.missing, 0.0, 0.0
    for option in sorted(chosen, key=lambda each: each.duration_s):
        served = min(left, option.blocks)
        longest, left = max(longest, option.duration_s if served else 0.0), left - served
        mean += served / one.missing * option.duration_s
    if left > 0:
        rest_s = one.queue_s(left)
        longest, mean = max(longest, rest_s), mean + left / one.missing * rest_s / 2
    return longest, mean * one.waiting + sum(option.price_s for option in chosen)


# ------------------------------------------------------------------------------------- no long request


def _for_part(situation: LeverSituation, offers: Sequence[PartOffer]) -> LeverPlan:
    found = [*(part(situation, offer) for offer in offers), stay(situation, offers)]
    options = [replace(one, cost_s=one.price_s) for one in found]
    best = min(options, key=lambda one: one.cost_s)  # of equals the lowest degree
    return _plan(
        situation.model,
        offers[0].instances[0],
        "no long request is left",
        options,
        [best],
        cost_s=best.cost_s,
        wait_s=0.0,
        meets=True,
    )


# ------------------------------------------------------------------------------------- shared


def _refused(lever: LeverName, why: str) -> LeverOption:
    return LeverOption(lever=lever, targets=[], refusal=why)


def _plan(
    model: str,
    subject: str,
    need: str,
    options: Sequence[LeverOption],
    taken: Sequence[LeverOption],
    *,
    cost_s: float,
    wait_s: float,
    meets: bool,
) -> LeverPlan:
    shown = [_rounded(one, one in taken) for one in options]
    met = "which meets the objective" if meets else "and no set meets the objective"
    chosen = " + ".join(one.words for one in shown if one.is_taken)
    return LeverPlan(
        model=model,
        subject=subject,
        need=need,
        options=shown,
        cost_s=round(cost_s, 3),
        wait_s=round(wait_s, 3),
        meets=meets,
        reason=f"{'; '.join(map(_words, shown))}; taken: {chosen}, {met}",
    )


def _rounded(one: LeverOption, is_taken: bool) -> LeverOption:
    times = ("stalled_s", "duration_s", "price_s", "cost_s", "loss")
    return replace(one, is_taken=is_taken, **{name: round(getattr(one, name), 6) for name in times})


def _words(one: LeverOption) -> str:
    """Return an option with its cost in request-seconds, as in `queue 12.5`."""
    if one.refusal:
        return one.words
    return f"{one.words} {'never' if one.duration_s >= NEVER_S else f'{one.cost_s:.2f}'}"
