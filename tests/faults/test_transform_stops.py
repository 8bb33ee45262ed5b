"""A member of a group is stopped and continued: faults 10 and 22 of docs/faults.md."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.common.service import wait_for
from tests.faults.load import Load
from tests.faults.morphs import NUM_LAYERS
from tests.faults.transforms import FOLLOWER, LEADER, MEMBERS, ONLY_FULL, Shapes, other, role, serving

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]
Report = Callable[[dict[str, Any]], None]

LEASE_S, GROUP_TIMEOUT_S = 4, 12
QUICK = ONLY_FULL | {"WORKER__LEASE_S": str(LEASE_S), "WORKER__GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    with serving(tmp_path_factory.mktemp("host"), QUICK) as shapes:
        yield shapes


@MEMBERS
def test_a_member_stopped_beyond_its_lease_is_somebody_new_in_the_same_group(
    shapes: Shapes, victim: str, report: Report
) -> None:
    """Requests of the stopped worker go on elsewhere; those of the other stand still, and are not redone."""
    service, process = shapes.service, shapes.service.processes[victim]
    with service.explained():
        before = shapes.recomputed()
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            shapes.upwards(LEADER, FOLLOWER)
            load.mark()
            process.signal(signal.SIGSTOP)
            time.sleep(LEASE_S + 3)
            process.signal(signal.SIGCONT)
            load.recover(3)
            shapes.assert_exact(streams)
        assert load.failed == []
        shapes.wait_shape([LEADER, FOLLOWER])
        assert shapes.recomputed() <= before  # a new epoch counts from 0
        shapes.apply(1, LEADER, FOLLOWER)
        shapes.assert_whole()
    report(load.row(f"22 SIGSTOP {role(victim)} beyond its lease"))


@MEMBERS
@pytest.mark.parametrize("stage", ["on the way", "in the group"])
def test_a_member_stopped_beyond_the_groups_patience_is_left_and_finds_itself_alone(
    shapes: Shapes, stage: str, victim: str, report: Report
) -> None:
    service, process = shapes.service, shapes.service.processes[victim]
    with service.explained():
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            order = shapes.upwards(LEADER, FOLLOWER, layers=2 if stage == "on the way" else NUM_LAYERS)
            load.mark()
            process.signal(signal.SIGSTOP)
            wait_for("the other to serve alone", lambda: [other(victim)] in shapes.shape(), 60)
            load.recover(3)
            process.signal(signal.SIGCONT)
            shapes.assert_exact(streams)
        assert load.failed == []
        assert order.end()["state"] in ("failed", "applied")
        shapes.assert_whole_again()
    report(load.row(f"10 SIGSTOP {role(victim)} {stage}"))
