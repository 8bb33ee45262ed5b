"""Degrees of tensor parallelism over time: when groups are made, and when they part. Pure.

Gateways repeat a `Demand` while requests wait that no instance holds; so many in a row count as windows do. A
group parts after so many windows in which `parallelism` lets it and nothing waits for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from bus.groups import parted
from bus.messages import Demand
from bus.policy import Policy
from controller.morphing.decision import MorphDecision
from controller.morphing.groups import Group
from controller.morphing.parallelism import Merge, decide_scale_down, decide_scale_up
from controller.morphing.track import REGRET_S, Freshness, Lever, RetryPause, State, Track, Waiting, model_of

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
    state: State, groups: Iterable[Group], policy: Policy, at_s: float, freshness: Freshness
) -> tuple[State, list[MorphDecision]]:
    """Make at most one group for each model that requests wait for."""
    rules = policy.in_force()
    if rules is None:
        return state, []
    there = [group for group in groups if group.age_s <= freshness.stale_s]
    decisions = []
    for model, waiting in sorted(_waiting_by_model(state, at_s).items()):
        now = _Moment(state, rules, at_s)
        of_model = [group for group in there if group.model == model]
        if not now.is_due(of_model, model, waiting):
            continue
        free = [group for group in of_model if now.is_free(group, "scale_up")]
        merge = decide_scale_up(free, waiting.tokens, policy.max_tp)
        if merge and now.leaves_room_for_short(merge, of_model, waiting):
            decisions.append(_merging(merge, waiting, policy, at_s))
            state = _decided(_regretted(state, model, at_s), merge.groups, "scale_up", at_s)
    return state, decisions


def scale_down(
    state: State, groups: Iterable[Group], policy: Policy, at_s: float, freshness: Freshness
) -> tuple[State, list[MorphDecision]]:
    """Judge one window of metrics: which groups part."""
    rules = policy.in_force()
    wanted = _waiting_by_model(state, at_s)
    decisions = []
    for group in groups:
        track = state.track(group.instance, group.epochs[0], at_s)
        if group.load:
            track = replace(track, busy_s=at_s)
            state = state.with_track(group.instance, track)
        if group.tp == 1:
            continue
        tp = None
        if rules is not None and group.age_s <= freshness.stale_s and group.model not in wanted:
            tp = decide_scale_down(group, policy.scale_down_free)
        track = _counted(track, tp is not None, at_s, freshness.gap_s)
        state = state.with_track(group.instance, track)
        if tp is None or rules is None or track.parting < rules.windows:
            continue
        now = _Moment(state, rules, at_s)
        if now.is_free(group, "scale_down") and now.may_part(group, track):
            decisions.append(_parting(group, tp, track.parting, policy))
            state = _decided(state, [group], "scale_down", at_s)
            state = replace(state, parted_s={**state.parted_s, group.model: at_s})
    return state, decisions


def _waiting_by_model(state: State, at_s: float) -> dict[str, Waiting]:
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
    """The state at one time under the rules then."""

    state: State
    rules: Policy
    at_s: float

    def is_due(self, groups: Sequence[Group], model: str, waiting: Waiting) -> bool:
        """Return True if what waits for `model` has been reported for long enough."""
        if waiting.times < self.rules.windows:
            return False
        is_held = any(group.max_tokens >= waiting.tokens for group in groups)
        if is_held and self.at_s < waiting.since_s + self.rules.long_patience_s:
            return False
        tracks = (track for name, track in self.state.tracks.items() if model_of(name) == model)
        return not any(self._is_rising(track) for track in tracks)

    def _is_rising(self, track: Track) -> bool:
        """Return True if a group was made of it within a cool-down, or is being made."""
        if track.raised_s is not None and self.at_s < track.raised_s + self.rules.cooldown_s:
            return True
        return any(one.lever == "scale_up" and one.is_heard(self.at_s) for one in track.pending.values())

    def leaves_room_for_short(self, merge: Merge, groups: Sequence[Group], waiting: Waiting) -> bool:
        """Return True if short requests keep an instance, or none came lately, or it is the first group."""
        if not any(group.max_tokens >= waiting.tokens for group in groups):
            return True
        others = [group for group in groups if group.tp == merge.groups[0].tp and group not in merge.groups]
        lately = max(self.state.track(*one, self.at_s).busy_s for one in _instances(merge.groups))
        return bool(others) or self.at_s >= lately + self.rules.long_patience_s

    def is_free(self, group: Group, lever: Lever) -> bool:
        """Return True unless a member has a pending morph, cools down, or refused this lately."""
        cooldown_s = self.rules.cooldown_s
        return all(
            track.is_ready(self.at_s, cooldown_s) and not track.is_paused(lever, self.at_s, cooldown_s)
            for track in (self.state.tracks.get(name) for name in group.instances)
            if track is not None
        )

    def may_part(self, group: Group, track: Track) -> bool:
        """Return True unless a group of the model parted too early lately, and no request queues."""
        regret = self.state.regrets.get(group.model)
        if regret is None or not regret.is_in_a_row(self.at_s) or group.waiting >= 1:
            return True
        return self.at_s >= track.parting_since_s + regret.seconds(self.rules.cooldown_s)


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


def _decided(state: State, groups: Iterable[Group], lever: Lever, at_s: float) -> State:
    for name, epoch in _instances(groups):
        track = replace(state.track(name, epoch, at_s), parting=0)
        state = state.with_track(name, track.decided(lever, at_s))
    return state


def _instances(groups: Iterable[Group]) -> Iterator[tuple[str, int]]:
    return chain(*(zip(group.instances, group.epochs, strict=True) for group in groups))


def _merging(merge: Merge, waiting: Waiting, policy: Policy, at_s: float) -> MorphDecision:
    epochs = dict(chain(*(zip(one.workers, one.epochs, strict=True) for one in merge.groups)))
    first = merge.groups[0]
    of_all = f" (the longest of {waiting.count})" if waiting.count > 1 else ""
    return MorphDecision(
        instance=first.instance,
        worker=first.leader,
        epoch=first.epochs[0],
        lever="scale_up",
        reason=f"a request of {waiting.tokens} tokens waits{of_all} and no instance has room for it: "
        f"{', '.join(merge.workers)} at degree {first.tp} become one of degree {merge.tp}, "
        f"which holds {merge.tokens_after}",
        cause="long_request",
        instances=tuple(name for group in merge.groups for name in group.instances),
        epochs={name: epochs[name] for name in merge.workers},
        tp=merge.tp,
        numbers={
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
        },
    )


def _parting(group: Group, tp: int, windows: int, policy: Policy) -> MorphDecision:
    parts = "; ".join(", ".join(part) for part in parted(group.workers, tp))
    return MorphDecision(
        instance=group.instance,
        worker=group.leader,
        epoch=group.epochs[0],
        lever="scale_down",
        reason=f"no long request is left and {1 - group.usage:.2f} of the KV is free, "
        f"{policy.scale_down_free:g} suffices: degree {group.tp} parts into degree {tp} ({parts})",
        cause="no_long_request",
        instances=group.instances,
        epochs=dict(zip(group.workers, group.epochs, strict=True)),
        tp=tp,
        numbers={
            "longest_tokens": group.longest_tokens,
            "used_tokens": group.used_tokens,
            "kv_usage": round(group.usage, 4),
            "tp_before": group.tp,
            "tp_after": tp,
            "tokens_after": group.tokens_at[tp],
            "load": round(group.load, 2),
            "windows": windows,
            "policy_revision": policy.revision,
        },
    )
