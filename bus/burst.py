"""The burst of `make demo`, which the dashboard plays too: an order of one, and its requests. Pure.

Its lengths are those of the morph benchmark (`bench/morph/load.py`). With half of its layers in int4 the demo
model serves 1.8 times the tokens a second of full precision (bench/results/morph.json), since its KV cache
then holds more requests at once. A burst between the two queues without morphs, and hardly with them.
Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bus.fields import Field, declared_fields, optional

SEED: Final = 20
SECONDS: Final = 20.0
MEASURED_S: Final = 6.0
PROMPT_TOKENS: Final = (32, 96)
OUTPUT_TOKENS: Final = (192, 384)
MEAN_OUTPUT_TOKENS: Final = sum(OUTPUT_TOKENS) / 2
OVERLOAD: Final = 1.25  # requests that come for each that full precision serves
NUM_AT_ONCE: Final = 48  # more than end while the service is measured
FEWEST, MOST = 8, 1000  # requests of a burst


class PlannedRequest(NamedTuple):
    """A request of a burst. `at_s`: from the burst's begin."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstOrder:
    """An order to play a burst. Without `tokens_per_s` the service is measured first."""

    model: str | None = optional("Model", "the model, if several are served", "text")
    seconds: float = optional(
        "Length",
        "time in which its requests come",
        "number",
        default=SECONDS,
        unit="s",
        minimum=1,
        maximum=60,
    )
    tokens_per_s: float | None = optional(
        "Rate",
        "tokens per second that the service generates; empty: it is measured first",
        "number",
        minimum=1,
        maximum=1e6,
    )


BURST_FIELDS: Final = declared_fields(BurstOrder, Field)


def at_once() -> list[PlannedRequest]:
    """Return requests that are all due at once, which fill every KV cache."""
    rng = random.Random(SEED)
    return [_request(rng, 0.0) for _ in range(NUM_AT_ONCE)]


def burst(tokens_per_s: float, seconds: float) -> list[PlannedRequest]:
    """Return a burst of OVERLOAD times what a service can do that generates `tokens_per_s`.

    It is the same every time. Times are random, as of a Poisson process, but their number is what the rate
    says: with some dozens of requests the number itself would decide how hard the burst is.
    """
    num = round(OVERLOAD * tokens_per_s / MEAN_OUTPUT_TOKENS * seconds)
    rng = random.Random(SEED)
    times = sorted(rng.uniform(0.0, seconds) for _ in range(min(MOST, max(FEWEST, num))))
    return [_request(rng, round(at_s, 6)) for at_s in times]


def _request(rng: random.Random, at_s: float) -> PlannedRequest:
    return PlannedRequest(at_s, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS))


def tokens_per_s(per_second: Sequence[int]) -> float:
    """Return the mean of the whole seconds of a run from the first token on; 0.0 without a token.

    The first of these seconds and the last are not whole.
    """
    first = next((second for second, tokens in enumerate(per_second) if tokens), len(per_second))
    generated = per_second[first:]
    whole = generated[1:-1] or generated
    return sum(whole) / len(whole) if whole else 0.0
