"""The bars of the windows, and whether runs met them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE

# Of the default mode, over all windows.
FEWER_VIOLATIONS, TIMES_LOWER, IN_WINDOWS, LOSS_SHARE = 0.9, 2.9, 0.8, 0.25
TO_BLOCKS_S: Final = 0.3
BACK_S: Final = 10.0


def judge(rows: Sequence[dict[str, Any]], loss_of_int4: float) -> list[tuple[str, str, bool]]:
    """Return what was asked for, what came, and whether it was met.

    Full precision and the default mode must be among the ways.
    """
    by: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in rows:
        by.setdefault((one["load"], one["way"]), []).append(one)
    names = sorted({one["load"] for one in rows})
    ways = {one["way"] for one in rows}

    def mean(name: str, way: str, what: Any) -> float:
        return fmean(what(one) for one in by[name, way])

    def violations(name: str, way: str) -> float:
        return mean(name, way, lambda one: one["violations"])

    full = sum(violations(name, FULL) for name in names)
    default = sum(violations(name, DEFAULT) for name in names)
    p95_of = {
        way: [mean(name, way, lambda one: one["ttft_s"]["p95"]) for name in names] for way in (FULL, DEFAULT)
    }
    p95 = [theirs / ours for theirs, ours in zip(p95_of[FULL], p95_of[DEFAULT], strict=True)]
    loss = fmean(mean(name, DEFAULT, lambda one: one["loss"]) for name in names) / loss_of_int4
    has_both = {INT4, PERFORMANCE} <= ways
    clean = [name for name in names if violations(name, INT4) == 0] if has_both else []
    dirty = [name for name in clean if violations(name, PERFORMANCE) > 0]
    modes = [one for one in rows if one["mode"] != "manual"]
    first = sorted(value for one in modes for value in one["first_blocks_s"])
    to_blocks = first[int(0.95 * len(first))] if first else 0.0
    back = max((one["back_after_s"] for one in modes), default=0.0)
    preempted = sum(mean(name, DEFAULT, lambda one: one["preemptions"]) for name in names)
    of_full = sum(mean(name, FULL, lambda one: one["preemptions"]) for name in names)
    num_lower = sum(value >= TIMES_LOWER for value in p95)
    return [
        (
            f"default mode: at least {FEWER_VIOLATIONS:.0%} fewer requests over 2 s",
            f"{full:g} to {default:g}",
            default - (1 - FEWER_VIOLATIONS) * full < 1e-6,
        ),
        (
            f"default mode: P95 TTFT at least {TIMES_LOWER} times lower in {IN_WINDOWS:.0%} of the windows",
            f"in {num_lower} of {len(names)}: {', '.join(f'{value:.2g}' for value in p95)}",
            num_lower >= IN_WINDOWS * len(names),
        ),
        (f"default mode: loss under {LOSS_SHARE:.0%} of static INT4's", f"{loss:.1%}", loss < LOSS_SHARE),
        (
            "performance mode: no request over 2 s where static INT4 has none",
            f"{len(dirty)} of {len(clean)} windows have some",
            not dirty and has_both,
        ),
        (
            f"first queued request to first added block: P95 under {TO_BLOCKS_S:g} s",
            f"{to_blocks:.3f} s of {len(first)}",
            to_blocks < TO_BLOCKS_S,
        ),
        (
            f"all layers full within {BACK_S:g} s after the last pressure",
            f"at most {back:.1f} s",
            back <= BACK_S and all(one["is_back"] for one in modes),
        ),
        (
            "default mode: no more preemptions than full precision",
            f"{preempted:g} against {of_full:g}",
            preempted <= of_full,
        ),
    ]
