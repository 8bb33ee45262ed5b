"""Degrees of tensor parallelism over time: when groups are made, and when they part. Pure.

Gateways repeat a `Demand` while requests wait that no instance holds; so many in a row count as windows do. A
group parts after so many windows in which `parallelism` lets it and nothing waits for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from bus.levers import LeverPlan
from bus.messages import Demand
from bus.policy import Policy
from bus.shapes import CommonShape
from controller.morphing.decision import MorphDecision, levelling, levelling_kv, merging, parting, swapping
from controller.morphing.groups import Group
from controller.morphing.parallelism import degrees_below
from controller.morphing.track import (
    REGRET_S,
    REPORT_S,
    Freshness,
    Lever,
    RetryPause,
    State,
    Track,
    Waiting,
    model_of,
)
from controller.morphing.weighing import NO_COSTS, WeighedMerge, taken_merges, weigh_long, weigh_part
from controller.planning.lever_costs import LeverCosts

GONE_S = 2.0  # a demand without a report for so long is over; gateways report twice a second


def hear(state: State, demand: Demand, at_s: float) -> State:
    """Note what waits at a gateway for a group."""
    key = demand.gateway, demand.model
    waiting = {name: one for name, one in state.waiting.items() if at_s < one.heard_s + GONE_S}
    if not demand.count:
        waiting.pop(key, None)
        return replace(state, waiting=waiting)
    before = waiting.get(key)
    times, since_s = (before.times + 1, before.since_s) if before else (1, at_s)
    waiting[key] = Waiting(demand.tokens, demand.count, times, since_s, at_s)
    return replace(state, waiting=waiting)


def scale_up(
    state: State,
    groups: Iterable[Group],
    policy: Policy,
    at_s: float,
    freshness: Freshness,
    costs: LeverCosts = NO_COSTS,
) -> tuple[State, list[MorphDecision]]:
    """Do what the planner takes for each model that long requests wait for: groups, or a swap.

    Members of a group whose layers differ in precision are made alike first. All keep their layers from the
    first window on in which they are to become one, so that no reflex undoes that.
    """
    rules = policy.in_force()
    if rules is None:
        return state, []
    there = [group for group in groups if group.age_s <= freshness.stale_s]
    decisions = []
    for model, waiting in sorted(waiting_by_model(state, at_s).items()):
        of_model = [group for group in there if group.model == model]
        now = _Moment(state, rules, at_s, _outgrown(of_model, waiting))
        if not now.is_due(of_model, model, waiting):
            continue
        free = [group for group in of_model if now.is_free(group, "scale_up", may_swap=True)]
        waited_s = at_s - waiting.since_s
        is_held = any(group.max_tokens >= waiting.tokens for group in of_model)
        is_in_vain = is_held and now.has_swapped(model, waiting)
        ready = [] if is_in_vain else [group for group in free if now.is_free(group, "scale_up")]
        swappable = [group for group in ready if not now.has_refused_swap(group)]
        partable = now.partable(free, model)
        plan, offers = weigh_long(of_model, free, partable, swappable, waiting, rules, waited_s, costs)
        merges = now.leaving_room_for_short(taken_merges(plan, offers), of_model, waiting)
        made = _for_long(plan, merges, now, of_model, waiting)
        for one in made:
            members = [group for group in of_model if set(group.instances) & set(one.instances)]
            state = _regretted(state, model, at_s) if one.lever == "scale_up" else state
            state = _decided(state, members, one.lever, at_s, makes_way=one.lever == "scale_down")
        for found in merges:
            if not found.merge.missing(waiting.tokens):
                state = _held(state, found.merge.groups, at_s)
        decisions += made
    return state, decisions


def _for_long(
    plan: LeverPlan, merges: list[WeighedMerge], now: _Moment, groups: list[Group], waiting: Waiting
) -> list[MorphDecision]:
    """Return the morphs that a plan for long requests takes now."""
    made = []
    for swap in (one for one in plan.taken if one.lever == "swap"):
        group = next(one for one in groups if one.instance == swap.targets[0])
        made += [swapping(group, swap, plan, waiting)] if now.may_swap([group]) else []
    is_sure = waiting.times >= now.rules.windows  # a group costs more than a swap
    for found in merges:
        if not all(now.is_free(group, "scale_up") for group in groups if _is_in(group, found)):
            continue
        if found.parting:
            made += [parting(found.parting, plan, waiting.times, now.rules, waiting)] if is_sure else []
        elif found.merge.missing(waiting.tokens):
            continue
        elif found.kv:
            is_due = now.may_swap(found.merge.groups)
            made += levelling_kv(found.merge, found.kv, plan) if is_due else []
        elif isinstance(found.common, CommonShape):
            is_due = now.may_swap(found.merge.groups)
            made += levelling(found.merge, found.common, plan) if is_due else []
        elif is_sure:
            made.append(merging(found.merge, waiting, plan, now.rules, now.at_s))
    return made


def scale_down(
    state: State,
    groups: Iterable[Group],
    policy: Policy,
    at_s: float,
    freshness: Freshness,
    costs: LeverCosts = NO_COSTS,
) -> tuple[State, list[MorphDecision]]:
    """Judge one window of metrics: which groups part."""
    rules = policy.in_force()
    wanted = waiting_by_model(state, at_s)
    decisions, groups = [], list(groups)
    state = state.seeing(chain(*(group.instances for group in groups)), at_s, policy.cooldown_s)
    for group in groups:
        track = state.track(group.instance, group.epochs[0], at_s)
        if group.load:
            track = replace(track, busy_s=at_s)
            state = state.with_track(group.instance, track)
        if group.tp == 1:
            continue
        lower: list[int] = []
        if rules is not None and group.age_s <= freshness.stale_s and group.model not in wanted:
            lower = degrees_below(group, policy.scale_down_free)
        track = _counted(track, bool(lower), at_s, freshness.gap_s)
        state = state.with_track(group.instance, track)
        if not lower or rules is None or track.parting < rules.windows:
            continue
        plan = weigh_part([one for one in groups if one.model == group.model], group, lower, rules, costs)
        now = _Moment(state, rules, at_s)
        parts = any(one.lever == "part" for one in plan.taken)
        if parts and now.is_free(group, "scale_down") and now.may_part(group, track):
            decisions.append(parting(group, plan, track.parting, policy))
            state = _decided(state, [group], "scale_down", at_s)
            state = replace(state, parted_s={**state.parted_s, group.model: at_s})
    return state, decisions


def waiting_by_model(state: State, at_s: float) -> dict[str, Waiting]:
    """Return what waits at all gateways, by model."""
    found: dict[str, list[Waiting]] = defaultdict(list)
    for (_, model), one in state.waiting.items():
        if at_s < one.heard_s + GONE_S:
            found[model].append(one)
    return {
        model: Waiting(
            tokens=max(one.tokens for one in there),
            count=sum(one.count for one in there),
            times=max(one.times for one in there),
            since_s=min(one.since_s for one in there),
            heard_s=max(one.heard_s for one in there),
        )
        for model, there in found.items()
    }


@dataclass(frozen=True, slots=True)
class _Moment:
    """The state at one time under the rules then.

    outgrown: the members of groups too small for what waits. A cool-down after these were made would only
    have it wait, and short requests with it: they queue at the gateway meanwhile.
    """

    state: State
    rules: Policy
    at_s: float
    outgrown: frozenset[str] = frozenset()

    def is_due(self, groups: Sequence[Group], model: str, waiting: Waiting) -> bool:
        """Return True if what waits for `model` may get an instance now."""
        is_held = any(group.max_tokens >= waiting.tokens for group in groups)
        if is_held and self.at_s < waiting.since_s + self.rules.long_patience_s:
            return False
        tracks = ((name, one) for name, one in self.state.tracks.items() if model_of(name) == model)
        return not any(self._is_rising(name, track) for name, track in tracks)

    def _is_rising(self, name: str, track: Track) -> bool:
        """Return True if a group was made of it within a cool-down, or is being made.

        One that has parted since then, to become a larger one, counts no more.
        """
        is_recent = track.raised_s is not None and self.at_s < track.raised_s + self.rules.cooldown_s
        if is_recent and name not in self.outgrown and not track.makes_way:
            return True
        levers = ("scale_up", "level", "swap")
        return any(one.lever in levers and one.is_heard(self.at_s) for one in track.pending.values())

    def partable(self, groups: Iterable[Group], model: str) -> list[Group]:
        """Return the groups that may part for a larger one: none until the last change of degree shows."""
        tracks = [(name, one) for name, one in self.state.tracks.items() if model_of(name) == model]
        if any(self._is_cooling(name, one) or one.is_parting(self.at_s) for name, one in tracks):
            return []
        return [group for group in groups if self.is_free(group, "scale_down", may_swap=True)]

    def has_swapped(self, model: str, waiting: Waiting) -> bool:
        """Return True if a swap was tried for what waits: short requests may have taken the room it made."""
        tracks = (track for name, track in self.state.tracks.items() if model_of(name) == model)
        return any(track.swapped_s >= waiting.since_s for track in tracks)

    def leaving_room_for_short(
        self, merges: Iterable[WeighedMerge], groups: Sequence[Group], waiting: Waiting
    ) -> list[WeighedMerge]:
        """Return the merges beside which short requests keep an instance, unless none came lately.

        The first group of all may take the last instance.
        """
        found = list[WeighedMerge]()
        is_first = not any(group.max_tokens >= waiting.tokens for group in groups)
        for one in merges:
            there = [group.instance for each in (*found, one) for group in each.merge.groups]
            tp = one.merge.groups[0].tp
            others = [group for group in groups if group.tp == tp and group.instance not in there]
            lately = max(self.state.track(*each, self.at_s).busy_s for each in _instances(one.merge.groups))
            if is_first or others or self.at_s >= lately + self.rules.long_patience_s:
                found.append(one)
            is_first = False
        return found

    def is_free(self, group: Group, lever: Lever, *, may_swap: bool = False) -> bool:
        """Return True unless a member has a pending morph, cools down, or refused this lately.

        may_swap: a swap that the controller did not order is no obstacle; its end will be waited for. What
        parted for a larger group needs no cool-down before it becomes one.
        """
        tracks = [
            (name, track) for name in group.instances if (track := self.state.tracks.get(name)) is not None
        ]
        return all(
            (not self._is_cooling(name, track) or (track.makes_way and lever == "scale_up"))
            and not track.is_paused(lever, self.at_s, self.rules.cooldown_s)
            and not track.is_morphing(self.at_s, may_swap=may_swap)
            for name, track in tracks
        )

    def _is_cooling(self, name: str, track: Track) -> bool:
        """Return True within a cool-down, but for a group that was made and is too small for what waits."""
        if name in self.outgrown and (track.morphed_s or 0.0) <= (track.raised_s or 0.0):
            return False
        return track.is_cooling(self.at_s, self.rules.cooldown_s)

    def may_swap(self, groups: Iterable[Group]) -> bool:
        """Return True if metrics show the layers as they are, and no swap for a group was refused lately."""
        groups = list(groups)
        tracks = ((group, self.state.tracks.get(name)) for group in groups for name in group.instances)
        is_old = any(self.at_s - group.age_s < track.swapped_s + REPORT_S for group, track in tracks if track)
        return not is_old and not any(map(self.has_refused_swap, groups))

    def has_refused_swap(self, group: Group) -> bool:
        """Return True if a member refused a swap for a long request lately."""
        levers: tuple[Lever, ...] = ("level", "swap")
        tracks = filter(None, map(self.state.tracks.get, group.instances))
        cooldown_s = self.rules.cooldown_s
        return any(one.is_paused(lever, self.at_s, cooldown_s) for one in tracks for lever in levers)

    def may_part(self, group: Group, track: Track) -> bool:
        """Return True unless a group of the model parted too early lately, and no request queues."""
        regret = self.state.regrets.get(group.model)
        if regret is None or not regret.is_in_a_row(self.at_s) or group.waiting >= 1:
            return True
        return self.at_s >= track.parting_since_s + regret.seconds(self.rules.cooldown_s)


def _outgrown(groups: Iterable[Group], waiting: Waiting) -> frozenset[str]:
    """Return the members of groups of which none of this degree could ever hold what waits."""
    small = (one for one in groups if one.tp > 1 and one.tokens_at.get(one.tp, 0) < waiting.tokens)
    return frozenset(chain(*(one.instances for one in small)))


def _is_in(group: Group, found: WeighedMerge) -> bool:
    """Return True if an instance of now takes part in a merge, or parts for it."""
    return bool({*group.instances} & {name for one in found.merge.groups for name in one.instances})


def _counted(track: Track, could_part: bool, at_s: float, gap_s: float) -> Track:
    if not could_part or at_s > track.parting_s + gap_s:
        track = replace(track, parting=0, parting_since_s=at_s)
    return replace(track, parting=track.parting + could_part, parting_s=at_s)


def _regretted(state: State, model: str, at_s: float) -> State:
    """Note that a group is made, which the model may have lost too early."""
    if at_s >= state.parted_s.get(model, at_s - REGRET_S) + REGRET_S:
        return state
    regret = RetryPause.after(state.regrets.get(model), at_s)
    parted_s = {name: moment for name, moment in state.parted_s.items() if name != model}
    return replace(state, parted_s=parted_s, regrets={**state.regrets, model: regret})


def _decided(
    state: State, groups: Iterable[Group], lever: Lever, at_s: float, *, makes_way: bool = False
) -> State:
    for name, epoch in _instances(groups):
        track = replace(state.track(name, epoch, at_s), parting=0)
        state = state.with_track(name, track.decided(lever, at_s, makes_way=makes_way))
    return state


def _held(state: State, groups: Iterable[Group], at_s: float) -> State:
    """Note that these keep their layers until they are one group, also those that need no swap."""
    for name, epoch in _instances(groups):
        state = state.with_track(name, replace(state.track(name, epoch, at_s), levelled_s=at_s))
    return state


def _instances(groups: Iterable[Group]) -> Iterator[tuple[str, int]]:
    return chain(*(zip(group.instances, group.epochs, strict=True) for group in groups))
