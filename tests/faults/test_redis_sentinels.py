"""Sentinels make a replica the primary, as that dies, hangs or is to go: fault 18 of docs/faults.md."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faults.conftest import heal
from tests.faults.load import disturbed, only_clean_refusals
from tests.faults.sentinels import SentinelService

pytestmark = [pytest.mark.faults, pytest.mark.timeout(360)]
Report = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def watched() -> Iterator[SentinelService]:
    with SentinelService(num_workers=2) as service:
        yield service


@pytest.fixture
def service(watched: SentinelService) -> Iterator[SentinelService]:
    yield watched
    heal(watched)
    watched.wait_replicated()


def test_a_primary_that_is_killed_under_load_loses_no_accepted_request(
    service: SentinelService, report: Report
) -> None:
    before = service.primary_port

    def harm() -> None:
        service.server_at(before).kill()
        service.wait_failed_over(before)

    load = disturbed(service, "18 kill -9 the primary, Sentinels", harm, report)
    only_clean_refusals(load)
    assert service.primary_port == service.replica_port
    with service.redis as client:
        assert client.info("replication")["role"] == "master"
        assert client.exists("instar:leader-lease") and client.scard("instar:workers") == 2


@pytest.mark.slow
def test_a_primary_that_hangs_and_returns_loses_no_accepted_request(
    service: SentinelService, report: Report
) -> None:
    before = service.primary_port

    def harm() -> None:
        hung = service.server_at(before)
        hung.signal(signal.SIGSTOP)
        try:
            service.wait_failed_over(before)
            time.sleep(1)
        finally:
            hung.signal(signal.SIGCONT)  # it takes writes until a Sentinel makes it a replica

    only_clean_refusals(disturbed(service, "18 the primary frozen, Sentinels", harm, report))


@pytest.mark.slow
def test_a_failover_by_order_loses_no_accepted_request(service: SentinelService, report: Report) -> None:
    before = service.primary_port

    def harm() -> None:
        service.order_failover()
        service.wait_failed_over(before)

    only_clean_refusals(disturbed(service, "18 failover by order, Sentinels", harm, report))
