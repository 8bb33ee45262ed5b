"""Printing of tables, lines and JSON."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Print what the block prints without trailing blanks, which wrap on a narrower screen. Colours stay."""
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
    write_text(json.dumps(found, indent=2) + "\n")
    return int(not is_good)


def write_found(args: Namespace, found: Any, words: Callable[[Any], str], *, is_good: bool = True) -> int:
    """Write `found` as JSON with --json, else in `words`. Returns the exit status."""
    if args.json:
        return write_json(found, is_good=is_good)
    write_text(words(found))
    return int(not is_good)


def write_parts(args: Namespace, found: Any, parts: Iterable[Any], *, is_good: bool = True) -> int:
    """Write `found` as JSON with --json, else print tables and lines. Returns the exit status."""
    if args.json:
        return write_json(found, is_good=is_good)
    with trimmed() as console:
        for part in parts:
            print_line(console, part)
    return int(not is_good)


def with_reason(text: str, reason: str | None) -> str:
    """Return `text (reason)`."""
    return f"{text} ({reason})" if reason else text


def short(value: float) -> str:
    """Return three digits, without an exponent from 1000 to 10 million."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.2g}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
