"""The burst of the demo: the same requests for the same seed, at a rate that fits the machine. Pure.

Its lengths are those of the morph benchmark (`bench/morph/load.py`). With half of its layers in int4 the demo
model serves 1.8 times the tokens a second of full precision (bench/results/morph.json), since its KV cache
then holds more requests at once. A burst between the two queues without morphs, and hardly with them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from instar.replay.schemas import Arrival
from instar.replay.traces import Workload

SEED: Final = 20
PROMPT_TOKENS: Final = (32, 96)
OUTPUT_TOKENS: Final = (192, 384)
MEAN_OUTPUT_TOKENS: Final = sum(OUTPUT_TOKENS) / 2
OVERLOAD: Final = 1.25  # requests that come for each that full precision serves
NUM_AT_ONCE: Final = 48  # more than end while the service is measured
FEWEST, MOST = 8, 1000  # requests of a burst


def at_once() -> Workload:
    """Return requests that are all due at once, which fill every KV cache."""
    rng = random.Random(SEED)
    return Workload("demo", "demo", [_arrival(rng, 0.0) for _ in range(NUM_AT_ONCE)], 0.0)


def burst(tokens_per_s: float, seconds: float) -> Workload:
    """Return a burst of OVERLOAD times what a service can do that generates `tokens_per_s`.

    Times are random, as of a Poisson process, but their number is what the rate says: with some dozens of
    requests the number itself would decide how hard the burst is.
    """
    num = round(OVERLOAD * tokens_per_s / MEAN_OUTPUT_TOKENS * seconds)
    rng = random.Random(SEED)
    times = sorted(rng.uniform(0.0, seconds) for _ in range(min(MOST, max(FEWEST, num))))
    return Workload("demo burst", "demo", [_arrival(rng, round(at_s, 6)) for at_s in times], seconds)


def _arrival(rng: random.Random, at_s: float) -> Arrival:
    return Arrival(at_s, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS))


def tokens_per_s(events_per_s: Sequence[int]) -> float:
    """Return the mean of the whole seconds of a run from the first token on; 0.0 without a token.

    The first of these seconds and the last are not whole.
    """
    first = next((second for second, events in enumerate(events_per_s) if events), len(events_per_s))
    generated = events_per_s[first:]
    return fmean(generated[1:-1] or generated or [0.0])


def long_request(tokens_at: dict[str, int], context: int) -> int:
    """Return the tokens of a request that one worker cannot hold and two can; 0 if there is no such number.

    tokens_at: of KV that an instance would hold, by its degree of tensor parallelism, as JSON has it.
    """
    alone, together = tokens_at.get("1", 0), min(context, tokens_at.get("2", 0))
    return (alone + together) // 2 if 0 < alone < together else 0
