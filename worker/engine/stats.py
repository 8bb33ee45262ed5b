"""What an instance has done since the worker's epoch began, in the form of `bus.messages`."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from bus.messages import Histogram

# Upper bounds in seconds. Time to first token and per output token are vLLM's, so dashboards carry over.
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
               20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TPOT_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
               40.0, 80.0)  # fmt: skip
QUEUE_BOUNDS = TTFT_BOUNDS
STEP_BOUNDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048,
               4.096, 8.192, 16.384, 32.768)  # fmt: skip


class Recorder:
    """A histogram that is still being filled."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def snapshot(self) -> Histogram:
        return Histogram(bounds=self.bounds, counts=list(self.counts), total=self.total)


class Stats:
    """Counters and histograms of one instance; written by the engine's thread only."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.queue = Recorder(QUEUE_BOUNDS)
        self.step = Recorder(STEP_BOUNDS)
        self.time_to_first_token = Recorder(TTFT_BOUNDS)
        self.time_per_output_token = Recorder(TPOT_BOUNDS)
