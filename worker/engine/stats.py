"""What an instance has done since the worker's epoch began."""

from __future__ import annotations

from collections import Counter

from bus.histogram import TIME_PER_TOKEN_BOUNDS, TIME_TO_FIRST_TOKEN_BOUNDS, Accumulator

STEP_BOUNDS = tuple(0.0005 * 2**i for i in range(17))  # seconds: half a millisecond to half a minute


class Stats:
    """Counters and histograms (seconds) of one instance; written by the engine's thread only."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.queue = Accumulator(TIME_TO_FIRST_TOKEN_BOUNDS)
        self.step = Accumulator(STEP_BOUNDS)
        self.time_to_first_token = Accumulator(TIME_TO_FIRST_TOKEN_BOUNDS)
        self.time_per_output_token = Accumulator(TIME_PER_TOKEN_BOUNDS)
