"""The table that the fault tests end in: fault, succeeded, failed, P99 before and after, recovery."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from bench.common.service import Service
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.faults.transforms import Shapes

ROWS: list[dict[str, Any]] = []
RESULTS = ROOT / "bench" / "results" / "faults.json"


@pytest.fixture
def report() -> Callable[[dict[str, Any]], None]:
    return ROWS.append


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
    for process in list(service.processes.values()):
        if not process.is_alive:
            process.start()
    service.wait_ready()


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("faults")
    form = "{:<52} {:>9} {:>6} {:>10} {:>9} {:>10}"
    terminalreporter.line(
        form.format("fault", "succeeded", "failed", "P99 before", "P99 after", "recovery s")
    )
    for row in ROWS:
        terminalreporter.line(
            form.format(
                row["fault"],
                row["succeeded"],
                row["failed"],
                _seconds(row["p99_before_s"]),
                _seconds(row["p99_after_s"]),
                _seconds(row["recovery_s"]),
            )
        )
        if "refused" in row:
            seconds = _seconds(row["reject_p99_s"])
            terminalreporter.line(f"  of the burst {row['refused']} refused; P99 of a refusal {seconds} s")
        for line in row.get("told", "").splitlines():
            terminalreporter.line(f"  {line}")
    if len(ROWS) > 15:  # the whole suite ran, not a selection
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({"faults": ROWS}) + "\n")
