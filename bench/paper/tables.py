"""Markdown tables of a result of the paper's evaluation, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
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


def spread(values: Sequence[float], write: Callable[[float | None], str] = number) -> str:
    """Write the median of repeats, and the least and the greatest if they differ; "" for none."""
    if not values:
        return ""
    middle, least, most = (write(of(values)) for of in (median, min, max))
    return middle if least == most else f"{middle} ({least} to {most})"


def middles(values: Sequence[Any]) -> Any:
    """Return the medians of all numbers in rows that are alike; the first of what is no number.

    Numbers that are None in some rows count where they are not.
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, dict) for value in known):
        return {name: middles([value.get(name) for value in known]) for name in known[0]}
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        middle = median(known)
        return (
            int(middle)
            if middle == int(middle) and all(isinstance(value, int) for value in known)
            else middle
        )
    return known[0]


def merged(rows: Sequence[Result], *names: str) -> list[Result]:
    """Return one row for those that have equal values of `names`: medians, and `repeats`, the rows."""
    by: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        by.setdefault(tuple(row[name] for name in names), []).append(row)
    for alike in by.values():
        alike.sort(key=lambda row: row.get("repeat", 0))
    return [{**middles(alike), "repeats": alike} for alike in by.values()]


def by_load_and_way(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    """Return one row for each load and way, of medians over repeats."""
    return {(one["load"], one["way"]): one for one in merged(result["runs"], "load", "way")}


def names_of(result: Result) -> tuple[list[str], list[str]]:
    """Return the names of loads and of ways."""
    return tuple(list(dict.fromkeys(one[what] for one in result["runs"])) for what in ("load", "way"))  # type: ignore[return-value]
