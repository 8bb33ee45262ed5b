"""The load of the serving benchmark: seeded arrivals of short and long requests, each a stream of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.common import load
from bench.common.load import VOCABULARY, Recorder
from instar.replay import schemas
from instar.replay.outcomes import UNFINISHED, RequestOutcome
from instar.replay.requests import Dialect

OUTPUT_SHARE: Final = 0.103  # output share of a short request (Gyges §5)


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """The lengths of requests in tokens, and times in seconds.

    Long requests come every `long_every_s` from `first_long_s` on. What comes and goes in [warm_up_s,
    seconds) counts; afterwards no request comes any more, and those that run have `drain_s`.
    """

    short_prompt: int
    short_output: int
    long_prompt: int
    long_output: int
    seconds: float
    warm_up_s: float
    first_long_s: float
    drain_s: float
    short_per_minute: float = 60.0
    long_every_s: float = 60.0

    @property
    def long_tokens(self) -> int:
        return self.long_prompt + self.long_output

    @property
    def asked_tokens_per_s(self) -> float:
        """The tokens per second that the load asks for in the long run."""
        short = self.short_per_minute / 60 * (self.short_prompt + self.short_output)
        return short + self.long_tokens / self.long_every_s


@dataclass(frozen=True, slots=True)
class LoadArrival:
    """A request, due `at_s` after the beginning."""

    number: int
    at_s: float
    prompt: list[int] = field(repr=False)
    num_out: int = 1
    is_long: bool = False


@dataclass(slots=True)
class LoadServed:
    """The outcome of a request.

    Times are seconds after the beginning, `token_s` one for each event with tokens.

    `refused` and `error` name the failure. A request with neither that is not `is_whole` was still running.
    """

    arrival: LoadArrival
    token_s: list[float] = field(default_factory=list, repr=False)
    text: str = field(default="", repr=False)
    is_whole: bool = False
    refused: str = ""
    error: str = ""

    def tokens_between(self, begin_s: float, end_s: float) -> float:
        """Return the tokens processed then: the prompt with the first token, and each token of the output.

        Of a stream that ended each event counts for its share of the tokens, since one may bring several.
        """
        if not self.token_s:
            return 0.0
        each = self.arrival.num_out / len(self.token_s) if self.is_whole else 1.0
        prompt = len(self.arrival.prompt) if begin_s <= self.token_s[0] < end_s else 0
        return prompt + each * sum(begin_s <= at_s < end_s for at_s in self.token_s)

    def ttft_s(self, now_s: float) -> float:
        """Return the time to the first token from when the request was due; so far, if there is none yet."""
        return (self.token_s[0] if self.token_s else now_s) - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """The mean time per token after the first, of a request that is whole."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, self.arrival.num_out - 1)


def arrivals(load: ServingLoad, seed: int) -> list[LoadArrival]:
    """Return the requests, the same for the same seed.

    Short ones come at random, as of a Poisson process, but their number is what the rate says: with some
    dozens the number itself would decide how hard a run is.
    """
    rng = random.Random(seed)
    count = round(load.short_per_minute / 60 * load.seconds)
    due = [(rng.uniform(0, load.seconds), False) for _ in range(count)]
    at_s = load.first_long_s
    while at_s < load.seconds:
        due.append((at_s, True))
        at_s += load.long_every_s
    return [_arrival(load, rng, number, *one) for number, one in enumerate(sorted(due))]


def _arrival(load: ServingLoad, rng: random.Random, number: int, at_s: float, is_long: bool) -> LoadArrival:
    length = load.long_prompt if is_long else load.short_prompt
    num_out = load.long_output if is_long else load.short_output
    return LoadArrival(number, at_s, rng.choices(VOCABULARY, k=length), num_out, is_long)


def replay(
    url: str,
    script: Sequence[LoadArrival],
    end_s: float,
    watch: Callable[[float, Sequence[LoadServed]], None] | None = None,
) -> list[LoadServed]:
    """Send the requests when they are due, and give up those that have not ended `end_s` after the beginning.

    `watch` is called every few seconds, in a thread of its own, with the time and all requests as they are.
    """

    def look(recorder: Recorder) -> None:
        if watch:
            watch(recorder.run.now_s, served_by(recorder, script))

    requests = [schemas.Arrival(one.at_s, len(one.prompt), one.num_out, one.prompt) for one in script]
    recorder = load.play(
        url, requests, drain_s=end_s - script[-1].at_s, dialect=Dialect(precision=False), watch=look
    )
    return served_by(recorder, script)


def served_by(recorder: Recorder, script: Sequence[LoadArrival]) -> list[LoadServed]:
    return [
        served(arrival, outcome, recorder.token_s[outcome.number], recorder.texts.get(outcome.number, ""))
        for arrival, outcome in zip(script, recorder.run.outcomes, strict=True)
    ]


def served(arrival: LoadArrival, outcome: RequestOutcome, token_s: Sequence[float], text: str) -> LoadServed:
    """Return the outcome of a request so far."""
    error = "" if outcome.error == UNFINISHED else outcome.error
    return LoadServed(
        arrival,
        list(token_s),
        text,
        is_whole=outcome.is_served and outcome.finish == "length",
        refused=error if outcome.status == 400 else "",
        error="" if outcome.status == 400 else error,
    )
