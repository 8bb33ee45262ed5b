"""Workers of two hosts, a group and a pipeline among them, while one host is cut off.

Its link goes down; no connection is closed, and its processes run on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from bench.common.service import Service, wait_for
from bus.messages import Stage
from tests.faults.load import Load
from tests.faults.morphs import settings
from tests.faults.test_pipeline_deaths import LAYERS, complete, deploy, shape_of, two_stages
from tests.faults.transforms import ONLY_FULL, Shapes
from tests.support.hosts import Network, why_not

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]
Report = Callable[[dict[str, Any]], None]

LEASE_S, GROUP_TIMEOUT_S = 4, 12
QUICK = ONLY_FULL | {"WORKER__LEASE_S": str(LEASE_S), "WORKER__GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S)}
HOST_OF = {"w0": 0, "w1": 0, "w2": 1, "w3": 1}
NEAR, FAR = 0, 1  # the host that stays, and the one that is cut off
TOKENS = 800


@dataclass
class TwoHosts(Service):
    """Workers on two hosts; everything else is on this machine."""

    network: Network = field(default_factory=Network)
    start_s: ClassVar[float] = 400.0  # four workers that compile at once

    def command(self, name: str, module: str) -> list[str]:
        words = super().command(name, module)
        return self.network.command(HOST_OF[name]) + words if name in HOST_OF else words

    def add(self, name: str, module: str, **env: str) -> Any:
        if name in HOST_OF:
            env["INSTAR_WORKER__GROUP_HOST"] = self.network.address(HOST_OF[name])
            env["INSTAR_REDIS__URL"] = f"redis://{self.network.own_address}:{self.redis_port}/0"
        return super().add(name, module, **env)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TwoHosts, Shapes]]:
    if reason := why_not():
        pytest.skip(reason)
    with Network() as network:
        redis_args = ("--bind", "127.0.0.1", network.own_address, "--protected-mode", "no")
        quick = settings(tmp_path_factory.mktemp("host"), QUICK)
        with TwoHosts(num_workers=4, network=network, redis_args=redis_args, settings=quick) as service:
            with service.explained():
                shapes = Shapes(service).learn()
            yield service, shapes


@pytest.fixture
def hosts(cluster: tuple[TwoHosts, Shapes]) -> Iterator[tuple[TwoHosts, Shapes]]:
    yield cluster
    service, shapes = cluster
    service.network.mend(FAR)
    service.wait_ready()
    for workers in shapes.shape():
        if len(workers) > 1:
            shapes.apply(1, *workers)


def test_a_group_goes_on_and_takes_over_the_requests_of_a_host_that_is_cut_off(
    hosts: tuple[TwoHosts, Shapes], report: Report
) -> None:
    service, shapes = hosts
    with service.explained():
        shapes.apply(2, "w0", "w1")
        shapes.wait_shape(["w0", "w1"], ["w2"], ["w3"])
        with Load(service, clients=1) as load:
            load.warm(3)
            streams = shapes.streams()
            before, epochs = service.metric("instar_request_replays_total"), epochs_of(service)
            load.mark()
            service.network.cut(FAR)
            wait_for("the far workers to be missed", lambda: service.serving_workers() == {"w0", "w1"}, 60)
            load.recover(3)
            shapes.assert_exact(streams, TOKENS)
        assert load.failed == []
        assert service.metric("instar_request_replays_total") > before, "some ran on the far host"
        assert shapes.shape() == [["w0", "w1"]]
        service.network.mend(FAR)
        shapes.wait_shape(["w0", "w1"], ["w2"], ["w3"], within_s=60)
        now = epochs_of(service)
        assert {name for name in now if now[name] != epochs[name]} == {"w2", "w3"}
        shapes.assert_exact(shapes.streams(120), 120)
    report(load.row("22 a host cut off beyond its lease"))


def test_a_pipeline_over_both_hosts_ends_and_its_requests_go_on_at_the_near_one(
    hosts: tuple[TwoHosts, Shapes],
) -> None:
    service, _ = hosts
    with service.explained():
        deploy(service, *two_stages(["w0"], ["w2"]))
        assert shape_of(service, "long@w0") == (1, 2, ["w0", "w2"])
        wanted, texts = complete(service, "demo"), list[str]()
        asking = threading.Thread(target=lambda: texts.append(complete(service, "long")))
        asking.start()
        wait_for("its first step", lambda: service.metric("instar_num_requests_running"), every_s=0.01)
        deploy(service, Stage(workers=["w1"], first=0, end=LAYERS))
        assert asking.is_alive()
        service.network.cut(FAR)
        wait_for("the pipeline to go", lambda: shape_of(service, "long@w0") is None, 60)
        asking.join(90)
        assert texts == [wanted]
        assert complete(service, "long") == wanted


def epochs_of(service: Service) -> dict[str, int]:
    return {one["id"]: one["epoch"] for one in service.state()["workers"]}
