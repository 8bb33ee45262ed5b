"""Redis dies, forgets, freezes, fills up, or the road to it is bad: faults 18-21, 23 of docs/faults.md."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bench.common.service import LEASE_S, Service, free_port, wait_for
from tests.faults.conftest import heal
from tests.faults.load import Load, complete, disturbed, only_clean_refusals
from tests.faults.proxy import FaultProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
Report = Callable[[dict[str, Any]], None]
GROUP = "workers"


@pytest.fixture(scope="module")
def durable() -> Iterator[Service]:
    with Service(num_workers=2, append_only=True) as service:
        yield service


@pytest.fixture(scope="module")
def without_a_file() -> Iterator[Service]:
    with Service(num_workers=2) as service:
        yield service


@pytest.fixture
def forgetful(without_a_file: Service) -> Iterator[Service]:
    """Use a Redis that comes back empty."""
    yield without_a_file
    heal(without_a_file)


@dataclass(frozen=True)
class Road:
    """A service that reaches its Redis through a proxy."""

    service: Service
    proxy: FaultProxy


@pytest.fixture(scope="module")
def through_a_proxy() -> Iterator[Road]:
    port = free_port()
    with FaultProxy(port) as proxy, Service(num_workers=2, redis_port=port, redis_url=proxy.url) as service:
        yield Road(service, proxy)


@pytest.fixture
def road(through_a_proxy: Road) -> Iterator[Road]:
    yield through_a_proxy
    through_a_proxy.proxy.harm()
    heal(through_a_proxy.service)


@pytest.fixture
def service(durable: Service) -> Iterator[Service]:
    yield durable
    heal(durable)


def restart_redis(service: Service) -> None:
    service.processes["redis"].kill()
    service.processes["redis"].start()
    wait_for("Redis to answer", service.redis_answers)


def test_redis_killed_with_its_append_only_file_loses_no_request(service: Service, report: Report) -> None:
    only_clean_refusals(disturbed(service, "18 kill -9 Redis, AOF", lambda: restart_redis(service), report))


def test_flushall_loses_no_request(service: Service, report: Report) -> None:
    def flush() -> None:
        with service.redis as client:
            client.flushall()

    only_clean_refusals(disturbed(service, "18 FLUSHALL", flush, report))


@pytest.mark.slow
def test_cut_connections_lose_no_request(service: Service, report: Report) -> None:
    def cut() -> None:
        with service.redis as client:
            client.client_kill_filter(_type="normal", skipme=True)

    only_clean_refusals(disturbed(service, "18 CLIENT KILL of everybody", cut, report))


@pytest.mark.slow
def test_redis_frozen_for_ten_seconds_loses_no_request(service: Service, report: Report) -> None:
    def freeze() -> None:
        service.processes["redis"].signal(signal.SIGSTOP)
        time.sleep(10)
        service.processes["redis"].signal(signal.SIGCONT)

    only_clean_refusals(disturbed(service, "20 Redis frozen for 10 s", freeze, report))


@pytest.mark.slow
def test_redis_full_is_a_clean_503_and_passes(service: Service, report: Report) -> None:
    with Load(service, clients=2) as load:
        load.warm()
        load.mark()
        with service.redis as client:
            used = client.info("memory")["used_memory"]
            client.config_set("maxmemory", used - 1)
            wait_for("a refusal", lambda: load.failed, 20)
            client.config_set("maxmemory", 0)
        load.recover(10)
    with service.explained():
        assert {x.error for x in load.failed} <= {"503 server_overloaded", "503 service_unavailable"}
        wait_for("every block to be free", lambda: service.blocks_used() == 0, 15)
    report(load.row("21 Redis at maxmemory"))


@pytest.mark.slow
def test_a_deleted_consumer_and_a_destroyed_group_recover(service: Service, report: Report) -> None:
    def harm() -> None:
        with service.redis as client:
            for stream in client.keys("instar:requests:*"):
                for consumer in client.xinfo_consumers(stream, GROUP):
                    client.xgroup_delconsumer(stream, GROUP, consumer["name"])
                client.xgroup_destroy(stream, GROUP)

    only_clean_refusals(disturbed(service, "23 DELCONSUMER and a destroyed group", harm, report))


@pytest.mark.slow
def test_a_hundred_thousand_stale_entries_are_cleared_by_the_next_worker(
    service: Service, report: Report
) -> None:
    service.processes["w0"].kill()
    with service.redis as client:
        stream = "instar:requests:demo@w0"
        with client.pipeline(transaction=False) as batch:
            for _ in range(100_000):
                batch.xadd(stream, {"m": b"\x00"})
            batch.execute()
        while client.xreadgroup(GROUP, "somebody-dead", {stream: ">"}, count=20_000):
            pass
    with Load(service) as load:
        load.warm()
        load.mark()
        service.processes["w0"].start()
        wait_for("the worker to serve", lambda: "w0" in service.serving_workers(), 60)
        load.recover(20)
        with service.redis as client:
            wait_for("the stale entries to go", lambda: client.xlen(stream) < 100, 60)
    assert load.failed == []
    report(load.row("23 100,000 pending entries"))


@pytest.mark.slow
def test_redis_without_persistence_comes_back_empty_and_no_request_is_lost(
    forgetful: Service, report: Report
) -> None:
    only_clean_refusals(
        disturbed(forgetful, "18 kill -9 Redis, no persistence", lambda: restart_redis(forgetful), report)
    )


@pytest.mark.slow
def test_failing_over_to_an_empty_replica_loses_no_request(report: Report) -> None:
    port = free_port()
    with FaultProxy(port) as proxy, Service(num_workers=2, redis_port=port, redis_url=proxy.url) as service:
        spare = free_port()
        service.start_redis(spare)

        def fail_over() -> None:
            proxy.target = spare
            proxy.cut()

        only_clean_refusals(disturbed(service, "18 failover to an empty replica", fail_over, report))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "settings"),
    [
        ("20 200 ms delay to Redis", {"delay_s": 0.2}),
        ("20 5 % of the connections' chunks cut", {"cut_share": 0.05}),
        ("19 replies lost after XADD", {"swallow_xadd_replies": 2}),
    ],
    ids=["delay", "loss", "lost-replies"],
)
def test_a_bad_road_to_redis_duplicates_and_loses_nothing(
    road: Road, fault: str, settings: dict[str, Any], report: Report
) -> None:
    def harm() -> None:
        road.proxy.harm(**settings)
        time.sleep(5)
        road.proxy.harm()

    only_clean_refusals(disturbed(road.service, fault, harm, report))


@pytest.mark.slow
def test_a_worker_cut_off_from_redis_is_replaced_and_its_late_tokens_dropped(report: Report) -> None:
    port = free_port()
    with (
        FaultProxy(port) as proxy,
        Service(num_workers=2, redis_port=port, worker_redis_urls={"w0": proxy.url}) as service,
    ):

        def partition() -> None:
            proxy.harm(blackhole=True)
            time.sleep(LEASE_S * 2.5)
            proxy.harm()

        only_clean_refusals(disturbed(service, "20 partition of one worker", partition, report))
        wait_for("both to serve", lambda: len(service.serving_workers()) == 2)


@pytest.mark.slow
def test_the_url_of_an_absent_redis_is_told_and_the_service_waits_or_ends(forgetful: Service) -> None:
    service = forgetful
    service.processes["redis"].kill()
    time.sleep(1)
    try:
        complete(service, max_tokens=2)
    except Exception as problem:  # noqa: BLE001 - any of openai's errors; which one is asserted
        assert getattr(problem, "status_code", None) in (503, 504), problem
    service.processes["redis"].start()
    wait_for("Redis to answer", service.redis_answers)
    service.wait_ready()
    assert complete(service, max_tokens=2).usage.completion_tokens == 2
