"""The three workloads of `bench.peers`, and how a server is measured under them.

The lengths and prompts are the same for every contender and in every round. A process is measured once, so no
prompt is in a cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.common.load import MODEL, VOCABULARY, play_to_end
from instar.replay.outcomes import RequestOutcome
from instar.replay.requests import COMPLETIONS, Dialect, message_of
from instar.replay.schemas import Arrival
from instar.replay.statistics import percentile
from instar.replay.wire import ServerAddress, fetch

AT_ONCE: Final = "at once"
ONE_BY_ONE: Final = "one by one"
OPEN_LOOP: Final = "open loop"
WORKLOADS: Final = (AT_ONCE, ONE_BY_ONE, OPEN_LOOP)
DIALECT: Final = Dialect(precision=False)  # the fields that both servers know
PATIENCE_S: Final = 1800.0  # patience with a closed load, and with the rest of an open loop

Prompt = list[int]
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Lengths in tokens and numbers of requests; lengths of prompts are drawn from a range with both ends."""

    num_at_once: int = 64
    at_once_prompt: tuple[int, int] = (64, 512)
    at_once_output: int = 128
    num_one_by_one: int = 3
    one_by_one_prompt: int = 128
    one_by_one_output: int = 128
    rate: float = 2.0  # requests per second in the open loop
    seconds: float = 60.0
    open_loop_prompt: tuple[int, int] = (64, 256)
    open_loop_output: int = 64

    def at_once(self) -> list[Prompt]:
        rng = random.Random("at once")
        return [_prompt(rng, *self.at_once_prompt) for _ in range(self.num_at_once)]

    def one_by_one(self) -> list[Prompt]:
        rng = random.Random("one by one")
        lengths = (self.one_by_one_prompt, self.one_by_one_prompt)
        return [_prompt(rng, *lengths) for _ in range(self.num_one_by_one)]

    def open_loop(self) -> list[Arrival]:
        """Return the arrivals of a Poisson process of `rate` in `seconds`, at least one."""
        rng = random.Random("open loop")
        arrivals: list[Arrival] = []
        at_s = 0.0
        while at_s < self.seconds:
            prompt = _prompt(rng, *self.open_loop_prompt)
            arrivals.append(Arrival(at_s, len(prompt), self.open_loop_output, prompt))
            at_s += rng.expovariate(self.rate)
        return arrivals

    def warm_up(self) -> Prompt:
        """Return a prompt that no workload has."""
        return _prompt(random.Random("warm-up"), self.one_by_one_prompt, self.one_by_one_prompt)

    @property
    def longest(self) -> int:
        """The tokens of the longest request, prompt and output together."""
        return max(
            self.at_once_prompt[1] + self.at_once_output,
            self.one_by_one_prompt + self.one_by_one_output,
            self.open_loop_prompt[1] + self.open_loop_output,
        )


QUICK: Final = PeerLoad(
    num_at_once=4, at_once_output=8, num_one_by_one=1, one_by_one_output=16, seconds=2.0, open_loop_output=8
)


def _prompt(rng: random.Random, shortest: int, longest: int) -> Prompt:
    return rng.choices(VOCABULARY, k=rng.randint(shortest, longest))


@dataclass(frozen=True, slots=True)
class WorkloadValues:
    """The values of one workload by the names that `bench.peers.report` has for them.

    text: the greedy output of the first request one by one, to see whether contenders compute the same.
    """

    values: Values
    text: str = ""


def measure_server(url: str, workload: str, load: PeerLoad) -> WorkloadValues:
    """Measure the OpenAI-compatible server at `url`. Raises RuntimeError for a request that fails."""
    return _MEASURES[workload](url, load)


def warm_up(url: str, load: PeerLoad) -> None:
    play_to_end(url, [_arrival(load.warm_up(), load.one_by_one_output)], dialect=DIALECT)


def _at_once(url: str, load: PeerLoad) -> WorkloadValues:
    prompts = load.at_once()
    bodies = [_body(prompt, load.at_once_output) for prompt in prompts]
    began = time.perf_counter()
    answers = asyncio.run(_send_all(ServerAddress.at(url, None), bodies))
    seconds = time.perf_counter() - began
    for number, (status, answer) in enumerate(answers):
        if status != 200:
            raise RuntimeError(f"request {number} at once was refused: {status} {message_of(answer)}")
        if (found := json.loads(answer)["usage"]["completion_tokens"]) != load.at_once_output:
            raise RuntimeError(f"request {number} at once got {found} tokens of {load.at_once_output}")
    return WorkloadValues({"tokens_per_s": len(prompts) * load.at_once_output / seconds})


def _body(prompt: Prompt, num_out: int) -> bytes:
    """Return a request without a stream: nothing but the last token's time is needed."""
    fields = {"model": MODEL, "prompt": prompt, "max_tokens": num_out, "temperature": 0}
    return json.dumps(fields | {"ignore_eos": True}).encode()


async def _send_all(server: ServerAddress, bodies: Sequence[bytes]) -> list[tuple[int, bytes]]:
    return await asyncio.gather(
        *(fetch(server, "POST", COMPLETIONS, body, within_s=PATIENCE_S) for body in bodies)
    )


def _one_by_one(url: str, load: PeerLoad) -> WorkloadValues:
    outcomes: list[RequestOutcome] = []
    texts: list[str] = []
    for prompt in load.one_by_one():
        recorder = play_to_end(url, [_arrival(prompt, load.one_by_one_output)], dialect=DIALECT)
        outcomes += recorder.run.outcomes
        texts.append(recorder.texts[0])
    return WorkloadValues(
        {
            "token_ms": 1e3 * statistics.median(seconds_of(outcomes, "tpot_s")),
            "ttft_ms": 1e3 * statistics.median(seconds_of(outcomes, "ttft_s")),
        },
        texts[0],
    )


def _open_loop(url: str, load: PeerLoad) -> WorkloadValues:
    recorder = play_to_end(url, load.open_loop(), drain_s=PATIENCE_S, dialect=DIALECT)
    outcomes = recorder.run.outcomes
    return WorkloadValues(
        {
            "token_ms": 1e3 * percentile(seconds_of(outcomes, "tpot_s"), 50),
            "request_ms": 1e3 * percentile(seconds_of(outcomes, "e2e_s"), 50),
            "ttft_ms": 1e3 * percentile(seconds_of(outcomes, "ttft_s"), 50),
            "ttft_p95_ms": 1e3 * percentile(seconds_of(outcomes, "ttft_s"), 95),
        }
    )


def seconds_of(outcomes: Sequence[RequestOutcome], name: str) -> list[float]:
    """Return one time of all served requests, sorted."""
    return sorted(getattr(outcome, name) for outcome in outcomes)


def _arrival(prompt: Prompt, num_out: int) -> Arrival:
    return Arrival(0.0, len(prompt), num_out, prompt)


_MEASURES: Final[dict[str, Callable[[str, PeerLoad], WorkloadValues]]] = {
    AT_ONCE: _at_once,
    ONE_BY_ONE: _one_by_one,
    OPEN_LOOP: _open_loop,
}
