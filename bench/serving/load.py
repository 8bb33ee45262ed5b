"""The load of the serving benchmark: seeded arrivals of short and long requests, each a stream of its own.

Open loop: a request is sent when it is due, whatever became of those before it, so its time to the first
token counts the queue it found. At the end whoever still waits hangs up.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

VOCABULARY: Final = range(16, 4096)  # without the tokenizer's special tokens
OUTPUT_SHARE: Final = 0.103  # of a short request (Gyges §5)


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of requests; seconds. Long ones come every `long_every_s` from `first_long_s` on. What comes
    and goes in [warm_up_s, seconds) counts; then nothing comes any more, and what runs has `drain_s`."""

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
        """In the long run."""
        short = self.short_per_minute / 60 * (self.short_prompt + self.short_output)
        return short + self.long_tokens / self.long_every_s


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` after the beginning."""

    number: int
    at_s: float
    prompt: list[int] = field(repr=False)
    num_out: int = 1
    is_long: bool = False

    def body(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "prompt": self.prompt,
            "max_tokens": self.num_out,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }


@dataclass(slots=True)
class Served:
    """What became of one. Times are seconds after the beginning; `token_s` one for each event with tokens.
    `refused` and `error` are what the server said; neither, and not `is_whole`: it was still on its way."""

    arrival: Arrival
    token_s: list[float] = field(default_factory=list, repr=False)
    text: str = field(default="", repr=False)
    is_whole: bool = False
    refused: str = ""
    error: str = ""

    def tokens_between(self, begin_s: float, end_s: float) -> float:
        """Got through then: the prompt with the first token, and each token of the output. Of a stream that
        ended every event counts for its share of the tokens: one may bring several."""
        if not self.token_s:
            return 0.0
        each = self.arrival.num_out / len(self.token_s) if self.is_whole else 1.0
        prompt = len(self.arrival.prompt) if begin_s <= self.token_s[0] < end_s else 0
        return prompt + each * sum(begin_s <= at_s < end_s for at_s in self.token_s)

    def ttft_s(self, now_s: float) -> float:
        """From when it was due; so far, where there is no token yet."""
        return (self.token_s[0] if self.token_s else now_s) - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first, of one that is whole."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, self.arrival.num_out - 1)


def arrivals(load: Load, seed: int) -> list[Arrival]:
    """Short ones at random, as of a Poisson process, but exactly so many as the rate says: with some dozens
    the number itself would decide how hard a run is. The same seed, the same requests."""
    rng = random.Random(seed)
    count = round(load.short_per_minute / 60 * load.seconds)
    due = [(rng.uniform(0, load.seconds), False) for _ in range(count)]
    at_s = load.first_long_s
    while at_s < load.seconds:
        due.append((at_s, True))
        at_s += load.long_every_s
    return [_arrival(load, rng, number, *one) for number, one in enumerate(sorted(due))]


def _arrival(load: Load, rng: random.Random, number: int, at_s: float, is_long: bool) -> Arrival:
    length = load.long_prompt if is_long else load.short_prompt
    num_out = load.long_output if is_long else load.short_output
    return Arrival(number, at_s, rng.choices(VOCABULARY, k=length), num_out, is_long)


def replay(
    url: str, script: Sequence[Arrival], end_s: float, watch: Callable[[float, Sequence[Served]], None]
) -> list[Served]:
    """Sends them when they are due; what is not through `end_s` after the beginning is given up. `watch` is
    called every few seconds, in a thread of its own, with the time and all as they are."""
    return asyncio.run(_replay(url, script, end_s, watch))


WATCH_S: Final = 10.0


async def _replay(
    url: str, script: Sequence[Arrival], end_s: float, watch: Callable[[float, Sequence[Served]], None]
) -> list[Served]:
    all_served = [Served(arrival) for arrival in script]
    began_s = time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        streams = [asyncio.create_task(_serve(client, served, began_s)) for served in all_served]
        watching = asyncio.create_task(_watch(watch, all_served, began_s))
        _, late = await asyncio.wait(streams, timeout=end_s)
        watching.cancel()
        for stream in late:
            stream.cancel()
        await asyncio.gather(*late, watching, return_exceptions=True)
        for stream in streams:
            if stream not in late:
                stream.result()  # raises what was no answer of the server's
    return all_served


async def _watch(
    watch: Callable[[float, Sequence[Served]], None], all_served: Sequence[Served], began_s: float
) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        await asyncio.to_thread(watch, time.monotonic() - began_s, all_served)


async def _serve(client: httpx.AsyncClient, served: Served, began_s: float) -> None:
    await asyncio.sleep(served.arrival.at_s - (time.monotonic() - began_s))
    try:
        async with client.stream("POST", "/v1/completions", json=served.arrival.body()) as answer:
            if answer.status_code != 200:
                await answer.aread()
                said = f"{answer.status_code} {answer.text}"
                served.refused, served.error = (said, "") if answer.status_code == 400 else ("", said)
                return
            async for line in answer.aiter_lines():
                take(served, line, time.monotonic() - began_s)
    except httpx.HTTPError as problem:
        served.error = repr(problem)


def take(served: Served, line: str, now_s: float) -> None:
    """One line of its events."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        served.error = json.dumps(event["error"])
        return
    for choice in event["choices"]:
        served.text += choice["text"]
        served.token_s.append(now_s)
        served.is_whole = served.is_whole or choice["finish_reason"] == "length"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
