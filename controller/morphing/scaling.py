"""Degrees of tensor parallelism over time: when is a group made, and when does it part? Pure.

Requests that no instance holds wait at a gateway, which tells so again and again (`Demand`); so many tellings
in a row count as the windows of other morphs do. A group that could hold the request and is full gets
`long_patience_s` to empty; another one beside it leaves short requests an instance of their own, since groups
get less done. Of one model, one group is made in a cool-down: the next telling may not know yet.
A group parts after so many windows in which `parallelism` would let it and nothing waits for one;
where the last group had parted a moment before the next was needed, whichever it was, it stays longer, unless
requests queue in it: its workers get more done alone, so that parting pays within seconds.
Whatever has a morph in flight, cools down, or was refused lately is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bus.messages import Cause, Demand, Number, Transform
from bus.policy import Policy
from controller.morphing.groups import Group
from controller.morphing.levers import WAIT_S, Rules, rules_of
from controller.morphing.parallelism import Merge, decide_scale_down, decide_scale_up, parted
from controller.morphing.policy import Freshness
from controller.morphing.track import REGRET_S, Lever, RetryPause, State, Track, Waiting, model_of

GONE_S = 2.0  # a demand that was not told again for so long is over; gateways tell it twice a second


def hear(state: State, demand: Demand, at_s: float) -> State:
    """A gateway tells what waits there."""
    key = demand.gateway, demand.model
    before = state.waiting.get(key)
    told, since_s = 1, at_s
    if before is not None and at_s < before.heard_s + GONE_S:
        told, since_s = before.told + 1, before.since_s
    waiting = {name: one for name, one in state.waiting.items() if at_s < one.heard_s + GONE_S}
    waiting[key] = Waiting(demand.tokens, demand.count, told, since_s, at_s)
    return replace(state, waiting=waiting)


def scale_up(
    state: State, groups: Iterable[Group], policy: Policy, at_s: float, freshness: Freshness
) -> tuple[State, list[Reshape]]:
    """At most one group for each model that something waits for."""
    rules = rules_of(policy, 1)
    if rules is None:
        return state, []
    there = [group for group in groups if group.age_s <= freshness.stale_s]
    decisions = []
    for model, waiting in sorted(_waiting_by_model(state, at_s).items()):
        of_model = [group for group in there if group.model == model]
        if not _is_due(state, of_model, model, waiting, rules, policy, at_s):
            continue
        free = [group for group in of_model if _is_free(state, group, "scale_up", rules, at_s)]
        merge = decide_scale_up(free, waiting.tokens, policy.max_tp)
        if merge and _leaves_room_for_short(state, merge, of_model, waiting, policy, at_s):
            decisions.append(merging(merge, waiting, policy, at_s))
            state = _decided(_regretted(state, model, at_s), merge.groups, "scale_up", at_s)
    return state, decisions


def scale_down(
    state: State, groups: Iterable[Group], policy: Policy, at_s: float, freshness: Freshness
) -> tuple[State, list[Reshape]]:
    """What one window of metrics adds."""
    rules = rules_of(policy, 1)
    wanted = _waiting_by_model(state, at_s)
    decisions = []
    for group in groups:
        track = _track(state, group.instance, group.epochs[0], at_s)
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
        if _is_free(state, group, "scale_down", rules, at_s) and _may_part(state, group, track, rules, at_s):
            decisions.append(parting(group, tp, track.parting, policy))
            state = _decided(state, [group], "scale_down", at_s)
            state = replace(state, parted_s={**state.parted_s, group.model: at_s})
    return state, decisions


# ------------------------------------------------------------------------------------- what is due


def _waiting_by_model(state: State, at_s: float) -> dict[str, Waiting]:
    """Of all gateways together."""
    found: dict[str, Waiting] = {}
    for (_, model), one in state.waiting.items():
        if at_s >= one.heard_s + GONE_S:
            continue
        other = found.get(model)
        found[model] = one if other is None else _joined(one, other)
    return found


def _joined(one: Waiting, other: Waiting) -> Waiting:
    return Waiting(
        tokens=max(one.tokens, other.tokens),
        count=one.count + other.count,
        told=max(one.told, other.told),
        since_s=min(one.since_s, other.since_s),
        heard_s=max(one.heard_s, other.heard_s),
    )


def _is_due(
    state: State,
    groups: Sequence[Group],
    model: str,
    waiting: Waiting,
    rules: Rules,
    policy: Policy,
    at_s: float,
) -> bool:
    if waiting.told < rules.windows:
        return False
    is_held = any(group.max_tokens >= waiting.tokens for group in groups)
    if is_held and at_s < waiting.since_s + policy.long_patience_s:
        return False
    return not any(
        model_of(name) == model and _is_rising(track, rules, at_s) for name, track in state.tracks.items()
    )


def _leaves_room_for_short(
    state: State, merge: Merge, groups: Sequence[Group], waiting: Waiting, policy: Policy, at_s: float
) -> bool:
    """Or nothing came for them lately."""
    if not any(group.max_tokens >= waiting.tokens for group in groups):
        return True  # the first is made of what there is
    others = [group for group in groups if group.tp == merge.groups[0].tp and group not in merge.groups]
    lately = max(_track(state, name, epoch, at_s).busy_s for name, epoch in _instances(merge.groups))
    return bool(others) or at_s >= lately + policy.long_patience_s


def _is_rising(track: Track, rules: Rules, at_s: float) -> bool:
    """A group was made of it a moment ago, or is being made."""
    if track.raised_s is not None and at_s < track.raised_s + rules.cooldown_s:
        return True
    return any(one.lever == "scale_up" and one.is_heard(at_s) for one in track.in_flight.values())


def _is_free(state: State, group: Group, lever: Lever, rules: Rules, at_s: float) -> bool:
    """No member of it is in a morph, cools down, or refused this lately."""
    return not any(
        track.is_morphing(at_s)
        or track.is_cooling(at_s, rules.cooldown_s)
        or track.rests(lever, at_s, rules.cooldown_s)
        for track in (state.tracks.get(name) for name in group.instances)
        if track is not None
    )


def _counted(track: Track, could_part: bool, at_s: float, gap_s: float) -> Track:
    if not could_part or at_s > track.parting_s + gap_s:
        track = replace(track, parting=0, parting_since_s=at_s)
    return replace(track, parting=track.parting + could_part, parting_s=at_s)


def _may_part(state: State, group: Group, track: Track, rules: Rules, at_s: float) -> bool:
    regret = state.regrets.get(group.model)
    if regret is None or not regret.is_in_a_row(at_s) or group.waiting >= 1:
        return True
    return at_s >= track.parting_since_s + regret.rest_s(rules.cooldown_s)


def _regretted(state: State, model: str, at_s: float) -> State:
    """A group is needed again so soon after one parted."""
    if at_s >= state.parted_s.get(model, at_s - REGRET_S) + REGRET_S:
        return state
    regret = RetryPause.after(state.regrets.get(model), at_s)
    parted_s = {name: moment for name, moment in state.parted_s.items() if name != model}
    return replace(state, parted_s=parted_s, regrets={**state.regrets, model: regret})


def _track(state: State, instance: str, epoch: int, at_s: float) -> Track:
    track = state.tracks.get(instance)
    return Track(epoch, at_s) if track is None or track.epoch < epoch else track


def _decided(state: State, groups: Iterable[Group], lever: Lever, at_s: float) -> State:
    for name, epoch in _instances(groups):
        track = replace(_track(state, name, epoch, at_s), parting=0)
        state = state.with_track(name, track.decided(lever, at_s))
    return state


def _instances(groups: Iterable[Group]) -> Iterator[tuple[str, int]]:
    for group in groups:
        yield from zip(group.instances, group.epochs, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshape:
    """One transform, why, and the numbers that were seen. `instance` is the leader's, `instances` are all."""

    instance: str
    worker: str
    epoch: int
    lever: Lever
    reason: str
    cause: Cause
    instances: tuple[str, ...]
    epochs: dict[str, int]  # by worker, in the order of their shards at the higher degree
    tp: int
    numbers: dict[str, Number] = field(default_factory=dict)

    def command(self, morph_id: str) -> Transform:
        return Transform(
            id=morph_id,
            epoch=self.epoch,
            instance=self.instance,
            workers=list(self.epochs),
            epochs=self.epochs,
            tp=self.tp,
            wait_s=WAIT_S,
        )


def merging(merge: Merge, waiting: Waiting, policy: Policy, at_s: float) -> Reshape:
    """A group is made for what waits."""
    epochs = {
        name: epoch for group in merge.groups for name, epoch in zip(group.workers, group.epochs, strict=True)
    }
    first = merge.groups[0]
    of_all = f" (the longest of {waiting.count})" if waiting.count > 1 else ""
    return Reshape(
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
            "windows": waiting.told,
            "policy_revision": policy.revision,
        },
    )


def parting(group: Group, tp: int, windows: int, policy: Policy) -> Reshape:
    """A group parts into groups of degree `tp`, as so many windows allow."""
    parts = "; ".join(", ".join(part) for part in parted(group, tp))
    return Reshape(
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
