"""The reserve for API keys that use little of their share of an instance. Pure: the scheduler asks it.

The queue is fair (`worker.engine.fair_queue`), but what runs is not stopped for another key: a key with much
load takes every row, KV block and prompt token of a step as soon as it is free, and a request of a key with
little load finds none. So while one key uses more than its share and another less than half of its own:

- Rows and KV blocks are kept free for the other, as many as its requests took at once lately.
- Its prompts go first, and in a step that has one nothing of the first key runs.
- In other steps few tokens of the first key's prompts run, so that a request does not find a long step begun.

A key's share is its weight among those of all keys that sent a request lately (`worker.engine.key_shares`),
and use is counted in tokens, as the queue counts it. A single key has the whole as its share, so nothing is
ever kept from it. Nor is anything where several keys all use much: none of them would gain by it. Requests
without a key count for nobody.

Keeping part of a buffer free for who is not there is a dynamic threshold (Choudhury and Hahne, "Dynamic Queue
Length Thresholds for Shared-Memory Packet Switches", 1998); the gateway bounds its memory in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from worker.engine.fair_queue import FairQueue
from worker.engine.sequence import Sequence

LITTLE: Final = 0.5  # of its share: a key that uses less is protected
MOST_KEPT: Final = 1 / 8  # of rows, of KV blocks
MOST_PROMPT: Final = 1 / 8  # of the tokens of a step: what a key above its share may prefill in it


@dataclass(frozen=True, slots=True)
class KeyLoad:
    """The use that one key made of an instance lately."""

    weight: float
    tokens: float  # part of the tokens computed lately, 0..1
    num_needed: int = 0  # sequences that it had here at once, at most
    num_blocks: int = 0  # KV blocks of its largest sequence
    num_running: int = 0  # now


@dataclass(frozen=True, slots=True)
class Reserve:
    """The rows and blocks kept from keys above their shares, for those that use little of theirs."""

    above: frozenset[str] = frozenset()
    below: frozenset[str] = frozenset()
    num_seqs: int = 0
    num_blocks: int = 0

    def is_above(self, seq: Sequence) -> bool:
        """Return True if the key of `seq` uses more than its share, and another little of its own."""
        return seq.request.key in self.above

    def is_below(self, seq: Sequence) -> bool:
        """Return True if the key of `seq` uses little of its share, and another more than its own."""
        return seq.request.key in self.below

    def kept_from(self, seq: Sequence) -> Reserve:
        """Return what `seq` may not take."""
        return self if self.is_above(seq) else NOTHING

    def head(self, waiting: FairQueue) -> Sequence:
        """Return the next to be admitted: keys above their shares come last.

        Raises IndexError if nothing waits.
        """
        found = waiting.first_without(self.above) if self.above else None
        return found or waiting.head

    def most_prompt_tokens(self, prompts: Iterable[Sequence], step_tokens: int) -> int:
        """Return how many tokens of prompts of keys above their shares may run beside prompts of others.

        step_tokens: that a step may have.
        """
        if any(map(self.is_below, prompts)):
            return 0
        return max(1, int(MOST_PROMPT * step_tokens))


NOTHING: Final = Reserve()


def reserve_of(uses: Mapping[str, KeyLoad], max_seqs: int, max_blocks: int) -> Reserve:
    """Decide what an instance with so many rows and KV blocks keeps free, by the uses of its active keys."""
    weights = sum(use.weight for use in uses.values())
    above = frozenset(key for key, use in uses.items() if use.tokens * weights > use.weight)
    below = frozenset(key for key, use in uses.items() if use.tokens * weights < LITTLE * use.weight)
    if not (above and below):
        return NOTHING
    num_seqs = num_blocks = 0
    for use in map(uses.__getitem__, below):
        missing = max(0, use.num_needed - use.num_running)
        num_seqs += missing
        num_blocks += missing * use.num_blocks
    return Reserve(
        above,
        below,
        min(num_seqs, int(MOST_KEPT * max_seqs)),
        min(num_blocks, int(MOST_KEPT * max_blocks)),
    )
