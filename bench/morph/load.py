"""The burst of the morph benchmark: seeded requests of exact lengths, calm, burst, calm again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from bench.common.load import VOCABULARY
from instar.replay.schemas import Arrival

PROMPT_TOKENS: Final = (32, 96)
OUTPUT_TOKENS: Final = (192, 384)
MEAN_OUTPUT_TOKENS: Final = sum(OUTPUT_TOKENS) / 2


@dataclass(frozen=True, slots=True)
class Script:
    """Seconds of each phase, and requests per second while it is calm and in the burst."""

    calm_s: float
    burst_s: float
    calm_again_s: float
    calm_rate: float
    burst_rate: float

    @property
    def burst_ends_s(self) -> float:
        return self.calm_s + self.burst_s

    @property
    def seconds(self) -> float:
        return self.burst_ends_s + self.calm_again_s

    def arrivals(self, seed: int) -> list[Arrival]:
        """Return the requests, the same for the same seed.

        Times are random in each phase, as of a Poisson process, but their number is what the rate says: with
        some dozens of requests the number itself would decide how hard a burst is.
        """
        rng = random.Random(seed)
        phases = [
            (0.0, self.calm_s, self.calm_rate),
            (self.calm_s, self.burst_ends_s, self.burst_rate),
            (self.burst_ends_s, self.seconds, self.calm_rate),
        ]
        found = []
        for begins_s, ends_s, rate in phases:
            times = sorted(rng.uniform(begins_s, ends_s) for _ in range(round(rate * (ends_s - begins_s))))
            found += [make_request(rng, at_s) for at_s in times]
        return found


def make_request(rng: random.Random, at_s: float) -> Arrival:
    prompt = rng.choices(VOCABULARY, k=rng.randint(*PROMPT_TOKENS))
    return Arrival(at_s, len(prompt), rng.randint(*OUTPUT_TOKENS), prompt)


def saturating(num: int, seed: int = 0) -> list[Arrival]:
    """Return `num` requests that are all due at once."""
    rng = random.Random(seed)
    return [make_request(rng, 0.0) for _ in range(num)]
