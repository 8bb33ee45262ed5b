"""Markdown tables of a result of the paper's evaluation, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Write a number with three significant digits, and `-` for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def listed(values: Sequence[float | None], unit: str = "") -> str:
    """Write numbers in the order of the loads."""
    return ", ".join(number(value) + (unit if value is not None else "") for value in values)


def judged(values: Sequence[float | None], is_met: Callable[[float], bool]) -> str:
    met = [value is not None and is_met(value) for value in values]
    if all(met):
        return "reached"
    return f"in {sum(met)} of {len(met)}" if any(met) else "missed"


def by_load_and_way(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["load"], one["way"]): one for one in result["runs"]}


def names_of(result: Result) -> tuple[list[str], list[str]]:
    """Return the names of loads and of ways."""
    return tuple(list(dict.fromkeys(one[what] for one in result["runs"])) for what in ("load", "way"))  # type: ignore[return-value]
