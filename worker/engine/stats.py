"""The counters and times of an instance since the worker's epoch began."""

from __future__ import annotations

from collections import Counter

from bus.histogram import Accumulator


class Stats:
    """Counters and histograms (seconds) of one instance; written by the engine's thread only."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.queue = Accumulator()
        self.step = Accumulator()
        self.time_to_first_token = Accumulator()
        self.time_per_output_token = Accumulator()
