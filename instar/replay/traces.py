"""The requests of a run: a window of a trace, with scaled rate and lengths, or a synthetic burst."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from instar.errors import InputError
from instar.replay.schemas import Arrival, read_rows

GAMMA: Final = "gamma:"
GAMMA_FORM: Final = "gamma:RATE:CV:SECONDS[:PROMPT:OUTPUT], such as gamma:4:2.5:60 or gamma:4:2.5:60:128:64"
MAX_REQUESTS: Final = 2_000_000  # all prompts are made before the first request is sent
GAMMA_TOKENS: Final = (256, 64)  # mean prompt and output of a synthetic burst


@dataclass(frozen=True, slots=True)
class Shaping:
    """The steps from a trace to a workload, in the order of the fields."""

    start_s: float = 0.0  # start of the window, in seconds of the trace
    length_s: float | None = None  # None: to the end
    keeps_zero: bool = False  # rows with zero tokens
    limit: int | None = None  # number of requests
    rate: float = 1.0  # factor
    lengths: float = 1.0  # factor of prompts and outputs


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run."""

    source: str
    format: str
    arrivals: list[Arrival] = field(repr=False)
    seconds: float  # length of the window, or time until the last arrival
    zero_rows: int = 0  # without prompt or output
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
        kind, _, numbers = source.partition(":")
        hint = f"a synthetic burst is written as {GAMMA_FORM}"
        if get_close_matches(kind.lower(), [GAMMA.removesuffix(":")]):
            hint = f"did you mean {GAMMA}{numbers}?"
        raise InputError(f"{source}: there is no such file; {hint}")
    name, rows = read_rows(path, wanted)
    return cut(name, path.name, rows, shaping)


def cut(name: str, source: str, rows: Iterable[Arrival], shaping: Shaping) -> Workload:
    """Cut and scale `rows`, reading no further than the window's end. Raises InputError if none is left."""
    begins = shaping.start_s
    ends = math.inf if shaping.length_s is None else begins + shaping.length_s
    first = last = after = None
    num_rows, zero_rows, notes = 0, 0, list[str]()
    found: list[Arrival] = []
    for row in rows:
        first = row.at_s if first is None else first
        at_s = row.at_s - first
        if at_s >= ends:
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
        found.append(_shaped(row, at_s - begins, shaping))
    else:
        if last is None:
            raise InputError(f"{source}: has no request, only a header")
        if begins > last:
            raise InputError(
                f"{source}: --window begins at {begins:g} s, and the trace has {last:.1f} s "
                f"({num_rows} requests)"
            )
        if last + 1.0 < ends < math.inf:
            notes.append(f"the trace ends {ends - last:.1f} s before the window does")
    if not found:
        raise InputError(_nothing_left(source, begins, ends, zero_rows, after))
    if len(found) == MAX_REQUESTS:
        notes.append(f"only the first {MAX_REQUESTS} requests: use a --window")
    is_whole = shaping.length_s is not None and shaping.limit is None
    seconds = (shaping.length_s or 0.0) / shaping.rate if is_whole else found[-1].at_s
    return Workload(source, name, found, seconds, zero_rows, notes)


def _shaped(row: Arrival, at_s: float, shaping: Shaping) -> Arrival:
    """Return the request. A recorded prompt is sent as it was, unless its length is scaled."""
    return Arrival(
        round(at_s / shaping.rate, 6),
        _length(row.prompt_tokens * shaping.lengths),
        _length(row.output_tokens * shaping.lengths),
        row.prompt if shaping.lengths == 1.0 else None,
    )


def _length(tokens: float) -> int:
    return max(1, round(tokens))


def _nothing_left(source: str, begins: float, ends: float, zero_rows: int, after: float | None) -> str:
    where = f"from {begins:g} s on" if ends == math.inf else f"between {begins:g} and {ends:g} s"
    if zero_rows:
        return f"{source}: all {zero_rows} requests {where} have zero tokens; --keep-zero sends one for each"
    following = "" if after is None else f"; the next is at {after:.1f} s"
    return f"{source}: there is no request {where}{following}"


def gamma_burst(source: str, seed: int) -> Iterator[Arrival]:
    """Yield a synthetic burst.

    Inter-arrival times have a Gamma distribution with mean 1/RATE and coefficient of variation CV (shape
    1/CV^2, scale CV^2/RATE), as BurstGPT (Wang et al., 2024) models bursts; CV 1 is a Poisson process.
    Lengths are exponential around their means. Raises InputError.
    """
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
    rng = random.Random(seed)
    at_s = 0.0
    while at_s < seconds:
        yield Arrival(at_s, _length(rng.expovariate(1 / prompt)), _length(rng.expovariate(1 / output)))
        at_s += rng.gammavariate(1 / cv**2, cv**2 / rate)
