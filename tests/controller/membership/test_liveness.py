"""The verdict on dead workers: pictures in, changes out, no clock and no Redis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from controller.membership.liveness import Known, MembershipChange, RegistryView, Sighting, decide

GRACE_S, GONE_AFTER_S = 2.0, 60.0


class Watch:
    """The controller's memory, fed with pictures by hand."""

    def __init__(self) -> None:
        self.known = Known()

    def see(self, at_s: float, *sightings: Sighting, **trouble: bool) -> list[MembershipChange]:
        picture = RegistryView(at_s=at_s, sightings=sightings, **trouble)
        self.known, changes = decide(self.known, picture, grace_s=GRACE_S, gone_after_s=GONE_AFTER_S)
        return changes


def alive(worker: str = "w0", epoch: int = 1) -> Sighting:
    return Sighting(worker, lease_epoch=epoch, card_epoch=epoch)


def dead(worker: str = "w0", epoch: int = 1) -> Sighting:
    return Sighting(worker, lease_epoch=None, card_epoch=epoch)


def told(changes: Iterable[MembershipChange]) -> list[tuple[str, str, int]]:
    return [(d.verdict, d.worker, d.epoch) for d in changes]


def watching(*sightings: Sighting) -> Watch:
    """A watch that has seen these at 0 s and has no grace left at 10 s."""
    watch = Watch()
    watch.see(0, *sightings)
    return watch


def test_a_worker_that_registers_is_told_once() -> None:
    watch = watching()
    assert told(watch.see(10, alive())) == [("worker_joined", "w0", 1)]
    assert watch.see(11, alive()) == []


def test_workers_that_were_there_before_the_controller_are_told_as_such() -> None:
    (change,) = Watch().see(0, alive())
    assert change.verdict == "worker_joined"
    assert "when the controller started" in change.reason


def test_a_card_without_a_lease_is_a_death_told_once_with_its_epoch() -> None:
    watch = watching(alive("w0", 1), alive("w1", 5))
    assert told(watch.see(10, dead("w0", 1), alive("w1", 5))) == [("worker_lost", "w0", 1)]
    assert watch.see(11, dead("w0", 1), alive("w1", 5)) == []


def test_neither_lease_nor_card_is_a_clean_exit() -> None:
    watch = watching(alive())
    assert told(watch.see(10)) == [("worker_left", "w0", 1)]
    assert watch.see(11) == []


def test_a_new_epoch_in_the_lease_voids_the_one_before() -> None:
    watch = watching(alive("w0", 1))
    (change,) = watch.see(10, alive("w0", 2))
    assert (change.verdict, change.epoch, change.previous) == ("epoch_changed", 2, 1)
    assert watch.see(11, alive("w0", 2)) == []


def test_a_worker_that_comes_back_after_its_death_joins_again() -> None:
    watch = watching(alive("w0", 1))
    watch.see(10, dead("w0", 1))
    assert told(watch.see(20, alive("w0", 2))) == [("worker_joined", "w0", 2)]
    assert watch.see(100, alive("w0", 2)) == []  # nothing of it is removed


def test_what_a_dead_worker_left_is_removed_after_a_while() -> None:
    watch = watching(alive())
    watch.see(10, dead())
    assert watch.see(69, dead()) == []
    assert told(watch.see(70, dead())) == [("gone", "w0", 1)]


def test_no_death_within_the_grace_after_redis_was_away() -> None:
    watch = watching(alive("w0", 1), alive("w1", 1))
    assert watch.see(10, dead("w0"), dead("w1"), unsettled=True) == []
    assert watch.see(11, dead("w0"), dead("w1")) == []
    assert told(watch.see(11.5, dead("w0"), alive("w1", 2))) == [("epoch_changed", "w1", 2)]
    assert told(watch.see(12, dead("w0"), alive("w1", 2))) == [("worker_lost", "w0", 1)]


def test_lost_data_is_no_clean_exit_of_everybody() -> None:
    watch = watching(alive("w0", 1), alive("w1", 1))
    assert watch.see(10, unsettled=True, data_lost=True) == []
    assert told(watch.see(11, alive("w1", 2))) == [("epoch_changed", "w1", 2)]
    (change,) = watch.see(12, alive("w1", 2))
    assert (change.verdict, change.worker) == ("worker_lost", "w0")
    assert "did not come back" in change.reason


def test_after_lost_data_a_worker_that_registered_and_then_left_has_left() -> None:
    watch = watching(alive("w0", 1))
    watch.see(10, unsettled=True, data_lost=True)
    watch.see(11, alive("w0", 2))
    assert told(watch.see(12)) == [("worker_left", "w0", 2)]


def test_the_dead_of_before_the_controllers_start_are_told_after_the_grace() -> None:
    watch = Watch()
    assert watch.see(0, dead("w0", 7)) == []
    assert told(watch.see(2, dead("w0", 7))) == [("worker_lost", "w0", 7)]


def test_a_member_without_lease_and_card_is_removed_without_an_obituary() -> None:
    watch = watching(Sighting("w0", None, None))
    assert watch.see(10, Sighting("w0", None, None)) == []
    assert told(watch.see(70, Sighting("w0", None, None))) == [("gone", "w0", 0)]


sightings = st.builds(
    lambda worker, lease, card: Sighting(f"w{worker}", lease, card),
    st.integers(0, 2),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 4),
)
pictures = st.tuples(
    st.floats(0.1, 5),
    st.lists(sightings, unique_by=lambda s: s.worker, max_size=3),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(pictures, max_size=25))
def test_whatever_is_seen_ends_and_beginnings_alternate_and_a_held_lease_is_never_lost(
    story: list[tuple[float, list[Sighting], bool, bool]],
) -> None:
    watch = Watch()
    here: dict[str, int] = {}
    now_s = 0.0
    for pause_s, seen, unsettled, data_lost in story:
        now_s += pause_s
        held = {s.worker: s.lease_epoch for s in seen if s.lease_epoch is not None}
        for change in watch.see(now_s, *seen, unsettled=unsettled or data_lost, data_lost=data_lost):
            _follow(here, change, held, unsettled or data_lost)
        assert here.items() >= held.items()
        assert watch.known.alive == here
        assert not watch.known.alive.keys() & watch.known.dead.keys()


def _follow(here: dict[str, int], change: MembershipChange, held: dict[str, Any], unsettled: bool) -> None:
    worker = change.worker
    match change.verdict:
        case "worker_joined":
            assert worker not in here
            here[worker] = change.epoch
        case "epoch_changed":
            assert here[worker] == change.previous != change.epoch
            here[worker] = change.epoch
        case "worker_lost" | "worker_left":
            assert worker not in held
            assert not unsettled
            assert here.pop(worker, change.epoch) == change.epoch
        case "gone":
            assert worker not in here
            assert worker not in held
