"""The memory of the controller for each instance: windows in a row, pending morphs, refusals. Pure.

Time is Redis' clock in seconds, from the ids of entries: metrics and reports bring their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bus.morphs import MorphReport

Lever = Literal["scale_up", "scale_down", "level", "swap"]  # level: to the layers of other members

SILENT_S = 60.0  # a morph without a report for so long blocks nothing any more
FORGET_S = 600.0  # the time after which an instance that is not seen is forgotten
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
SWAP_SEEN_S = 2.0  # after so long metrics show a swap
REPORT_S = 0.2  # a report that a worker made so long after a swap shows it
REGRET_S = 30.0  # a group that is made again within this time parted too early


@dataclass(frozen=True, slots=True)
class Freshness:
    """A report older than `stale_s` is not used; windows more than `gap_s` apart are not in a row."""

    stale_s: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class PendingMorph:
    """A morph under way. `lever` is None for one that the controller did not order."""

    lever: Lever | None
    heard_s: float
    is_local: bool = False  # a swap, a resize or a KV conversion, by hand or by the reflex

    @property
    def is_ordered(self) -> bool:
        return self.lever is not None or not self.is_local

    def is_heard(self, at_s: float) -> bool:
        """Return True unless its worker has been silent for SILENT_S."""
        return at_s < self.heard_s + SILENT_S


@dataclass(frozen=True, slots=True)
class RetryPause:
    """`count` times in a row a lever did not move, or should not have; the last time at `at_s`."""

    count: int
    at_s: float

    @classmethod
    def after(cls, before: RetryPause | None, at_s: float) -> RetryPause:
        """Return the pause after one more refusal."""
        return cls(before.count + 1 if before and before.is_in_a_row(at_s) else 1, at_s)

    def is_in_a_row(self, at_s: float) -> bool:
        """Return True if a refusal now would continue the row."""
        return at_s < self.at_s + 2 * LONGEST_PAUSE_S

    def seconds(self, cooldown_s: float) -> float:
        """Return the pause; it doubles with every refusal, whose cause (a full cache) may last."""
        pause_s = max(FIRST_PAUSE_S, cooldown_s) * (1 << min(self.count, 16))
        return min(pause_s, max(LONGEST_PAUSE_S, cooldown_s))


@dataclass(frozen=True, slots=True)
class Track:
    """One epoch of one instance.

    `parting`: windows in a row in which this group could part, from `parting_since_s` to `parting_s`.
    """

    epoch: int
    seen_s: float
    morphed_s: float | None = None  # the last change of degree was decided, or ended
    raised_s: float | None = None  # time of the last scale-up's decision or end
    makes_way: bool = False  # that change parted a group, for a request that needs a larger one
    busy_s: float = float("-inf")  # time of the last load
    swapped_s: float = float("-inf")  # time of the last swap's decision or end: metrics may be older
    levelled_s: float = float("-inf")  # when it was to get, or keep, the layers that a group will have
    parting: int = 0
    parting_since_s: float = 0.0
    parting_s: float = 0.0
    pending: Mapping[str, PendingMorph] = field(default_factory=dict)
    pauses: Mapping[Lever, RetryPause] = field(default_factory=dict)

    def decided(self, lever: Lever, at_s: float, *, makes_way: bool = False) -> Track:
        """Start the cool-down; swaps have none."""
        if lever in ("level", "swap"):
            return replace(self, swapped_s=at_s)
        raised_s = at_s if lever == "scale_up" else self.raised_s
        return replace(self, morphed_s=at_s, raised_s=raised_s, makes_way=makes_way)

    def refused(self, lever: Lever, at_s: float) -> Track:
        """Lengthen the pause of `lever`."""
        return replace(self, pauses={**self.pauses, lever: RetryPause.after(self.pauses.get(lever), at_s)})

    def is_morphing(self, at_s: float, *, may_swap: bool = False) -> bool:
        """Return True if a morph of it is under way; may_swap: other than those `is_local`."""
        return any(one.is_heard(at_s) and (one.is_ordered or not may_swap) for one in self.pending.values())

    def is_parting(self, at_s: float) -> bool:
        """Return True while its group parts by an order of the controller."""
        return any(one.lever == "scale_down" and one.is_heard(at_s) for one in self.pending.values())

    def is_cooling(self, at_s: float, cooldown_s: float) -> bool:
        """Return True until a cool-down after the last change of degree, also by hand."""
        return self.morphed_s is not None and at_s < self.morphed_s + cooldown_s

    def is_paused(self, lever: Lever, at_s: float, cooldown_s: float) -> bool:
        """Return True while `lever` pauses after a refusal."""
        pause = self.pauses.get(lever)
        return pause is not None and at_s < pause.at_s + pause.seconds(cooldown_s)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests that no instance holds, as one gateway reported them `times` in a row."""

    tokens: int
    count: int
    times: int
    since_s: float
    heard_s: float


@dataclass(frozen=True, slots=True)
class State:
    """All that the controller remembers for the policy.

    `waiting`: by gateway and model. `parted_s`: when a group of each model parted last. `regrets`: pauses
    after groups that parted too early.
    """

    tracks: Mapping[str, Track] = field(default_factory=dict)
    waiting: Mapping[tuple[str, str], Waiting] = field(default_factory=dict)
    parted_s: Mapping[str, float] = field(default_factory=dict)
    regrets: Mapping[str, RetryPause] = field(default_factory=dict)

    def track(self, instance: str, epoch: int, at_s: float) -> Track:
        """Return the track of this epoch, or of a newer one; a fresh one if there is none."""
        track = self.tracks.get(instance)
        return Track(epoch, at_s) if track is None or track.epoch < epoch else track

    def reshaping(self, at_s: float) -> frozenset[str]:
        """Return the instances that become one group, or get equal layers for that."""
        return frozenset(
            name
            for name, track in self.tracks.items()
            if at_s < track.levelled_s + SWAP_SEEN_S
            or any(
                one.lever in ("scale_up", "level") and one.is_heard(at_s) for one in track.pending.values()
            )
        )

    def seeing(self, instances: Iterable[str], at_s: float, cooldown_s: float = 0.0) -> State:
        """Return the state in which these instances are there now, and others were forgotten.

        What an instance did is remembered for a cool-down at least.
        """
        there = set(instances)
        tracks = {
            name: replace(track, seen_s=at_s) if name in there else track
            for name, track in self.tracks.items()
            if name in there
            or at_s < track.seen_s + FORGET_S
            or track.is_cooling(at_s, cooldown_s)
            or track.is_morphing(at_s)
        }
        return replace(self, tracks=tracks)

    def with_track(self, instance: str, track: Track) -> State:
        """Return the state with another track of `instance`."""
        return replace(self, tracks={**self.tracks, instance: track})


def sent(state: State, instance: str, lever: Lever, morph_id: str, at_s: float) -> State:
    """Note that a decision goes to its worker. Raises KeyError for an instance without a track."""
    track = state.tracks[instance]
    pending = {name: morph for name, morph in track.pending.items() if morph.is_heard(at_s)}
    return state.with_track(instance, replace(track, pending=pending | {morph_id: PendingMorph(lever, at_s)}))


def unsent(state: State, morph_id: str) -> State:
    """Note that the bus did not take the command."""
    for name, track in state.tracks.items():
        if morph_id in track.pending:
            pending = {other: morph for other, morph in track.pending.items() if other != morph_id}
            state = state.with_track(name, replace(track, pending=pending))
    return state


def observe(state: State, report: MorphReport, at_s: float) -> State:
    """Note a worker's report on a morph, also by hand. A transform is a morph of all its members."""
    track = state.track(report.target, report.epoch, at_s)
    if report.epoch < track.epoch:
        return state
    state = state.with_track(report.target, _observed(track, report, at_s))
    model = model_of(report.target)
    for name, other in state.tracks.items():
        takes_part = model_of(name) == model and name.rpartition("@")[2] in report.workers
        if name != report.target and (takes_part or report.id in other.pending):
            state = state.with_track(name, _observed(other, report, at_s))
    return state


def model_of(instance: str) -> str:
    """Return the model of an instance, which is named "{model}@{worker}"."""
    return instance.rpartition("@")[0]


def _observed(track: Track, report: MorphReport, at_s: float) -> Track:
    pending = dict(track.pending)
    lever = morph.lever if (morph := pending.pop(report.id, None)) else None
    if report.state == "running":
        pending[report.id] = PendingMorph(lever, at_s, report.kind in ("swap", "resize", "kv"))
    else:
        track = _ended(track, report, lever, at_s)
    return replace(track, pending=pending)


def _ended(track: Track, report: MorphReport, lever: Lever | None, at_s: float) -> Track:
    is_change = report.numbers.get("tp_before") != report.numbers.get("tp_after")
    if report.state == "applied" and (report.kind == "deploy" or (report.kind == "transform" and is_change)):
        track = replace(track, morphed_s=at_s, makes_way=track.makes_way and lever == "scale_down")
    if report.state == "applied" and lever == "scale_up":
        track = replace(track, raised_s=at_s)
    if report.kind in ("swap", "kv") and lever:
        track = replace(track, swapped_s=at_s)
    if lever is None or report.state == "stale":
        return track
    if report.state != "applied":
        track = replace(track, raised_s=None) if lever == "scale_up" else track  # others may be tried
        return track.refused(lever, at_s)
    if lever != "scale_down":
        return replace(track, pauses={name: one for name, one in track.pauses.items() if name != lever})
    return track
