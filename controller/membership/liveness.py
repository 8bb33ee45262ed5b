"""The workers that are there, and those that are gone. Pure: pictures in, changes out.

A card without a lease means death; a clean exit removes both. A missing lease proves nothing right after
Redis was away: death waits for a grace from when Redis answers again, and from the controller's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["worker_joined", "epoch_changed", "worker_lost", "worker_left", "gone"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """One registered worker: the epochs of its lease and its card, None if that is missing."""

    worker: str
    lease_epoch: int | None
    card_epoch: int | None


@dataclass(frozen=True, slots=True)
class RegistryView:
    """The registry at one moment. `unsettled`: Redis was away, restarted or lost its data since the last."""

    at_s: float
    sightings: tuple[Sighting, ...]
    unsettled: bool = False
    data_lost: bool = False


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A change of one worker. `gone` asks for the removal of what it left; others become events."""

    verdict: Verdict
    worker: str
    epoch: int
    reason: str
    previous: int | None = None  # the epoch before an epoch_changed


@dataclass(frozen=True, slots=True)
class Known:
    """The conclusions so far. `alive`: worker -> epoch. `dead`: worker -> (epoch, since when).

    `wiped`: alive before Redis lost its data and not seen since; without a card they have not left.
    """

    alive: Mapping[str, int] = field(default_factory=dict)
    dead: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    wiped: frozenset[str] = frozenset()
    grace_until_s: float | None = None  # None: nothing was seen yet


def decide(
    known: Known, view: RegistryView, *, grace_s: float, gone_after_s: float
) -> tuple[Known, list[MembershipChange]]:
    """Return what is known now, and what has changed."""
    seen = {sighting.worker: sighting for sighting in view.sightings}
    leases = {s.worker: s.lease_epoch for s in view.sightings if s.lease_epoch is not None}
    starting = known.grace_until_s is None
    grace_until_s = known.grace_until_s or 0.0
    if starting or view.unsettled:
        grace_until_s = view.at_s + grace_s
    wiped = (known.wiped | (known.alive.keys() if view.data_lost else set())) - leases.keys()

    changes = list(_arrivals(known, leases, starting))
    alive = dict(known.alive) | leases
    dead = {worker: state for worker, state in known.dead.items() if worker not in leases}
    if view.at_s >= grace_until_s:
        departures = list(_departures(alive, dead, seen, leases, wiped))
        for change in departures:
            alive.pop(change.worker, None)
            dead[change.worker] = (change.epoch, view.at_s)
        changes += departures
        wiped = frozenset()
        for worker in seen.keys() - leases.keys() - dead.keys():  # without a card its epoch is unknown
            dead[worker] = (0, view.at_s)
        changes += _forgotten(dead, view.at_s - gone_after_s)
    for change in changes:
        if change.verdict == "gone":
            del dead[change.worker]
    return Known(alive=alive, dead=dead, wiped=frozenset(wiped), grace_until_s=grace_until_s), changes


def _arrivals(known: Known, leases: Mapping[str, int], starting: bool) -> Iterable[MembershipChange]:
    for worker, epoch in sorted(leases.items()):
        previous = known.alive.get(worker)
        if previous is None:
            reason = "was there when the controller started" if starting else "registered"
            yield MembershipChange("worker_joined", worker, epoch, reason)
        elif previous != epoch:
            reason = "registered again: it lost its lease or was started anew"
            yield MembershipChange("epoch_changed", worker, epoch, reason, previous)


def _departures(
    alive: Mapping[str, int],
    dead: Mapping[str, tuple[int, float]],
    seen: Mapping[str, Sighting],
    leases: Mapping[str, int],
    wiped: Iterable[str],
) -> Iterable[MembershipChange]:
    for worker, epoch in sorted(alive.items()):
        if worker in leases:
            continue
        if worker in seen:
            yield MembershipChange("worker_lost", worker, epoch, "its lease ran out")
        elif worker in wiped:
            reason = "it did not come back after Redis lost its data"
            yield MembershipChange("worker_lost", worker, epoch, reason)
        else:
            yield MembershipChange("worker_left", worker, epoch, "it stopped and released its lease")
    for worker, sighting in sorted(seen.items()):
        if worker not in alive and worker not in dead and sighting.card_epoch is not None:
            reason = "its lease had run out before the controller looked"
            yield MembershipChange("worker_lost", worker, sighting.card_epoch, reason)


def _forgotten(dead: Mapping[str, tuple[int, float]], before_s: float) -> Iterable[MembershipChange]:
    for worker, (epoch, since_s) in sorted(dead.items()):
        if since_s <= before_s:
            yield MembershipChange("gone", worker, epoch, "it did not come back")
