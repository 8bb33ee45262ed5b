"""What the controller remembers of each instance: windows in a row, morphs in flight, refusals; and of what
waits for a group. Pure.

Time is Redis' clock, as the ids of the entries tell it, in seconds: metrics and reports bring their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bus.messages import MorphReport

Lever = Literal["resize", "swap_down", "swap_up", "scale_up", "scale_down"]

SILENT_S = 60.0  # a morph nobody reported on for so long holds nothing back any more
FORGET_S = 600.0  # an instance that was not heard of for so long
FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0
REGRET_S = 30.0  # what went back and must go forth again so soon went back too early


@dataclass(frozen=True, slots=True)
class PendingMorph:
    """`lever` is None for a morph by hand."""

    lever: Lever | None
    heard_s: float

    def is_heard(self, at_s: float) -> bool:
        return at_s < self.heard_s + SILENT_S


@dataclass(frozen=True, slots=True)
class RetryPause:
    """`count` times in a row a lever did not move, or should not have; the last time at `at_s`."""

    count: int
    at_s: float

    @classmethod
    def after(cls, before: RetryPause | None, at_s: float) -> RetryPause:
        return cls(before.count + 1 if before and before.is_in_a_row(at_s) else 1, at_s)

    def is_in_a_row(self, at_s: float) -> bool:
        """Whether one now would be the next of the same kind, and no news."""
        return at_s < self.at_s + 2 * LONGEST_REST_S

    def rests(self, at_s: float, cooldown_s: float) -> bool:
        return at_s < self.at_s + self.rest_s(cooldown_s)

    def rest_s(self, cooldown_s: float) -> float:
        """Doubles with every refusal: what blocks a lever (a precision floor, a full cache) may last."""
        rest_s = max(FIRST_REST_S, cooldown_s) * (1 << min(self.count, 16))
        return min(rest_s, max(LONGEST_REST_S, cooldown_s))


@dataclass(frozen=True, slots=True)
class Track:
    """One epoch of one instance. `pressure`, `ease`: windows in a row, up to `seen_s`; `parting`: windows in
    a row in which this group could part, `parting_since_s` up to `parting_s`."""

    epoch: int
    seen_s: float
    pressure: int = 0
    ease: int = 0
    morphed_s: float | None = None  # decided, or ended, last
    returned_s: float | None = None  # a way back of layers was decided last
    raised_s: float | None = None  # a scale-up of it was decided, or ended, last
    busy_s: float = float("-inf")  # it had something to do last
    parting: int = 0
    parting_since_s: float = 0.0
    parting_s: float = 0.0
    in_flight: Mapping[str, PendingMorph] = field(default_factory=dict)
    refusals: Mapping[Lever, RetryPause] = field(default_factory=dict)

    def decided(self, lever: Lever, at_s: float) -> Track:
        """Starts the cool-down. Layers that went back a moment ago and are swapped again show that a way
        back was too early: the next one waits longer, so that a load that swings does not swing the shape."""
        track = replace(self, morphed_s=at_s, returned_s=at_s if lever == "swap_up" else self.returned_s)
        if lever == "scale_up":
            return replace(track, raised_s=at_s)
        if lever == "swap_down" and self.returned_s is not None and at_s < self.returned_s + REGRET_S:
            track = replace(track, returned_s=None).refused("swap_up", at_s)
        return track

    def refused(self, lever: Lever, at_s: float) -> Track:
        refusal = RetryPause.after(self.refusals.get(lever), at_s)
        return replace(self, refusals={**self.refusals, lever: refusal})

    def is_morphing(self, at_s: float) -> bool:
        return any(morph.is_heard(at_s) for morph in self.in_flight.values())

    def is_cooling(self, at_s: float, cooldown_s: float) -> bool:
        return self.morphed_s is not None and at_s < self.morphed_s + cooldown_s

    def rests(self, lever: Lever, at_s: float, cooldown_s: float) -> bool:
        refusal = self.refusals.get(lever)
        return refusal is not None and refusal.rests(at_s, cooldown_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one gateway told of one model: requests that no instance holds, the longest of `tokens`; told so
    many times in a row."""

    tokens: int
    count: int
    told: int
    since_s: float
    heard_s: float


@dataclass(frozen=True, slots=True)
class State:
    """`revision`: of the policy under which the windows were counted. `waiting`: by gateway and model.
    `parted_s`: when a group of the model parted last; `regrets`: that it was too early."""

    tracks: Mapping[str, Track] = field(default_factory=dict)
    revision: int = 0
    waiting: Mapping[tuple[str, str], Waiting] = field(default_factory=dict)
    parted_s: Mapping[str, float] = field(default_factory=dict)
    regrets: Mapping[str, RetryPause] = field(default_factory=dict)

    def with_track(self, instance: str, track: Track) -> State:
        return replace(self, tracks={**self.tracks, instance: track})


def sent(state: State, instance: str, lever: Lever, morph_id: str, at_s: float) -> State:
    """A decision is on its way to its worker. KeyError for an instance that nothing was decided for."""
    track = state.tracks[instance]
    in_flight = {name: morph for name, morph in track.in_flight.items() if morph.is_heard(at_s)}
    in_flight[morph_id] = PendingMorph(lever, at_s)
    return state.with_track(instance, replace(track, in_flight=in_flight))


def unsent(state: State, morph_id: str) -> State:
    """The bus did not take the command."""
    for name, track in state.tracks.items():
        if morph_id in track.in_flight:
            in_flight = {other: morph for other, morph in track.in_flight.items() if other != morph_id}
            state = state.with_track(name, replace(track, in_flight=in_flight))
    return state


def observe(state: State, report: MorphReport, at_s: float) -> State:
    """A worker says where a morph is, ours or one by hand. A transform is one of all its members."""
    track = state.tracks.get(report.target)
    if track is None or report.epoch > track.epoch:
        track = Track(report.epoch, at_s)
    elif report.epoch < track.epoch:
        return state
    state = state.with_track(report.target, _observed(track, report, at_s))
    model = model_of(report.target)
    for name, other in state.tracks.items():
        takes_part = model_of(name) == model and name.rpartition("@")[2] in report.workers
        if name != report.target and (takes_part or report.id in other.in_flight):
            state = state.with_track(name, _observed(other, report, at_s))
    return state


def model_of(instance: str) -> str:
    """Instances are named "{model}@{worker}"."""
    return instance.rpartition("@")[0]


def _observed(track: Track, report: MorphReport, at_s: float) -> Track:
    in_flight = dict(track.in_flight)
    lever = morph.lever if (morph := in_flight.pop(report.id, None)) else None
    if report.state == "running":
        in_flight[report.id] = PendingMorph(lever, at_s)
    else:
        track = _ended(track, report, lever, at_s)
    return replace(track, in_flight=in_flight)


def _ended(track: Track, report: MorphReport, lever: Lever | None, at_s: float) -> Track:
    """A failed one may have changed some layers, so it starts the cool-down too."""
    if report.state in ("applied", "failed"):
        track = replace(track, morphed_s=at_s)
    if report.state == "applied" and lever == "scale_up":
        track = replace(track, raised_s=at_s)
    if lever is None or report.state == "stale":
        return track
    # An applied resize took what it could: the same pages would be asked for again at once.
    if report.state != "applied" or lever == "resize":
        return track.refused(lever, at_s)
    if lever in ("swap_down", "scale_up"):
        return replace(track, refusals={name: one for name, one in track.refusals.items() if name != lever})
    return track  # of a way back only time tells whether it was right
