"""Counters and histograms of an instance, as its telemetry shows them."""

from __future__ import annotations

from collections import Counter

from bus.histogram import Accumulator
from worker.engine.sequence import Sequence


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

    def count_prompt(self, seq: Sequence) -> None:
        """Count the prompt tokens of `seq` that are computed by now; one that is recomputed counts once."""
        if (counted := min(seq.num_computed_tokens, seq.num_prompt)) > seq.num_prompt_counted:
            self.prompt_tokens += counted - seq.num_prompt_counted
            seq.num_prompt_counted = counted

    def count_tokens(self, seqs: list[Sequence], now: float) -> None:
        """Count the tokens that come to these sequences now, most of which had their last one together."""
        seqs = [seq for seq in seqs if seq.request.sampling.max_tokens and not seq.request.embeds]
        self.generation_tokens += len(seqs)
        for last_token_at, times in Counter([seq.last_token_at for seq in seqs]).items():
            if last_token_at:
                self.time_per_output_token.observe(now - last_token_at, times)
        for seq in seqs:
            if not seq.last_token_at:
                self.time_to_first_token.observe(now - seq.arrived)
