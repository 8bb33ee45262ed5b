"""Which morph, now? Pure: the same code runs the service, the tests and the simulator.

A window is one message of metrics. It shows pressure, ease, or neither; between the two lie the dead zones of
the thresholds. So many windows in a row must agree (MorphServe §6: what lasts is acted on, what fluctuates
is not), the instance's last morph must be a cool-down ago, and none may be in flight. Old or missing metrics
mean hold, and the count begins anew.

=========  =========================================================================================
pressure   KV use above its high threshold, or requests wait for blocks longer than the high delay,
           or a request was preempted lately and the KV use is not low again
ease       KV use and delay below the low thresholds and no preemption lately; or more layers are
           below where they rest than the policy allows, and there is no pressure
=========  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bus.messages import Cause, Number
from bus.policy import Policy
from controller.morphing.levers import MorphDecision, Rules, rules_of, swap_down, swap_up, take_free_pages
from controller.morphing.track import FORGET_S, Lever, State, Track
from controller.morphing.view import View

Told = tuple[Cause, str]  # in a word, and for people
Pull = Callable[[View, Rules], MorphDecision | None]

RELIEF: tuple[tuple[Lever, Pull], ...] = (("resize", take_free_pages), ("swap_down", swap_down))
RETURN: tuple[tuple[Lever, Pull], ...] = (("swap_up", swap_up),)


@dataclass(frozen=True, slots=True)
class Freshness:
    """Beyond `stale_s` a report says nothing; beyond `gap_s` two windows do not follow each other."""

    stale_s: float
    gap_s: float


def decide(
    state: State, views: Iterable[View], policy: Policy, at_s: float, freshness: Freshness
) -> tuple[State, list[MorphDecision]]:
    """What one window adds: at most one morph per instance. `at_s`: when the metrics were made."""
    if policy.revision != state.revision:  # other thresholds: what was counted under the old ones is void
        tracks = {name: replace(_uncounted(track), parting=0) for name, track in state.tracks.items()}
        state = replace(state, tracks=tracks, revision=policy.revision)
    tracks = {
        name: _uncounted(track)
        for name, track in state.tracks.items()
        if at_s < track.seen_s + FORGET_S or track.is_morphing(at_s)
    }
    decisions = []
    for view in views:
        track = state.tracks.get(view.instance)
        if track is None or track.epoch < view.epoch:
            track = Track(view.epoch, at_s)
        rules = rules_of(policy, view.num_layers)
        if rules is None or view.epoch < track.epoch or view.age_s > freshness.stale_s:
            tracks[view.instance] = replace(_uncounted(track), seen_s=at_s)
            continue
        track = _counted(track, view, rules, at_s, freshness.gap_s)
        if decision := _choose(track, view, rules, at_s, policy.revision):
            decisions.append(decision)
            track = track.decided(decision.lever, at_s)
        tracks[view.instance] = track
    return replace(state, tracks=tracks), decisions


def pressure(view: View, rules: Rules) -> list[Told]:
    """What is too high; nothing: no pressure."""
    causes: list[Told] = []
    if view.kv_usage > rules.kv_usage_high:
        causes.append(("kv_usage", f"KV use {view.kv_usage:.2f} is above {rules.kv_usage_high:g}"))
    if view.kv_delay_s > rules.queue_delay_high_s:
        waits = f"requests wait {view.kv_delay_s:.2f} s for blocks, above {rules.queue_delay_high_s:g} s"
        causes.append(("queue_delay", waits))
    if view.preemptions_per_s > 0 and view.kv_usage >= rules.kv_usage_low:
        causes.append(("preemptions", f"{view.preemptions_per_s:.2f} requests a second lose their blocks"))
    return causes


def ease(view: View, rules: Rules) -> list[Told]:
    """Why pages can go back; nothing: they cannot."""
    if view.layers_below > rules.max_layers and not pressure(view, rules):
        told = f"{view.layers_below} layers are below {view.resting} and the policy allows {rules.max_layers}"
        return [("layer_limit", told)]
    if (
        view.kv_usage < rules.kv_usage_low
        and view.kv_delay_s < rules.queue_delay_low_s
        and not view.preemptions_per_s
    ):
        told = f"KV use {view.kv_usage:.2f} is below {rules.kv_usage_low:g} and nothing waits for blocks"
        return [("ease", told)]
    return []


def _counted(track: Track, view: View, rules: Rules, at_s: float, gap_s: float) -> Track:
    if at_s > track.seen_s + gap_s:
        track = _uncounted(track)
    return replace(
        track,
        seen_s=at_s,
        pressure=track.pressure + 1 if pressure(view, rules) else 0,
        ease=track.ease + 1 if ease(view, rules) else 0,
    )


def _uncounted(track: Track) -> Track:
    return replace(track, pressure=0, ease=0)


def _choose(track: Track, view: View, rules: Rules, at_s: float, revision: int) -> MorphDecision | None:
    if track.is_morphing(at_s) or track.is_cooling(at_s, rules.cooldown_s):
        return None
    if track.pressure >= rules.windows:
        count, causes, levers = track.pressure, pressure(view, rules), RELIEF
    elif track.ease >= rules.windows:
        count, causes, levers = track.ease, ease(view, rules), RETURN
    else:
        return None
    for lever, pull in levers:
        if not track.rests(lever, at_s, rules.cooldown_s) and (decision := pull(view, rules)):
            words = ", ".join(text for _, text in causes)
            numbers = seen(view) | {"windows": count, "policy_revision": revision}
            return decision.because(causes[0][0], words, numbers)
    return None


def seen(view: View) -> dict[str, Number]:
    """What the event of a decision tells of the window."""
    return {
        "kv_usage": round(view.kv_usage, 4),
        "kv_blocks": view.kv_blocks,
        "kv_used": round(view.kv_used, 2),
        "queue_delay_s": round(view.queue_delay_s, 4),
        "waiting": round(view.waiting, 2),
        "waiting_blocks": view.waiting_blocks,
        "preemptions_per_s": round(view.preemptions_per_s, 4),
        "layers_below_rest": view.layers_below,
        "pages_free": view.pages_free,
        "report_age_s": round(view.age_s, 3),
    }
