"""The tables of `instar plan --what-if`: what the morph policy weighs, and what it would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.table import Table

from bus.levers import NEVER_S
from instar.output.tables import ABSENT, make_table, short

NOTHING: Final = "nothing would be done: no request waits for KV blocks or a group, and no group could part"
NUMBERS: Final = ("KV\nblocks", "\ntokens/s", "\nloss", "pause\ns", "ready in\ns", "cost\nrequest-s")
TAKEN: Final = "taken"


def what_if_parts(found: dict[str, Any]) -> Iterator[Table | str]:
    """Yield what the answer of GET /admin/plan says, for people."""
    if found["note"]:
        yield found["note"]
    if not found["plans"]:
        yield NOTHING
    for plan in found["plans"]:
        yield f"{', '.join(dict.fromkeys((plan['model'], plan['subject'])))}: {plan['need']}"
        yield _options(plan)
        for one in plan["options"]:
            if one["refusal"]:
                yield f"not possible: {_words(one)}: {one['refusal']}"
        yield f"{_outcome(plan)}\n"


def _outcome(plan: dict[str, Any]) -> str:
    met = "within the objective" if plan["meets"] else "no set of levers meets the objective"
    if plan["wait_s"] >= NEVER_S:
        return f"some requests would wait without end, or be refused: {met}"
    return f"{plan['cost_s']:.2f} request-seconds, the longest wait {plan['wait_s']:.2f} s: {met}"


def _options(plan: dict[str, Any]) -> Table:
    """Return the levers that are possible, with the numbers that one of them has."""
    possible = [one for one in plan["options"] if not one["refusal"]]
    columns = [column for column in zip(NUMBERS, *map(_numbers, possible), strict=True) if any(column[1:])]
    table = make_table(("lever",), [column[0] for column in columns])
    table.add_column("", overflow="fold")
    for i, one in enumerate(possible, start=1):
        basis = one["basis"] if one["duration_s"] < NEVER_S else ""
        notes = ", ".join(word for word in (TAKEN if one["is_taken"] else "", basis) if word)
        table.add_row(_words(one), *(column[i] or ABSENT for column in columns), notes)
    return table


def _numbers(one: dict[str, Any]) -> tuple[str, ...]:
    """Return what NUMBERS names; "": none."""
    return (
        str(one["blocks"] or ""),
        f"{one['tokens_per_s']:+.0f}" if one["tokens_per_s"] else "",
        f"{one['loss']:.2%}" if one["loss"] else "",
        short(one["stalled_s"]) if one["stalled_s"] else "",
        _seconds(one["duration_s"]),
        "never" if one["duration_s"] >= NEVER_S else f"{one['cost_s']:.2f}",
    )


def _words(one: dict[str, Any]) -> str:
    between = " to " if one["lever"] == "move" else ", "
    words = f"{one['lever']} {between.join(one['targets'])}".rstrip()
    if one["layers"]:
        return f"{words}: {one['layers']} layers to {one['precision']}"
    return f"{words}: tp {one['tp']}" if one["tp"] else words


def _seconds(value: float) -> str:
    return "never" if value >= NEVER_S else f"{value:.2f}"
