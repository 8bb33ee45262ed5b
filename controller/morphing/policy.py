"""The choice of a morph and its moment. Pure: the service, the tests and a simulator run the same code.

A window is one message of metrics. So many in a row must show pressure or ease (MorphServe, section 6), and
no morph may be pending. Layers go back no sooner than a cool-down after the last morph. Relief does not wait,
for a burst would be over. Old metrics mean hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bus.messages import Cause, Number
from bus.policy import Policy
from controller.morphing.levers import MorphDecision, Rules, rules_of, swap_down, swap_up, take_free_pages
from controller.morphing.track import FORGET_S, Lever, State, Track
from controller.morphing.view import View

Pull = Callable[[View, Rules], MorphDecision | None]
# Layers that were swapped by hand go back, too. Pages that a resize by hand freed stay free until pressure.
RELIEF: tuple[tuple[Lever, Pull], ...] = (("resize", take_free_pages), ("swap_down", swap_down))
RETURN: tuple[tuple[Lever, Pull], ...] = (("swap_up", swap_up),)


@dataclass(frozen=True, slots=True)
class Freshness:
    """A report older than `stale_s` is not used; windows more than `gap_s` apart are not in a row."""

    stale_s: float
    gap_s: float


def decide(
    state: State, views: Iterable[View], policy: Policy, at_s: float, freshness: Freshness
) -> tuple[State, list[MorphDecision]]:
    """Judge one window, whose metrics were made at `at_s`. At most one morph of each instance."""
    if policy.revision != state.revision:  # windows counted under other thresholds do not count
        tracks = {name: replace(track.uncounted(), parting=0) for name, track in state.tracks.items()}
        state = replace(state, tracks=tracks, revision=policy.revision)
    tracks = {
        name: track.uncounted()
        for name, track in state.tracks.items()
        if at_s < track.seen_s + FORGET_S or track.is_morphing(at_s)
    }
    decisions = []
    for view in views:
        track = state.track(view.instance, view.epoch, at_s)
        rules = rules_of(policy, view.num_layers)
        if rules is None or view.epoch < track.epoch or view.age_s > freshness.stale_s:
            tracks[view.instance] = replace(track.uncounted(), seen_s=at_s)
            continue
        track = _counted(track, view, rules, at_s, freshness.gap_s)
        if decision := _choose(track, view, rules, at_s):
            decisions.append(decision)
            track = track.decided(decision.lever, at_s)
        tracks[view.instance] = track
    return replace(state, tracks=tracks), decisions


def pressure(view: View, rules: Rules) -> list[tuple[Cause, str]]:
    """Return what is too high, in a word and for people; empty without pressure."""
    causes: list[tuple[Cause, str]] = []
    if view.kv_usage > rules.kv_usage_high:
        causes.append(("kv_usage", f"KV use {view.kv_usage:.2f} is above {rules.kv_usage_high:g}"))
    if view.kv_delay_s > rules.queue_delay_high_s:
        waits = f"requests wait {view.kv_delay_s:.2f} s for blocks, above {rules.queue_delay_high_s:g} s"
        causes.append(("queue_delay", waits))
    if view.preemptions_per_s > 0 and view.kv_usage >= rules.kv_usage_low:
        causes.append(("preemptions", f"{view.preemptions_per_s:.2f} requests a second lose their blocks"))
    return causes


def ease(view: View, rules: Rules) -> list[tuple[Cause, str]]:
    """Return why layers can go back, in a word and for people; empty if they cannot."""
    if view.layers_below > rules.max_layers and not pressure(view, rules):
        text = f"{view.layers_below} layers are below {view.resting} and the policy allows {rules.max_layers}"
        return [("layer_limit", text)]
    is_low = view.kv_usage < rules.kv_usage_low and view.kv_delay_s < rules.queue_delay_low_s
    if is_low and not view.preemptions_per_s:
        text = f"KV use {view.kv_usage:.2f} is below {rules.kv_usage_low:g} and nothing waits for blocks"
        return [("ease", text)]
    return []


def _counted(track: Track, view: View, rules: Rules, at_s: float, gap_s: float) -> Track:
    if at_s > track.seen_s + gap_s:
        track = track.uncounted()
    return replace(
        track,
        seen_s=at_s,
        pressure=track.pressure + 1 if pressure(view, rules) else 0,
        ease=track.ease + 1 if ease(view, rules) else 0,
    )


def _choose(track: Track, view: View, rules: Rules, at_s: float) -> MorphDecision | None:
    if track.is_morphing(at_s):
        return None
    if track.pressure >= rules.windows:
        count, causes, levers = track.pressure, pressure(view, rules), RELIEF
    elif track.ease >= rules.windows and not track.is_cooling(at_s, rules.cooldown_s):
        count, causes, levers = track.ease, ease(view, rules), RETURN
    else:
        return None
    for lever, pull in levers:
        if not track.is_paused(lever, at_s, rules.cooldown_s) and (decision := pull(view, rules)):
            words = ", ".join(text for _, text in causes)
            return decision.because(causes[0][0], words, _numbers(view, count, rules.revision))
    return None


def _numbers(view: View, windows: int, revision: int) -> dict[str, Number]:
    """Return what the event of a decision shows of the window."""
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
        "windows": windows,
        "policy_revision": revision,
    }
