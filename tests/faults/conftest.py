"""Services that the tests of a file share, and the rows of the table that the fault tests end in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from bench.common.service import Service
from tests.support.fault_table import FAULT

if TYPE_CHECKING:
    from tests.faults.transforms import Shapes


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[dict[str, Any]], None]:
    """Adds a row to the table (`tests.support.fault_table`)."""
    return lambda row: record_property(FAULT, row)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Service]:
    """Shared by a module's tests: each must leave it with both workers serving (`heal`)."""
    with Service(num_workers=2) as service:
        yield service


@pytest.fixture
def service(two_workers: Service) -> Iterator[Service]:
    yield two_workers
    heal(two_workers)


@pytest.fixture
def shapes(pair: Shapes) -> Iterator[Shapes]:
    """pair: the module's own two workers."""
    yield pair
    pair.mend()


def heal(service: Service) -> None:
    """Start what was killed, and wait until every worker serves."""
    for process in list(service.processes.values()):
        if not process.is_alive:
            process.start()
    service.wait_ready()
    assert service.state()["controller"]["failure"] is None  # an error in its code, which it survives
