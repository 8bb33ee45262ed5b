"""Writes the numbers of docs/evaluation.md from bench/results/paper.json.

    python -m bench.paper page        writes them again, between their markers

A block of the page is `<!-- numbers: NAME -->` to `<!-- end -->`; its text is a function of the result. What
the paper reports (MorphServe, sections 5.1 and 5.2) is here too, so that both stand side by side.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any, Final

from bench.common.results import RESULTS, ROOT
from bench.paper.headline import headline
from bench.paper.numbers import (
    figure4,
    figure5,
    figure6,
    figure7,
    loads,
    plans,
    premises,
    setup,
    static,
)

PAGE: Final = ROOT / "docs" / "evaluation.md"
RESULT: Final = RESULTS / "paper.json"
UNMEASURED: Final = "Not measured yet: `make bench-paper TRACES=DIR` writes this."
BLOCKS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "premises": premises,
    "headline": headline,
    "setup": setup,
    "loads": loads,
    "figure 4": figure4,
    "plans": plans,
    "static": static,
    "figure 5": figure5,
    "figure 6": figure6,
    "figure 7": figure7,
}
# The captions of the figures, each above its numbers.
FIGURES: Final = {
    "figure 4": "P95 TTFT against F1 and perplexity, a panel for each load",
    "figure 5": "KV blocks over time, a panel for each load",
    "figure 6": "P95 TTFT and output tokens per second against the rate of requests",
    "figure 7": "Shares of requests by TPOT, a panel for each load",
}
_BLOCK: Final = re.compile(r"(<!-- numbers: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def regenerated(page: str, result: dict[str, Any] | None) -> str:
    """Return the page with every block written again, from a result or without one (None).

    Raises ValueError if a marker is unknown or missing.
    """
    names = [found[1] for found in _BLOCK.findall(page)]
    if sorted(names) != sorted(BLOCKS):
        raise ValueError(f"the page has the blocks {sorted(names)}, it must have {sorted(BLOCKS)}, each once")

    def block(match: re.Match[str]) -> str:
        if result is None:
            return f"{match[1]}{UNMEASURED}\n{match[3]}"
        name = match[2]
        picture = f"../bench/results/paper-{name.replace(' ', '')}.png"
        shown = f"![{FIGURES[name]}]({picture})\n\n" if name in FIGURES else ""
        return f"{match[1]}{shown}{BLOCKS[name](result)}\n{match[3]}"

    return _BLOCK.sub(block, page)


def read_result() -> dict[str, Any] | None:
    """Return the result, or None if the evaluation was never run."""
    if not RESULT.exists():
        return None
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


def card(result: dict[str, Any]) -> str:
    """Return the page's tables for a terminal."""
    return "\n\n".join(block(result) for block in BLOCKS.values())


def main() -> None:
    PAGE.write_text(regenerated(PAGE.read_text(), read_result()))
    sys.stdout.write(f"{PAGE}\n")
