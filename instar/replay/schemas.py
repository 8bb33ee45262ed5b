"""The formats of traces, read row by row.

| name | columns | time |
| --- | --- | --- |
| azure-2023, azure-2024 | TIMESTAMP, ContextTokens, GeneratedTokens | a date; UTC where it names no zone |
| burstgpt | Timestamp, Request tokens, Response tokens, others | seconds |
| instar | JSON lines of `instar bench record`: at, prompt_tokens, output_tokens | seconds since 1970 |

Azure: github.com/Azure/AzurePublicDataset (2023: seven digits of a second and no zone; 2024: six and +00:00).
BurstGPT: github.com/HPMLL/BurstGPT; its later files have more columns, which are not needed here.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TextIO

import msgspec

from instar.errors import TraceError

MAX_TOKENS: Final = 10_000_000  # of one request: more means that columns are mixed up


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace, at `at_s` of the trace's own clock. The prompt is there if it was recorded."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Schema:
    """A CSV format: the names of the columns, and how the time column is read as seconds."""

    name: str
    at: str
    prompt: str
    output: str
    seconds: Callable[[str], float]

    @property
    def columns(self) -> tuple[str, str, str]:
        return self.at, self.prompt, self.output


def _of_date(text: str) -> float:
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


SCHEMAS: Final = {
    schema.name: schema
    for schema in (
        Schema("azure-2023", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _of_date),
        Schema("azure-2024", "TIMESTAMP", "ContextTokens", "GeneratedTokens", _of_date),
        Schema("burstgpt", "Timestamp", "Request tokens", "Response tokens", float),
    )
}
OWN: Final = Schema("instar", "at", "prompt_tokens", "output_tokens", float)
FORMATS: Final = ("auto", *SCHEMAS, OWN.name)
OWN_LINE: Final = 'a line is an object such as {"at": 1700000000.5, "prompt_tokens": 12, "output_tokens": 4}'


def read_rows(path: Path, wanted: str = "auto") -> tuple[str, Iterator[Row]]:
    """Return the format's name and the rows in order of their time.

    A CSV file is read once from the beginning, so it may be a pipe. Raises TraceError, also later for a row.
    """
    try:
        file = path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror}") from error
    try:
        first = file.readline()
    except UnicodeDecodeError as error:
        file.close()
        raise TraceError(path, 1, "is not text; unpack it if it is an archive") from error
    if not first.strip():
        file.close()
        raise TraceError(path, 0, "is empty: it has no request")
    if wanted == OWN.name or (wanted == "auto" and first.lstrip().startswith("{")):
        return OWN.name, _own_rows(path, file, first)
    try:
        header = [name.strip() for name in next(csv.reader([first]))]
        second = file.readline()
        schema = _schema(path, header, first, second, wanted)
    except (csv.Error, UnicodeDecodeError) as error:
        file.close()
        raise TraceError(path, 1, f"cannot be read as CSV: {error}") from error
    except TraceError:
        file.close()
        raise
    return schema.name, _csv_rows(path, file, second, schema, header)


def _schema(path: Path, header: list[str], first: str, second: str, wanted: str) -> Schema:
    """Return the requested format, or the one whose columns are all there.

    The first date of an Azure trace tells its year: only that of 2024 has a time zone.
    """
    known = [SCHEMAS[wanted]] if wanted != "auto" else list(SCHEMAS.values())
    fitting = [schema for schema in known if set(schema.columns) <= set(header)]
    if not fitting:
        raise TraceError(path, 1, _unknown(known, header, ", ".join(header)[:200] or first.strip()[:80]))
    if wanted == "auto" and len(fitting) > 1:
        return SCHEMAS["azure-2024" if "+" in second else "azure-2023"]
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


def _csv_rows(path: Path, file: TextIO, second: str, schema: Schema, header: list[str]) -> Iterator[Row]:
    """Yield the rows; `second` is the line that was read already."""
    places = [header.index(name) for name in schema.columns]
    before, before_text = -math.inf, ""
    with file, _located(path) as at:
        for at.line, cells in enumerate(csv.reader(chain([second], file)), start=2):
            if not cells:
                continue
            if len(cells) <= max(places):
                raise ValueError(f"has {len(cells)} columns, the header {len(header)}")
            row = _row(schema, [cells[place] for place in places])
            text = cells[places[0]]
            if row.at_s < before:
                raise ValueError(f"{text} is before {before_text}, the line above: sort the trace")
            before, before_text = row.at_s, text
            yield row


def _own_rows(path: Path, file: TextIO, first: str) -> Iterator[Row]:
    """Yield the rows by arrival: `instar bench record` writes them as requests end."""
    found = []
    with file, _located(path) as at:
        for at.line, line in enumerate(chain([first], file), start=1):
            if line.strip():
                found.append(_own_row(line))
    yield from sorted(found, key=lambda row: row.at_s)


@contextmanager
def _located(path: Path) -> Iterator[SimpleNamespace]:
    """Turn what is wrong in the block into a TraceError of the current `line`."""
    at = SimpleNamespace(line=0)
    try:
        yield at
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(path, 0, f"cannot be read: {error}") from error
    except ValueError as error:
        raise TraceError(path, at.line, str(error)) from error


def _own_row(line: str) -> Row:
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{line.strip()[:60]!r} is not JSON; {OWN_LINE}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{line.strip()[:60]!r} is not an object; {OWN_LINE}")
    if missing := [name for name in OWN.columns if name not in fields]:
        there = ", ".join(fields)[:200] or "nothing"
        raise ValueError(f"has no {' and no '.join(missing)}, but {there}; {OWN_LINE}")
    row = _row(OWN, [_text(fields[name]) for name in OWN.columns])
    prompt = fields.get("prompt_token_ids")
    if prompt is None:
        return row
    if not isinstance(prompt, list):
        raise ValueError(f"prompt_token_ids is {_text(prompt)!r}, not a list of token ids")
    if wrong := [one for one in prompt if type(one) is not int or one < 0]:
        raise ValueError(f"prompt_token_ids holds {_text(wrong[0])!r}, not a whole number, 0 or more")
    if len(prompt) != row.prompt_tokens:
        raise ValueError(f"prompt_tokens is {row.prompt_tokens}, prompt_token_ids holds {len(prompt)}")
    return replace(row, prompt=prompt)


def _text(value: Any) -> str:
    """Return the value as the file has it."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()[:60]


def _row(schema: Schema, texts: Sequence[str]) -> Row:
    """Parse the time and the two counts. Raises ValueError."""
    at, prompt, output = texts
    return Row(_seconds(schema, at), _tokens(schema.prompt, prompt), _tokens(schema.output, output))


def _seconds(schema: Schema, text: str) -> float:
    try:
        at_s = schema.seconds(text.strip())
    except ValueError:
        at_s = math.nan
    if not math.isfinite(at_s):
        kind = "a number of seconds" if schema.seconds is float else "a date like 2023-11-16 18:17:03.9799600"
        raise ValueError(f"{schema.at} is {text!r}, not {kind}")
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
