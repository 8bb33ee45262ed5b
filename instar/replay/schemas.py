"""The formats of traces, read row by row. docs/replay.md lists them with their sources."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Final

import msgspec

from instar.errors import TraceError

MAX_TOKENS: Final = 10_000_000  # tokens of one request: more means mixed-up columns


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, at `at_s` of the trace's own clock or of the run. The prompt is there if it was recorded."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: list[int] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """A format: its columns of time, prompt and output tokens, and how the time is read as seconds."""

    name: str
    columns: tuple[str, str, str]
    seconds: Callable[[str], float] = float


def _of_date(text: str) -> float:
    """Parse a date, in UTC where it names no zone."""
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SCHEMAS: Final = {
    schema.name: schema
    for schema in (
        Schema("azure-2023", AZURE, _of_date),
        Schema("azure-2024", AZURE, _of_date),
        Schema("burstgpt", ("Timestamp", "Request tokens", "Response tokens")),
    )
}
OWN: Final = Schema("instar", ("at", "prompt_tokens", "output_tokens"))
FORMATS: Final = ("auto", *SCHEMAS, OWN.name)
OWN_LINE: Final = 'a line is an object such as {"at": 1700000000.5, "prompt_tokens": 12, "output_tokens": 4}'


def read_rows(path: Path, wanted: str = "auto") -> tuple[str, Iterator[Arrival]]:
    """Return the format's name and the rows in order of their time.

    A CSV file is read once from the beginning, so it may be a pipe. Raises TraceError, also later for a row.
    """
    lines = _lines(path)
    first = next(lines, "")
    if not first.strip():
        raise TraceError(path, 0, "is empty: it has no request")
    if wanted == OWN.name or (wanted == "auto" and first.lstrip().startswith("{")):
        return OWN.name, _own_rows(path, chain([first], lines))
    try:
        header = [name.strip() for name in next(csv.reader([first]))]
    except csv.Error as error:
        raise TraceError(path, 1, f"cannot be read as CSV: {error}") from error
    second = next(lines, "")
    schema = _schema(path, header, first, second, wanted)
    return schema.name, _csv_rows(path, chain([second], lines), schema, header)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from file
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(path, 0, "is not text; unpack it if it is an archive") from error


def _schema(path: Path, header: list[str], first: str, second: str, wanted: str) -> Schema:
    """Return the requested format, or the one whose columns are all there."""
    known = [SCHEMAS[wanted]] if wanted != "auto" else list(SCHEMAS.values())
    fitting = [schema for schema in known if set(schema.columns) <= set(header)]
    if not fitting:
        raise TraceError(path, 1, _unknown(known, header, ", ".join(header)[:200] or first.strip()[:80]))
    if wanted == "auto" and len(fitting) > 1:
        return SCHEMAS["azure-2024" if "+" in second else "azure-2023"]  # the first date's time zone decides
    return fitting[0]


def _unknown(known: list[Schema], header: list[str], found: str) -> str:
    """Return what the nearest format lacks, or all formats if none is near."""
    nearest = max(known, key=lambda schema: len(set(schema.columns) & set(header)))
    missing = [name for name in nearest.columns if name not in header]
    if len(known) > 1 and len(missing) == len(nearest.columns):
        return f"its columns fit no format: {found}. The formats are {_all_formats()}"
    columns = "column" if len(missing) == 1 else "columns"
    return f"as {nearest.name} it needs the {columns} {' and '.join(missing)}; found are: {found}"


def _all_formats() -> str:
    """Return `azure-2023 and azure-2024 (TIMESTAMP, ...), burstgpt (...), instar (JSON lines of ...)`."""
    names: dict[str, list[str]] = {}
    for schema in (*SCHEMAS.values(), OWN):
        lines = "JSON lines of " if schema is OWN else ""
        names.setdefault(lines + ", ".join(schema.columns), []).append(schema.name)
    return ", ".join(f"{' and '.join(alike)} ({columns})" for columns, alike in names.items())


def _csv_rows(path: Path, lines: Iterable[str], schema: Schema, header: list[str]) -> Iterator[Arrival]:
    """Yield the rows of `lines`, which follow the header."""
    places = [header.index(name) for name in schema.columns]
    before, before_text = -math.inf, ""
    reader = csv.reader(lines)
    try:
        for cells in filter(None, reader):
            if len(cells) <= max(places):
                raise ValueError(f"has {len(cells)} columns, the header {len(header)}")
            texts = [cells[place] for place in places]
            row = _row(schema, texts)
            if row.at_s < before:
                raise ValueError(f"{texts[0]} is before {before_text}, the line above: sort the trace")
            before, before_text = row.at_s, texts[0]
            yield row
    except (csv.Error, ValueError) as error:
        raise TraceError(path, reader.line_num + 1, str(error)) from error


def _own_rows(path: Path, lines: Iterable[str]) -> Iterator[Arrival]:
    """Yield the rows by arrival: `instar bench record` writes them as requests end."""
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                found.append(_own_row(line))
        except ValueError as error:
            raise TraceError(path, number, str(error)) from error
    yield from sorted(found, key=lambda row: row.at_s)


class _OwnLine(msgspec.Struct):
    at: float
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    output_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None


def _own_row(line: str) -> Arrival:
    try:
        row = msgspec.json.decode(line, type=_OwnLine)
    except msgspec.DecodeError as error:
        raise ValueError(f"{line.strip()[:120]!r}: {error}; {OWN_LINE}") from error
    ids = row.prompt_token_ids
    if ids is not None and len(ids) != row.prompt_tokens:
        raise ValueError(f"prompt_tokens is {row.prompt_tokens}, prompt_token_ids holds {len(ids)}")
    return Arrival(row.at, row.prompt_tokens, row.output_tokens, ids)


def _row(schema: Schema, texts: Sequence[str]) -> Arrival:
    """Parse the time and the two counts. Raises ValueError."""
    prompt, output = map(_tokens, schema.columns[1:], texts[1:])
    return Arrival(_seconds(schema, texts[0]), prompt, output)


def _seconds(schema: Schema, text: str) -> float:
    try:
        at_s = schema.seconds(text.strip())
    except ValueError:
        at_s = math.nan
    if not math.isfinite(at_s):
        kind = "a number of seconds" if schema.seconds is float else "a date like 2023-11-16 18:17:03.9799600"
        raise ValueError(f"{schema.columns[0]} is {text!r}, not {kind}")
    return at_s


def _tokens(column: str, text: str) -> int:
    """Parse a whole number; some files write 12.0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer() or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{column} is {text!r}, not a whole number of tokens, 0 to {MAX_TOKENS}")
    return int(value)
