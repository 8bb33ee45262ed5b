"""The thread that copies beside steps, and the time that morphs may take at a boundary."""

from __future__ import annotations

import pytest

from worker.shape.copier import IDLE_TURN_S, URGENT_TURN_S, Copier, CopyJob, Pace, Pause


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
