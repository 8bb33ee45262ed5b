"""A member of a group is killed, at every stage of a change of degree: fault 11 of docs/faults.md."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bench.common.service import Service
from tests.faults.load import Load
from tests.faults.morphs import NUM_LAYERS
from tests.faults.transforms import FOLLOWER, LEADER, MEMBERS, ONLY_FULL, Order, Shapes, other, role, serving

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]
Report = Callable[[dict[str, Any]], None]

DEADLY = ONLY_FULL | {"WORKER__LEASE_S": "4"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shapes]:
    with serving(tmp_path_factory.mktemp("host"), DEADLY) as shapes:
        yield shapes


def asked(shapes: Shapes) -> Order:
    """The leader waits for the follower, who has not answered."""
    shapes.service.processes[FOLLOWER].signal(signal.SIGSTOP)
    return shapes.order(2, LEADER, FOLLOWER).met(0)


def settled(shapes: Shapes) -> Order:
    order = shapes.upwards(LEADER, FOLLOWER, layers=NUM_LAYERS)
    assert order.end()["state"] == "applied"
    return order


def downwards(shapes: Shapes, layers: int) -> Order:
    settled(shapes)
    return shapes.order(1, LEADER, FOLLOWER).met(layers)


STAGES: dict[str, Callable[[Shapes], Order]] = {
    "while the members are asked": asked,
    "as the boundary begins to go up": lambda shapes: shapes.upwards(LEADER, FOLLOWER, layers=1),
    "as the boundary is half-way up": lambda shapes: shapes.upwards(LEADER, FOLLOWER, layers=4),
    "in the settled group": settled,
    "as the boundary goes down": lambda shapes: downwards(shapes, 2),
    "as they part": lambda shapes: downwards(shapes, NUM_LAYERS),
}


@MEMBERS
@pytest.mark.parametrize("stage", STAGES)
def test_a_member_killed_costs_its_group_and_no_token(
    shapes: Shapes, stage: str, victim: str, report: Report
) -> None:
    service = shapes.service
    survivor = other(victim)
    with service.explained():
        before = shapes.recomputed()
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            order = STAGES[stage](shapes)
            load.mark()
            service.processes[victim].kill()
            _go_on(service)
            load.recover(3)
            assert any(one.thread.is_alive() for one in streams), "they ended too early to tell"
            shapes.assert_exact(streams)
        assert load.failed == []
        end = order.end()
        is_done = stage in ("in the settled group", "as they part")
        assert end["state"] == "failed" or is_done, end
        shapes.wait_shape([survivor])
        if stage == "while the members are asked":
            assert shapes.recomputed() == before
        elif stage != "as they part":
            assert shapes.recomputed() > 0
        shapes.assert_whole_again()
    report(load.row(f"11 kill -9 {role(victim)} {stage}"[:52]))


def _go_on(service: Service) -> None:
    if service.processes[FOLLOWER].is_alive:
        service.processes[FOLLOWER].signal(signal.SIGCONT)
