"""Writes the numbers of docs/evaluation.md, and some of README.md, from the results in bench/results.

    python -m bench.paper page        writes them again, between their markers

A block of a page is `<!-- numbers: NAME -->` to `<!-- end -->`; its text is a function of one result. What
the paper reports (MorphServe, sections 5.1 and 5.2) is here too, so that both stand side by side.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.common.results import RESULTS, ROOT, say
from bench.paper.headline import headline, replayed, static_weights, summary
from bench.paper.numbers import (
    figure4,
    figure5,
    figure6,
    figure7,
    larger,
    loads,
    plans,
    premises,
    setup,
    static,
)
from bench.paper.tables import Result
from bench.paper.windows_page import bursts, simulated, windows

PAGE: Final = ROOT / "docs" / "evaluation.md"
README: Final = ROOT / "README.md"
UNMEASURED: Final = "Not measured yet: `{}` writes this."
COMMANDS: Final = {
    "paper": "make bench-paper TRACES=DIR",
    "paper-100M": "make bench-paper TRACES=DIR SIZE=100M",
    "windows": "make bench-windows TRACES=DIR",
    "simulated": "python -m bench.paper simulated",
}


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a page; `result` names the file that it comes from, `caption` is of its picture."""

    result: str
    text: Callable[[Result], str]
    picture: str = ""
    caption: str = ""

    def written(self, results: Mapping[str, Result | None]) -> str:
        found = results[self.result]
        if found is None:
            return UNMEASURED.format(COMMANDS[self.result])
        shown = f"![{self.caption}](../bench/results/{self.picture}.png)\n\n" if self.picture else ""
        return shown + self.text(found)


BLOCKS: Final[Mapping[Path, Mapping[str, Block]]] = {
    README: {
        "bursts": Block("windows", bursts),
        "replayed": Block("paper", replayed),
        "static weights": Block("paper", static_weights),
    },
    PAGE: {
        "summary": Block("paper", summary),
        "premises": Block("paper", premises),
        "headline": Block("paper", headline),
        "setup": Block("paper", setup),
        "loads": Block("paper", loads),
        "figure 4": Block(
            "paper", figure4, "paper-figure4", "P95 TTFT against F1 and perplexity, a panel for each load"
        ),
        "plans": Block("paper", plans),
        "static": Block("paper", static),
        "figure 5": Block("paper", figure5, "paper-figure5", "KV blocks over time, a panel for each load"),
        "figure 6": Block(
            "paper",
            figure6,
            "paper-figure6",
            "P95 TTFT and output tokens per second against the rate of requests",
        ),
        "figure 7": Block(
            "paper", figure7, "paper-figure7", "Shares of requests by TPOT, a panel for each load"
        ),
        "100M": Block("paper-100M", larger),
        "windows": Block("windows", windows),
        "simulated": Block("simulated", simulated),
    },
}
_BLOCK: Final = r"(<!-- numbers: {} -->(\n?)).*?(<!-- end -->)"


def regenerated(page: str, blocks: Mapping[str, Block], results: Mapping[str, Result | None]) -> str:
    """Return a page with its blocks written again. A result that is None was never measured.

    Raises ValueError if the page does not have every block once.
    """
    for name, block in blocks.items():
        pattern = re.compile(_BLOCK.format(re.escape(name)), re.DOTALL)
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page must have the block {name!r} once")
        text = block.written(results)
        page = pattern.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}{found[3]}", page)  # type: ignore[misc]
    return page


def read_results() -> dict[str, Result | None]:
    """Return the results by their names; None for those that were never measured."""
    paths = {name: RESULTS / f"{name}.json" for name in COMMANDS}
    return {name: json.loads(path.read_text()) if path.exists() else None for name, path in paths.items()}


def card(result: dict[str, Any]) -> str:
    """Return the tables of an evaluation for a terminal."""
    if result.get("offline") is None:
        return larger(result)
    blocks = [block for name, block in BLOCKS[PAGE].items() if block.result == "paper" and name != "summary"]
    return "\n\n".join(block.text(result) for block in blocks)


def write_pages() -> None:
    """Write the blocks of all pages again."""
    results = read_results()
    for page, blocks in BLOCKS.items():
        page.write_text(regenerated(page.read_text(), blocks, results))
        say(f"wrote {page}")


def main() -> None:
    write_pages()
