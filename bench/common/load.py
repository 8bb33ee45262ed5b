"""Load that benchmarks put on a service: sent as `instar bench replay` sends it, an open loop.

A request is sent when it is due, whatever became of those before it, so its time to the first token contains
the queue that it found. The client shares the machine with what it measures, so it parses only a stream's
end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final

import msgspec

from instar.replay.generator import Generator
from instar.replay.outcomes import RequestOutcome
from instar.replay.requests import Dialect, bodies
from instar.replay.schemas import Arrival
from instar.replay.wire import Exchange, ServerAddress

MODEL: Final = "demo"
VOCABULARY: Final = range(16, 4096)  # token ids of the demo model and the dummies, without special tokens
WATCH_S: Final = 10.0  # between two calls of `watch`


class Recorder(Generator):
    """A replay that keeps the text of each served request and the times of its tokens, by its number.

    `token_s` counts seconds from the beginning of the run, one entry for each event with tokens.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.texts: dict[int, str] = {}
        self.token_s: dict[int, list[float]] = defaultdict(list)

    def _exchange_for(self, outcome: RequestOutcome) -> Exchange:
        times = self.token_s[outcome.number]

        def count(num: int, now: float) -> None:
            self.run.count_events(num, now)
            times.extend([now - self.run.began] * num)

        return Exchange(count)

    def _conclude(self, outcome: RequestOutcome, exchange: Exchange, problem: str) -> None:
        super()._conclude(outcome, exchange, problem)
        del self.token_s[outcome.number][outcome.events :]  # the last event may carry the usage alone
        if outcome.is_served:
            self.texts[outcome.number] = text_of(bytes(exchange.tail))


def text_of(stream: bytes) -> str:
    """Return the text of all events in a stream of completions."""
    found = []
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            event = msgspec.json.decode(line[6:])
            found += [choice.get("text", "") for choice in event.get("choices", ())]
    return "".join(found)


def play(
    url: str,
    arrivals: Sequence[Arrival],
    *,
    drain_s: float,
    dialect: Dialect | None = None,
    watch: Callable[[Recorder], None] | None = None,
) -> Recorder:
    """Send each request when it is due, and give up what is unfinished `drain_s` after the last was due.

    `watch` is called every WATCH_S in a thread of its own.
    """
    name = f"bench-{time.time_ns() // 1_000_000}"
    prompts = bodies(arrivals, MODEL, dialect or Dialect(), seed=0)
    recorder = Recorder(ServerAddress.at(url, None), arrivals, prompts, drain_s=drain_s, name=name)
    asyncio.run(_play(recorder, watch))
    return recorder


async def _play(recorder: Recorder, watch: Callable[[Recorder], None] | None) -> None:
    async def keep_watching() -> None:
        while watch is not None:
            await asyncio.sleep(WATCH_S)
            await asyncio.to_thread(watch, recorder)

    watching = asyncio.create_task(keep_watching())
    await recorder.replay()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def play_to_end(
    url: str, arrivals: Sequence[Arrival], drain_s: float = 120.0, dialect: Dialect | None = None
) -> Recorder:
    """Like `play`, but raise RuntimeError if a request was not served to its last token."""
    recorder = play(url, arrivals, drain_s=drain_s, dialect=dialect)
    for one in recorder.run.outcomes:
        if not one.is_served or one.finish != "length":
            raise RuntimeError(f"request {one.number} was not served to its end: {one.error or one.finish}")
    return recorder


def saturate(url: str, arrivals: Sequence[Arrival], seconds: float) -> float:
    """Return the output tokens per second of requests that are all due at once, while they last.

    There must be more requests than the service ends in `seconds`. The first third does not count: prompts
    are computed then, and the cache fills.
    """
    run = play(url, arrivals, drain_s=seconds).run
    return fmean(run.events_in[second] for second in range(math.ceil(seconds / 3), int(seconds)))
