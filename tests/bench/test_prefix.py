"""The report of `bench.prefix`, of services whose times are known."""

from __future__ import annotations

import pytest

from bench.prefix import compare
from bench.prefix.compare import Side


@pytest.mark.parametrize(
    ("with_s", "differing", "cost", "status"),
    [(0.1, 0, 1.0, 0), (0.2, 0, 1.0, 1), (0.1, 1, 1.0, 1), (0.1, 0, 1.03, 1)],
)
def test_a_missed_bar_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, with_s: float, differing: int, cost: float, status: int
) -> None:
    monkeypatch.setattr(compare, "conclude", lambda result, **more: 0 if _all_met(more["bars"]) else 1)
    sides = {
        "with": Side([with_s] * 5, 1000, 800, [cost * 2.0] * 3),
        "without": Side([0.5] * 5, 1000, 0, [2.0] * 3),
    }
    assert compare.report(sides, differing, {"processor": "one that is known"}) == status


def _all_met(bars: dict[str, dict[str, object]]) -> bool:
    return all(one["is_met"] for one in bars.values())


def test_services_take_turns_at_being_first() -> None:
    assert [compare.in_turn(["a", "b"], number) for number in range(3)] == [
        ["a", "b"],
        ["b", "a"],
        ["a", "b"],
    ]
