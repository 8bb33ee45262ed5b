"""The numbers of `bench.peers`: medians over rounds, ratios to llama.cpp, and the table in README.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from bench.common.results import ROOT, digits, say
from bench.paper.tables import number, table
from bench.peers.contenders import INSTAR, LLAMA, TRANSFORMERS
from bench.peers.workloads import AT_ONCE, ONE_BY_ONE, OPEN_LOOP

PAGE: Final = ROOT / "README.md"
BEGIN: Final = "<!-- numbers: peers -->\n"
END: Final = "<!-- end -->"
MAX_FOREIGN_CORES: Final = 0.15  # cores that other programs may use before a row is marked
MARK: Final = "*"
TITLES: Final = {AT_ONCE: "64 requests at once", ONE_BY_ONE: "one at a time", OPEN_LOOP: "2 requests/s"}
CONTENDERS: Final = (INSTAR, LLAMA, TRANSFORMERS)  # the order of the columns


@dataclass(frozen=True, slots=True)
class PeerQuantity:
    """A quantity that a workload is measured by. is_rate: more of it is better, else less."""

    workload: str
    name: str
    label: str
    unit: str = "ms"
    is_rate: bool = False

    @property
    def key(self) -> str:
        return f"{self.workload}, {self.name}"

    @property
    def title(self) -> str:
        return f"{TITLES[self.workload]}: {self.label}, {self.unit}"

    def times_as_fast(self, value: float, reference: float) -> float:
        return value / reference if self.is_rate else reference / value


QUANTITIES: Final = (
    PeerQuantity(AT_ONCE, "tokens_per_s", "output", "tokens/s", is_rate=True),
    PeerQuantity(ONE_BY_ONE, "token_ms", "TPOT"),
    PeerQuantity(ONE_BY_ONE, "ttft_ms", "TTFT"),
    PeerQuantity(OPEN_LOOP, "token_ms", "TPOT P50"),
    PeerQuantity(OPEN_LOOP, "request_ms", "whole request P50"),
    PeerQuantity(OPEN_LOOP, "ttft_ms", "TTFT P50"),
    PeerQuantity(OPEN_LOOP, "ttft_p95_ms", "TTFT P95"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One workload of one contender in one round; values by the names of `QUANTITIES`."""

    size: str
    contender: str
    workload: str
    round: int
    values: Mapping[str, float]
    foreign_cores: float
    text: str = ""

    @property
    def is_disturbed(self) -> bool:
        return self.foreign_cores > MAX_FOREIGN_CORES

    def __str__(self) -> str:
        values = ", ".join(
            f"{one.label} {number(self.values[one.name])} {one.unit}"
            for one in QUANTITIES
            if one.workload == self.workload
        )
        mark = f" {MARK} disturbed" if self.is_disturbed else ""
        return (
            f"round {self.round}, {self.size}, {self.workload:<10} {self.contender:<12} {values}; "
            f"others {self.foreign_cores:.2f} cores{mark}"
        )


def report(rows: Sequence[Row], machine: Mapping[str, Any], llama_version: str) -> dict[str, Any]:
    """Return the result, which the table is made from.

    `models`: by size and contender, "median" and "times_llama" by quantity, and "disturbed", the quantities
    that other programs may have changed. times_llama: how many times as fast as llama.cpp, from the medians.
    """
    found: dict[str, dict[str, Any]] = {}
    for size in dict.fromkeys(row.size for row in rows):
        of_size = [row for row in rows if row.size == size]
        medians = {name: _medians([row for row in of_size if row.contender == name]) for name in CONTENDERS}
        found[size] = {
            name: {
                "median": {key: digits(value) for key, value in medians[name].items()},
                "times_llama": {} if name == LLAMA else _times(medians[name], medians[LLAMA]),
                "disturbed": _disturbed([row for row in of_size if row.contender == name]),
            }
            for name in CONTENDERS
            if medians[name]
        }
    return {
        "machine": dict(machine),
        "llama_version": llama_version,
        "rounds": 1 + max(row.round for row in rows),
        "models": found,
        "same_text": same_text(rows),
    }


def _medians(rows: Sequence[Row]) -> dict[str, float]:
    found = {}
    for one in QUANTITIES:
        values = [row.values[one.name] for row in rows if row.workload == one.workload]
        if values:
            found[one.key] = statistics.median(values)
    return found


def _times(values: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, float]:
    return {
        one.key: round(one.times_as_fast(values[one.key], reference[one.key]), 3)
        for one in QUANTITIES
        if one.key in values and one.key in reference
    }


def _disturbed(rows: Sequence[Row]) -> list[str]:
    workloads = {row.workload for row in rows if row.is_disturbed}
    return [one.key for one in QUANTITIES if one.workload in workloads]


def same_text(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return [characters alike from the beginning, characters] of others' first text, beside Instar's.

    The keys are "SIZE, CONTENDER". Random weights make near ties, and one changes all that follows: few
    characters alike say little, but none means that weights or prompts differ.
    """
    texts = {(row.size, row.contender): row.text for row in rows if row.text}
    return {
        f"{size}, {contender}": [num_alike(text, texts[size, INSTAR]), len(text)]
        for (size, contender), text in texts.items()
        if contender != INSTAR and (size, INSTAR) in texts
    }


def num_alike(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# ------------------------------------------------------------------------------------- the table


def page_table(result: Mapping[str, Any]) -> str:
    """Return the README's text and table of a result."""
    there = {name for models in result["models"].values() for name in models}
    columns = [name for name in CONTENDERS if name in there]
    lines = [
        [f"{size}, {one.title}", *(_cell(models.get(name), one) for name in columns)]
        for size, models in result["models"].items()
        for one in QUANTITIES
    ]
    return f"{_introduction(result, LLAMA in there)}\n\n{table(['model, load', *columns], lines)}"


def _cell(found: Mapping[str, Any] | None, quantity: PeerQuantity) -> str:
    if found is None or quantity.key not in found["median"]:
        return "-"
    mark = rf"\{MARK}" if quantity.key in found["disturbed"] else ""
    times = found["times_llama"].get(quantity.key)
    ratio = f" ({times:.2f})" if times is not None else ""
    return f"{number(found['median'][quantity.key])}{mark}{ratio}"


def _introduction(result: Mapping[str, Any], has_llama: bool) -> str:
    machine = result["machine"]
    rounds = result["rounds"]
    text = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb_s']} GB/s in a plain sum. "
        f"Random weights in float32, {'one round' if rounds == 1 else f'medians of {rounds} rounds'}, the "
        "contenders by turns; transformers gets all requests at once as one batch."
    )
    if has_llama:
        text += (
            f" In brackets: times as fast as llama.cpp's server ({result['llama_version']}, float32 weights, "
            "default KV cache)."
        )
    else:
        text += " llama.cpp was not measured: that needs `--llama-server PATH`."
    if any(found["disturbed"] for models in result["models"].values() for found in models.values()):
        text += rf" \{MARK}: other programs took more than {MAX_FOREIGN_CORES:g} cores in a round."
    return text


def rewritten(page: str, block: str) -> str:
    """Return the page with `block` between its markers.

    Raises ValueError unless the page has both markers, once and in order.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail:
        raise ValueError(
            f"the page must have the marker {BEGIN.strip()!r} once, on a line of its own, and {END!r} after "
            "it: put them where the table belongs"
        )
    return f"{head}{begin}{block}\n{end}{tail}"


def check_page(page: Path = PAGE) -> None:
    """Raise ValueError that names the page if it has no place for the table."""
    try:
        rewritten(page.read_text(), "")
    except ValueError as problem:
        raise ValueError(f"{page}: {problem}") from None


def say_card(result: Mapping[str, Any]) -> None:
    """Print the table, and how far the texts agree."""
    say(f"\n{page_table(result)}\n")
    for who, (alike, length) in result["same_text"].items():
        say(f"{who}: the first greedy text is Instar's for {alike} of {length} characters")


def rows_as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows without their texts."""
    found = [asdict(row) for row in rows]
    for row in found:
        del row["text"]
        row["values"] = {name: digits(value) for name, value in row["values"].items()}
        row["foreign_cores"] = round(row["foreign_cores"], 3)
    return found
