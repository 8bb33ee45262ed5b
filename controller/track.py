"""What the controller remembers of each instance: windows in a row, morphs in flight, refusals. Pure.

Time is Redis' clock, as the ids of the entries tell it, in seconds: metrics and reports bring their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bus.messages import MorphReport

Lever = Literal["resize", "swap_down", "swap_up"]

SILENT_S = 60.0  # a morph nobody reported on for so long holds nothing back any more
FORGET_S = 600.0  # an instance that was not heard of for so long
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
REGRET_S = 30.0  # layers that went back to full and must be swapped again so soon went back too early


@dataclass(frozen=True, slots=True)
class InFlight:
    """`lever` is None for a morph by hand."""

    lever: Lever | None
    heard_s: float

    def is_heard(self, at_s: float) -> bool:
        return at_s < self.heard_s + SILENT_S


@dataclass(frozen=True, slots=True)
class Refusal:
    """`count` times in a row a lever did not move, or should not have; the last time at `at_s`."""

    count: int
    at_s: float

    @classmethod
    def after(cls, before: Refusal | None, at_s: float) -> Refusal:
        is_in_a_row = before is not None and at_s < before.at_s + 2 * LONGEST_REST_S
        return cls(before.count + 1 if before and is_in_a_row else 1, at_s)

    def rests(self, at_s: float, cooldown_s: float) -> bool:
        """Doubles with every refusal: what blocks a lever (a precision floor, a full cache) may last."""
        rest_s = max(FIRST_REST_S, cooldown_s) * (1 << min(self.count, 16))
        return at_s < self.at_s + min(rest_s, max(LONGEST_REST_S, cooldown_s))


@dataclass(frozen=True, slots=True)
class Track:
    """One epoch of one instance. `pressure`, `ease`: windows in a row, up to `seen_s`."""

    epoch: int
    seen_s: float
    pressure: int = 0
    ease: int = 0
    morphed_s: float | None = None  # decided, or ended, last
    returned_s: float | None = None  # a way back was decided last
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)
    refusals: Mapping[Lever, Refusal] = field(default_factory=dict)

    def decided(self, lever: Lever, at_s: float) -> Track:
        """Starts the cool-down. Layers that went back a moment ago and are swapped again show that a way
        back was too early: the next one waits longer, so that a load that swings does not swing the shape."""
        track = replace(self, morphed_s=at_s, returned_s=at_s if lever == "swap_up" else self.returned_s)
        if lever == "swap_down" and self.returned_s is not None and at_s < self.returned_s + REGRET_S:
            track = replace(track, returned_s=None).refused("swap_up", at_s)
        return track

    def refused(self, lever: Lever, at_s: float) -> Track:
        refusal = Refusal.after(self.refusals.get(lever), at_s)
        return replace(self, refusals={**self.refusals, lever: refusal})

    def is_morphing(self, at_s: float) -> bool:
        return any(morph.is_heard(at_s) for morph in self.in_flight.values())

    def is_cooling(self, at_s: float, cooldown_s: float) -> bool:
        return self.morphed_s is not None and at_s < self.morphed_s + cooldown_s

    def rests(self, lever: Lever, at_s: float, cooldown_s: float) -> bool:
        refusal = self.refusals.get(lever)
        return refusal is not None and refusal.rests(at_s, cooldown_s)


@dataclass(frozen=True, slots=True)
class State:
    """`revision`: of the policy under which the windows were counted."""

    tracks: Mapping[str, Track] = field(default_factory=dict)
    revision: int = 0

    def with_track(self, instance: str, track: Track) -> State:
        return replace(self, tracks={**self.tracks, instance: track})


def sent(state: State, instance: str, lever: Lever, morph_id: str, at_s: float) -> State:
    """A decision is on its way to its worker. KeyError for an instance that nothing was decided for."""
    track = state.tracks[instance]
    in_flight = {name: morph for name, morph in track.in_flight.items() if morph.is_heard(at_s)}
    in_flight[morph_id] = InFlight(lever, at_s)
    return state.with_track(instance, replace(track, in_flight=in_flight))


def observe(state: State, report: MorphReport, at_s: float) -> State:
    """A worker says where a morph is, ours or one by hand."""
    track = state.tracks.get(report.target)
    if track is None or report.epoch > track.epoch:
        track = Track(report.epoch, at_s)
    elif report.epoch < track.epoch:
        return state
    in_flight = dict(track.in_flight)
    lever = morph.lever if (morph := in_flight.pop(report.id, None)) else None
    if report.state == "running":
        in_flight[report.id] = InFlight(lever, at_s)
    else:
        track = _ended(track, report, lever, at_s)
    return state.with_track(report.target, replace(track, in_flight=in_flight))


def _ended(track: Track, report: MorphReport, lever: Lever | None, at_s: float) -> Track:
    """A failed one may have changed some layers, so it starts the cool-down too."""
    if report.state in ("applied", "failed"):
        track = replace(track, morphed_s=at_s)
    if lever is None or report.state == "stale":
        return track
    # An applied resize took what it could: the same pages would be asked for again at once.
    if report.state != "applied" or lever == "resize":
        return track.refused(lever, at_s)
    if lever == "swap_down":
        return replace(track, refusals={name: one for name, one in track.refusals.items() if name != lever})
    return track  # of a way back only time tells whether it was right
