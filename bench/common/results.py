"""Paths, reports and results of benchmarks.

Uses the standard library only: `make gpu` runs where little else is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
DEMO: Final = ROOT / "models" / "demo"
RESULTS: Final = ROOT / "bench" / "results"
MAX_OTHERS_CORES: Final = 0.2  # cores that other programs may use before a measurement counts as disturbed

Bar = dict[str, Any]  # keys: bar, value, is_met


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the command line whose help shows the docstring `about` as it is written."""
    return argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def say(text: str = "") -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def digits(value: float | None, count: int = 4) -> float | None:
    """Round to `count` significant digits; None if there is no finite value."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{count}g}")


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the lower of the two neighbours of a quantile, or None if there are no values."""
    return sorted(values)[int(share * (len(values) - 1))] if values else None


def bar(limit: float | str, value: float | None, is_met: bool) -> Bar:
    """Return a bar: what must be reached, the value that was measured, and whether it suffices."""
    return {"bar": limit, "value": digits(value), "is_met": is_met}


def say_bars(bars: Mapping[str, Bar]) -> None:
    """Print whether each bar was met."""
    for line in bar_lines(bars):
        say(line)


def bar_lines(bars: Mapping[str, Bar]) -> list[str]:
    """Return a line for each bar."""
    return [
        f"{what}: {one['value']} (bar {one['bar']}): {'met' if one['is_met'] else 'MISSED'}"
        for what, one in bars.items()
    ]


def busy_lines(others_cores: float) -> list[str]:
    """Return a warning if other programs used more than MAX_OTHERS_CORES while the benchmark ran."""
    if others_cores <= MAX_OTHERS_CORES:
        return []
    return [f"other programs used up to {others_cores:.2f} cores: run this benchmark on an idle machine"]


def conclude(
    result: Mapping[str, Any], *, is_kept: bool, bars: Mapping[str, Bar] | None = None, **only_kept: Any
) -> int:
    """Write the result if it is kept, print it as one line of JSON, and return the exit status.

    result["bench"] names the file in bench/results, which gets `only_kept` too. The status is 1 if a bar was
    missed.
    """
    if is_kept:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{result['bench']}.json"
        path.write_text(json.dumps({**result, **only_kept}) + "\n")
        say(f"wrote {path}")
    say(json.dumps(result))
    return 0 if all(one["is_met"] for one in (bars or {}).values()) else 1
