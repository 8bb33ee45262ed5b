"""The requests of a run: a window of a trace, with scaled rate and lengths, or a synthetic burst."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from instar.errors import InputError
from instar.replay.schemas import Row, read_rows

GAMMA: Final = "gamma:"
GAMMA_FORM: Final = "gamma:RATE:CV:SECONDS[:PROMPT:OUTPUT], such as gamma:4:2.5:60 or gamma:4:2.5:60:128:64"
MAX_REQUESTS: Final = 2_000_000  # all prompts are made before the first request is sent
GAMMA_TOKENS: Final = (256, 64)  # mean prompt and output of a synthetic burst


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is due `at_s` seconds after the beginning of the run."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prompt: list[int] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Shaping:
    """How a trace becomes a workload, in the order of the fields.

    The window (in seconds of the trace; `length_s` None: to its end), rows with zero tokens, the number of
    requests, then factors of the rate and of both lengths.
    """

    start_s: float = 0.0
    length_s: float | None = None
    keeps_zero: bool = False
    limit: int | None = None
    rate: float = 1.0
    lengths: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run.

    `zero_rows` had no prompt or no output. `seconds` lasts from the beginning of the window to its end, or to
    the last arrival.
    """

    source: str
    format: str
    arrivals: list[Arrival] = field(repr=False)
    seconds: float
    zero_rows: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """A hash of arrival times and lengths."""
        text = "".join(f"{one.at_s:.6f} {one.prompt_tokens} {one.output_tokens}\n" for one in self.arrivals)
        return hashlib.sha256(text.encode()).hexdigest()


def load(source: str, wanted: str, shaping: Shaping, seed: int = 0) -> Workload:
    """Read a file or make the burst gamma:RATE:CV:SECONDS[:PROMPT:OUTPUT]. Raises InputError."""
    if source.startswith(GAMMA):
        return cut("gamma", source, gamma_burst(source, seed), shaping)
    path = Path(source)
    if ":" in source and not path.exists():
        raise InputError(f"{source}: {_no_burst(source)}")
    name, rows = read_rows(path, wanted)
    return cut(name, path.name, rows, shaping)


def _no_burst(source: str) -> str:
    kind, _, numbers = source.partition(":")
    if get_close_matches(kind.lower(), [GAMMA.removesuffix(":")]):
        return f"there is no such file; did you mean {GAMMA}{numbers}?"
    return f"there is no such file; a synthetic burst is written as {GAMMA_FORM}"


def cut(name: str, source: str, rows: Iterable[Row], shaping: Shaping) -> Workload:
    """Cut and scale `rows`, reading no further than the window's end. Raises InputError if none is left."""
    begins, ends = shaping.start_s, None
    if shaping.length_s is not None:
        ends = shaping.start_s + shaping.length_s
    first = last = after = None
    num_rows, zero_rows, notes = 0, 0, list[str]()
    found: list[Arrival] = []
    for row in rows:
        first = row.at_s if first is None else first
        at_s = row.at_s - first
        if ends is not None and at_s >= ends:
            after = at_s
            break
        last, num_rows = at_s, num_rows + 1
        if at_s < begins:
            continue
        if not (row.prompt_tokens and row.output_tokens):
            zero_rows += 1
            if not shaping.keeps_zero:
                continue
        if len(found) == (shaping.limit or MAX_REQUESTS):
            break
        found.append(_arrival(row, at_s - begins, shaping))
    else:
        if first is None or last is None:
            raise InputError(f"{source}: has no request, only a header")
        if begins > last:
            raise InputError(
                f"{source}: --window begins at {begins:g} s, and the trace has {last:.1f} s "
                f"({num_rows} requests)"
            )
        if ends is not None and ends > last + 1.0:
            notes.append(f"the trace ends {ends - last:.1f} s before the window does")
    if not found:
        raise InputError(_nothing_left(source, begins, ends, zero_rows, after))
    if len(found) == MAX_REQUESTS:
        notes.append(f"only the first {MAX_REQUESTS} requests: use a --window")
    whole = shaping.length_s is not None and shaping.limit is None
    seconds = (shaping.length_s or 0.0) / shaping.rate if whole else found[-1].at_s
    return Workload(source, name, found, seconds, zero_rows, notes)


def _arrival(row: Row, at_s: float, shaping: Shaping) -> Arrival:
    """Return the request. A recorded prompt is sent as it was, unless its length is scaled."""
    return Arrival(
        round(at_s / shaping.rate, 6),
        scaled(row.prompt_tokens, shaping.lengths),
        scaled(row.output_tokens, shaping.lengths),
        row.prompt if shaping.lengths == 1.0 else None,
    )


def scaled(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))


def _nothing_left(source: str, begins: float, ends: float | None, zero_rows: int, after: float | None) -> str:
    where = f"from {begins:g} s on" if ends is None else f"between {begins:g} and {ends:g} s"
    if zero_rows:
        return f"{source}: all {zero_rows} requests {where} have zero tokens; --keep-zero sends one for each"
    following = "" if after is None else f"; the next is at {after:.1f} s"
    return f"{source}: there is no request {where}{following}"


def gamma_burst(source: str, seed: int) -> Iterable[Row]:
    """Yield a synthetic burst.

    Inter-arrival times have a Gamma distribution with mean 1/RATE and coefficient of variation CV (shape
    1/CV^2, scale CV^2/RATE), as BurstGPT (Wang et al., 2024) models bursts; CV 1 is a Poisson process.
    Lengths are exponential around their means. Raises InputError.
    """
    rate, cv, seconds, prompt, output = _gamma_numbers(source)
    rng = random.Random(seed)
    at_s = 0.0
    while at_s < seconds:
        yield Row(at_s, _exponential(rng, prompt), _exponential(rng, output))
        at_s += rng.gammavariate(1 / cv**2, cv**2 / rate)


def _exponential(rng: random.Random, mean: float) -> int:
    return max(1, round(rng.expovariate(1 / mean)))


def _gamma_numbers(source: str) -> tuple[float, float, float, float, float]:
    words = source.removeprefix(GAMMA).split(":")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) == 3:
        numbers += GAMMA_TOKENS
    if len(numbers) != 5 or not all(0 < number < 1e7 for number in numbers):
        raise InputError(f"{source} is not a burst of numbers above 0; write it as {GAMMA_FORM}")
    rate, cv, seconds, prompt, output = numbers
    return rate, cv, seconds, prompt, output
