"""The thread that copies beside steps, and the time that morphs may take at a boundary."""

from __future__ import annotations

import math
import threading

import pytest

from worker.morph.manager import MorphManager
from worker.shape.copier import IDLE_TURN_S, STOP_S, URGENT_TURN_S, Copier, CopyJob, Pace, Pause


def test_the_rest_after_a_copy_delays_the_next_one_alone_and_ends_when_it_becomes_urgent() -> None:
    share, done = 1e-9, list[str]()

    def job(name: str) -> CopyJob:
        def copy(pause: Pause) -> None:
            done.append(name)

        return CopyJob(1, 1, copy)

    copier = Copier(lambda: None, lambda: share)
    try:
        first, second = copier.start(job("first")), copier.start(job("second"))
        assert copier.wait(10.0) and first.is_whole
        assert not second.is_done and done == ["first"]  # the rest takes minutes
        share = 1.0
        assert copier.wait(10.0) and second.is_whole
        assert not copier.wait(10.0)  # there is none to wait for
    finally:
        copier.close()


class Endless:
    """A job that ends only when it is stopped."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    def job(self, nbytes: int) -> CopyJob:
        def copy(pause: Pause) -> None:
            self.has_begun.set()
            while True:
                pause()

        return CopyJob(nbytes, nbytes, copy)


@pytest.mark.parametrize("share", [1.0, 1e-9])
def test_a_copier_that_is_closed_stops_what_runs_and_never_begins_what_waits(share: float) -> None:
    running, waiting = Endless(), Endless()
    copier = Copier(lambda: None, lambda: share)
    first, second = copier.start(running.job(1)), copier.start(waiting.job(1))
    thread = copier._thread
    assert thread and running.has_begun.wait(10.0)
    copier.close()
    assert not thread.is_alive() and not waiting.has_begun.is_set()
    assert first.is_done and second.is_done and not (first.is_whole or second.is_whole)


def test_work_that_was_abandoned_while_it_waited_never_begins() -> None:
    running, waiting, after = Endless(), Endless(), Endless()
    copier = Copier(lambda: None)
    try:
        first, second, third = (copier.start(each.job(0)) for each in (running, waiting, after))
        assert running.has_begun.wait(10.0)
        second.abandon()
        assert second.is_done and not second.is_whole
        first.abandon()
        assert after.has_begun.wait(10.0) and not waiting.has_begun.is_set() and not third.is_done
    finally:
        copier.close()


def test_an_engine_that_waits_for_its_next_batch_is_busy_for_copies() -> None:
    done = threading.Event()
    manager = MorphManager("w0", {})
    copier = manager.make_copier(1e-9)
    try:
        manager.advance(is_busy=False, busy_until=math.inf)
        copier.start(CopyJob(1, 1, lambda pause: None))
        assert copier.wait(STOP_S)
        second = copier.start(CopyJob(1, 1, lambda pause: done.set()))
        for is_busy in (True, False, True, False):  # a batch runs, and the next is not here yet
            manager.advance(is_busy, busy_until=math.inf)
            assert not done.wait(0.03)
        manager.advance(is_busy=False, busy_until=0.0)  # idle
        assert done.wait(STOP_S) and (copier.wait(0.5) or second.is_whole)
    finally:
        manager.close()


@pytest.mark.parametrize(
    ("passed_s", "at_least", "left_s"),
    [
        (0.03, 0.0, 0.0),
        (0.001, 0.5, URGENT_TURN_S / 2),
        (0.03, 1.0, URGENT_TURN_S),
        (9.0, 1.0, URGENT_TURN_S),
    ],
)
def test_an_urgent_morph_may_take_time_ahead_and_the_steps_after_it_pay(
    passed_s: float, at_least: float, left_s: float
) -> None:
    now = 0.0
    pace = Pace(0.02, lambda: now)
    now += passed_s
    pace.begin(is_busy=True, at_least=at_least)
    assert pace.has_time and pace.left_s == pytest.approx(left_s)
    now += 0.1
    assert pace.spent() == pytest.approx(0.1) and not pace.has_time
    now += 1.0  # the steps after it pay for it, and a fiftieth of a second is too little
    pace.begin(is_busy=True)
    assert not pace.has_time
    pace.begin(is_busy=True, at_least=1.0)
    assert not pace.has_time  # what is urgent pays, too
    pace.begin(is_busy=False)
    assert pace.left_s == IDLE_TURN_S
