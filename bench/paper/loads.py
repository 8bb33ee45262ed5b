"""The loads of the paper's evaluation: windows of traces, a synthetic burst, a ladder of rates.

As in MorphServe (§5) a trace gives the times, and all requests have one length of prompt and of output. Its
windows last 72 s; here they are thinned until their busiest part asks for what the machine's own speed says.
Thinning keeps every n-th request, so that calm and burst stay in proportion.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from instar.errors import InputError
from instar.replay.schemas import Arrival
from instar.replay.traces import Shaping, load

# A quarter of the paper's 512 and 256 (of the smaller models).
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
SECONDS: Final = 72.0  # of a trace's window, as in the paper
BUSIEST_S: Final = 8.0  # the length of a load's busiest part, its "burst", as sent
GAMMA_CV: Final = 2.5
RATES_PER_STEP: Final = 200  # of the search for a synthetic burst's rate

WANTED: Final = """\
no trace {name} in {folder}
  The Azure LLM inference traces of 2023 (CC-BY 4.0; cite Patel et al., ISCA 2024) are at
  https://github.com/Azure/AzurePublicDataset, in data/AzureLLMInferenceTrace_code.csv and _conv.csv.
  Put both into a folder and say which: make bench-paper TRACES=folder
  Without --traces only the synthetic burst is run."""


@dataclass(frozen=True, slots=True)
class Window:
    """A window of 72 seconds of a trace; `files` are the names that it may have in the folder."""

    name: str
    files: tuple[str, ...]
    start_s: float


WINDOWS: Final = (
    # Two bursts with a pause, up to eleven times the trace's mean rate; and the fullest 72 s.
    Window("Azure code", ("AzureLLMInferenceTrace_code.csv", "azure-llm-2023-code.csv"), 556.0),
    Window("Azure conversation", ("AzureLLMInferenceTrace_conv.csv", "azure-llm-2023-conv.csv"), 1636.0),
)
GAMMA_NAME: Final = "Gamma burst"


@dataclass(frozen=True, slots=True)
class Load:
    """A load: the times of its requests after the beginning, and their number before thinning (`of`)."""

    name: str
    source: str
    seconds: float
    times: list[float] = field(repr=False)
    of: int

    @property
    def burst_rate(self) -> float:
        """The requests per second in the busiest part."""
        return busiest(self.times, BUSIEST_S) / BUSIEST_S

    @property
    def mean_rate(self) -> float:
        return len(self.times) / self.seconds

    def arrivals(self, prompts: Sequence[list[int]]) -> list[Arrival]:
        return requests(self.times, prompts)


def requests(times: Sequence[float], prompts: Sequence[list[int]]) -> list[Arrival]:
    """Return the requests of a load; the n-th has the same prompt in every load."""
    return [
        Arrival(at_s, PROMPT_TOKENS, OUTPUT_TOKENS, prompts[number % len(prompts)])
        for number, at_s in enumerate(times)
    ]


def busiest(times: Sequence[float], seconds: float) -> int:
    """Return the most arrivals in any `seconds`; `times` ascend."""
    return max((bisect_left(times, at_s + seconds) - i for i, at_s in enumerate(times)), default=0)


def thinned(times: Sequence[float], num: int) -> list[float]:
    """Return `num` of the times, evenly by their number."""
    return [times[i * len(times) // num] for i in range(num)]


def fitted(times: Sequence[float], rate: float) -> list[float]:
    """Return as many times as ask for no more than `rate` in their busiest part."""
    most = rate * BUSIEST_S
    for num in range(len(times), 1, -1):
        if busiest(found := thinned(times, num), BUSIEST_S) <= most:
            return found
    return list(times[:1])


def find_trace(folder: Path, window: Window) -> Path:
    """Return the path of a trace. Raises InputError that says where to get it."""
    for name in window.files:
        if (path := folder / name).is_file():
            return path
    raise InputError(WANTED.format(name=" or ".join(window.files), folder=folder))


def window_load(path: Path, window: Window, speed: float, rate: float) -> Load:
    """Return the load of a window. Raises InputError if the trace is not readable."""
    trace = load(str(path), "auto", Shaping(window.start_s, SECONDS, rate=speed))
    times = [one.at_s for one in trace.arrivals]
    source = f"{path.name}, {window.start_s:g} to {window.start_s + SECONDS:g} s"
    return Load(window.name, source, SECONDS / speed, fitted(times, rate), len(times))


def gamma_load(seconds: float, rate: float, seed: int = 1) -> Load:
    """Return the synthetic burst of the highest rate with at most `rate` in its busiest part."""
    found: tuple[str, list[float]] | None = None
    for step in range(1, RATES_PER_STEP + 1):
        source = f"gamma:{rate * step / RATES_PER_STEP:.4g}:{GAMMA_CV:g}:{seconds:g}"
        times = [one.at_s for one in load(source, "auto", Shaping(), seed).arrivals]
        if found is None or busiest(times, BUSIEST_S) <= rate * BUSIEST_S:
            found = source, times
    if found is None:
        raise AssertionError("a search of no steps")
    return Load(GAMMA_NAME, found[0], seconds, found[1], len(found[1]))


def all_loads(
    traces: Path | None, speed: float, rate: float, note: Callable[[str], None] = lambda _: None
) -> list[Load]:
    """Return the loads; without a folder the synthetic burst alone. Raises InputError for a missing trace."""
    loads = []
    for window in WINDOWS if traces else ():
        loads.append(window_load(find_trace(traces or Path(), window), window, speed, rate))
        if loads[-1].burst_rate < 0.9 * rate and len(loads[-1].times) == loads[-1].of:
            note(
                f"{window.name}: all its requests ask for {loads[-1].burst_rate:.1f}/s, wanted are {rate:.1f}"
            )
    return [*loads, gamma_load(SECONDS / speed, rate)]


def steady(rate: float, seconds: float, seed: int) -> list[float]:
    """Return random times, as of a Poisson process, but as many as the rate says."""
    rng = random.Random(seed)
    return sorted(rng.uniform(0.0, seconds) for _ in range(max(1, round(rate * seconds))))
