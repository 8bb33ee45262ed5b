"""A member of a group is asked to leave, or Redis, a gateway or the controller go, while a degree changes:
faults 5, 9 and 18 of docs/faults.md where groups are concerned."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.load import Load
from tests.faults.morphs import NUM_LAYERS
from tests.faults.transforms import FOLLOWER, LEADER, MEMBERS, ONLY_FULL, Shapes, other, role, serving

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]
Report = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    """Use long leases and a long patience, so that nobody dies. Redis keeps what it has."""
    with serving(tmp_path_factory.mktemp("host"), ONLY_FULL, num_gateways=2, append_only=True) as shapes:
        yield shapes


def part(shapes: Shapes) -> None:
    shapes.apply(1, LEADER, FOLLOWER)
    shapes.assert_whole()


# ------------------------------------------------------------------------------------- members stop


@MEMBERS
def test_a_member_stopped_for_a_moment_is_waited_for(shapes: Shapes, victim: str) -> None:
    with shapes.service.explained():
        before = shapes.recomputed()
        streams = shapes.streams()
        order = shapes.upwards(LEADER, FOLLOWER)
        process = shapes.service.processes[victim]
        process.signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.signal(signal.SIGCONT)
        assert order.end()["state"] == "applied"
        shapes.assert_exact(streams)
        part(shapes)
        assert shapes.recomputed() == before


# ------------------------------------------------------------------------------------- members leave


@MEMBERS
@pytest.mark.parametrize("stage", ["on the way", "in the group"])
def test_a_member_asked_to_leave_costs_the_others_nothing(
    shapes: Shapes, stage: str, victim: str, report: Report
) -> None:
    service = shapes.service
    survivor = other(victim)
    with service.explained():
        before = shapes.recomputed()
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            shapes.upwards(LEADER, FOLLOWER, layers=2 if stage == "on the way" else NUM_LAYERS)
            load.mark()
            assert service.processes[victim].terminate(120) == 0
            load.recover(3)
            shapes.assert_exact(streams)
        assert load.failed == []
        shapes.wait_shape([survivor])
        assert shapes.recomputed() == before
        shapes.assert_whole_again()
    report(load.row(f"5 SIGTERM {role(victim)} {stage}"))


# ------------------------------------------------------------------------------------- what is around them


def test_redis_restarted_on_the_way_holds_nothing_up_but_the_news(shapes: Shapes, report: Report) -> None:
    service = shapes.service
    with service.explained():
        before = shapes.recomputed()
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            order = shapes.upwards(LEADER, FOLLOWER, layers=1)
            load.mark()
            service.processes["redis"].kill()
            service.start_redis()
            load.recover(3)
            assert order.end()["state"] == "applied"
            shapes.assert_exact(streams)
        part(shapes)
        assert shapes.recomputed() == before
    report(load.row("18 kill -9 Redis (AOF) as a degree changes"))


def test_redis_flushed_on_the_way_leaves_a_shape_that_serves(shapes: Shapes, report: Report) -> None:
    """Leases and cards are gone: everybody is somebody new, in the group that there is."""
    service = shapes.service
    with service.explained():
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            order = shapes.upwards(LEADER, FOLLOWER, layers=1)
            load.mark()
            with service.redis as client:
                client.flushall()
            load.recover(3)
            shapes.assert_exact(streams)
        assert order.end()["state"] in ("applied", "failed")
        shapes.wait_shape([LEADER, FOLLOWER])
        part(shapes)
        shapes.assert_whole_again()
    report(load.row("18 FLUSHALL as a degree changes"))


def test_the_gateway_that_ordered_it_killed_on_the_way_leaves_it_alone(
    shapes: Shapes, report: Report
) -> None:
    service = shapes.service
    there = Shapes(service, gateway=1)
    with service.explained():
        before = shapes.recomputed()
        with Load(service, clients=1) as load:
            load.warm(3)
            mine, lost = shapes.streams(), shapes.streams(gateway=1)
            order = there.upwards(LEADER, FOLLOWER)
            order.shapes = shapes
            load.mark()
            service.processes["gateway1"].kill()
            load.recover(3)
            assert order.end()["state"] == "applied"
            shapes.assert_exact(mine)
        assert all(one.finished().error is not None for one in lost)
        assert load.failed == []
        part(shapes)
        assert shapes.recomputed() == before
    report(load.row("9 kill -9 gateway that ordered a degree"))


def test_the_controller_killed_on_the_way_is_not_missed(shapes: Shapes, report: Report) -> None:
    service = shapes.service
    with service.explained():
        before = shapes.recomputed()
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            order = shapes.upwards(LEADER, FOLLOWER)
            load.mark()
            service.processes["controller"].kill()
            load.recover(3)
            assert order.end()["state"] == "applied"
            shapes.assert_exact(streams)
        assert load.failed == []
        part(shapes)
        assert shapes.recomputed() == before
    report(load.row("kill -9 controller as a degree changes"))
