"""The load of an instance: the numbers by which telemetry, morphs and groups judge it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Final

from bus.precisions import LOWEST, PRECISIONS, Precision
from worker.engine.grammar_queue import GrammarQueue
from worker.engine.prompt_rate import PromptRate
from worker.engine.residence import Residence
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Limits, Sequence

# A refused floor counts for so long; the gateway sends the request again when it may run.
REFUSED_S: Final = 5.0


class InstanceLoad:
    """The numbers of one instance: what is here, how long it has waited, and what was measured lately."""

    def __init__(
        self,
        sequences: Mapping[str, Sequence],
        scheduler: Scheduler,
        forming: GrammarQueue,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        """sequences: all that are here, by request id; the owner's own mapping, which changes."""
        self._sequences, self._scheduler, self._forming = sequences, scheduler, forming
        self._limits, self._clock = limits, clock
        self.prompt_rate = PromptRate()
        self.residence = Residence()
        self._refused: dict[Precision, float] = {}  # floors of requests that were refused, and when

    # ----------------------------------------------------------------------------- what waits

    def waiting(self) -> Iterator[Sequence]:
        """Yield what waits: the queue, and what will be in it once its grammar is compiled."""
        return chain(self._scheduler.waiting, self._forming)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, in the queue or for their grammars."""
        return len(self._scheduler.waiting) + len(self._forming)

    def oldest_wait_s(self) -> float:
        """Return how long the head of the queue has been here, or one before it that has no grammar yet.

        0.0 if nothing waits.
        """
        waiting = self._scheduler.waiting
        firsts = [*self._forming, *([waiting.head] if waiting else [])]
        return self._clock() - min(seq.arrived for seq in firsts) if firsts else 0.0

    def wanting_s(self) -> float:
        """Return how long the oldest sequence that misses KV blocks has been here; 0.0 for none."""
        return self._scheduler.wanting_s(self._clock())

    def waited_for_blocks_s(self) -> float:
        """Return how long the head of the queue has been here, while blocks are missing; else 0.0."""
        return self._scheduler.waited_for_blocks_s(self._clock())

    def arrivals_per_s(self) -> float:
        """Return the requests per second that came lately."""
        return self._scheduler.arrivals_per_s(self._clock())

    # ----------------------------------------------------------------------------- lengths

    def longest_tokens(self) -> int:
        """Return the length, prompt and output, that the longest request here may come to; 0 for none.

        Any new shape must hold its KV.
        """
        return max((seq.most_tokens(self._limits) for seq in self._sequences.values()), default=0)

    def most_uncomputed(self, above: int) -> int:
        """Return the most tokens left to compute of a running sequence that may exceed `above` tokens.

        1 if all such sequences decode, 0 if there is none.
        """
        seqs = (seq for seq in self._scheduler.running if seq.most_tokens(self._limits) > above)
        return max((seq.num_uncomputed_tokens for seq in seqs), default=0)

    # ----------------------------------------------------------------------------- precision floors

    def floors(self) -> dict[Precision, int]:
        """Count the requests that insist on a precision, by precision."""
        floors = (seq.request.min_precision for seq in self._sequences.values())
        return dict(Counter(floor for floor in floors if floor))

    def note_refused(self, floor: Precision) -> None:
        """Note that a request was refused which would run if all were in `floor`."""
        self._refused[floor] = self._clock()

    def floor_refused(self) -> Precision:
        """Return the highest floor of requests that were refused lately; the lowest precision for none."""
        since = self._clock() - REFUSED_S
        lately = [floor for floor, at in self._refused.items() if at >= since]
        return min(lately, key=PRECISIONS.index, default=LOWEST)
