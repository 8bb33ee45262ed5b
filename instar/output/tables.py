"""Printing of tables, lines and JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

ABSENT: Final = "-"  # not reported, which is not zero
MIB: Final = 1 << 20
_TRAILING: Final = re.compile(r"(?: |\x1b\[[\d;]*m)+$", re.MULTILINE)


@contextmanager
def trimmed(console: Console | None = None) -> Iterator[Console]:
    """Print what the block prints without the blanks that rich fills lines up with. Colours stay.

    The blanks would wrap on a narrower screen, and stay in files that keep the output.
    """
    console = console or Console()
    with console.capture() as capture:
        yield console
    console.file.write(_TRAILING.sub(lambda end: end[0].replace(" ", ""), capture.get()))
    console.file.flush()


def print_line(console: Console, line: Any) -> None:
    """Print without markup and highlighting: names may hold brackets."""
    console.print(line, highlight=False, markup=False)


def make_table(words: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """Return an empty table. Long words wrap, numbers do not. A header's second line is its unit."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def write_text(text: str) -> int:
    """Write `text` to standard output. Returns exit status 0."""
    sys.stdout.write(text)
    return 0


def write_json(found: Any, *, is_good: bool = True) -> int:
    """Write `found` as JSON to standard output. Returns the exit status."""
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return int(not is_good)


def with_reason(text: str, reason: str | None) -> str:
    """Return `text (reason)`."""
    return f"{text} ({reason})" if reason else text


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
