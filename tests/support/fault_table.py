"""The table that the fault tests end in: fault, succeeded, failed, P99 before and after, recovery.

A test hands its row over as a property of its report, which pytest-xdist carries to the process that
prints the table.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.paths import ROOT

FAULT = "fault"  # the name of the property
RESULTS = ROOT / "bench" / "results" / "faults.json"
_LINE = "{:<52} {:>9} {:>6} {:>10} {:>9} {:>10}"
_rows: dict[str, list[dict[str, Any]]] = {}  # by file, since files that run side by side take turns


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the rows of a test that has run."""
    if report.when == "call":
        rows = [row for name, row in report.user_properties if name == FAULT]
        _rows.setdefault(report.nodeid.partition("::")[0], []).extend(rows)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the rows of all files, and write them down if the whole suite ran."""
    rows = [row for _, of_file in sorted(_rows.items()) for row in of_file]
    if not rows:
        return
    terminalreporter.section("faults")
    terminalreporter.line(
        _LINE.format("fault", "succeeded", "failed", "P99 before", "P99 after", "recovery s")
    )
    for row in rows:
        for line in _lines_of(row):
            terminalreporter.line(line)
    if len(rows) > 15:  # the whole suite ran, not a selection
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({"faults": rows}) + "\n")


def _lines_of(row: dict[str, Any]) -> list[str]:
    seconds = [_seconds(row[key]) for key in ("p99_before_s", "p99_after_s", "recovery_s")]
    lines = [_LINE.format(row["fault"], row["succeeded"], row["failed"], *seconds)]
    if "refused" in row:
        refusal = _seconds(row["reject_p99_s"])
        lines.append(f"  of the burst {row['refused']} refused; P99 of a refusal {refusal} s")
    return lines + [f"  {line}" for line in row.get("told", "").splitlines()]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
