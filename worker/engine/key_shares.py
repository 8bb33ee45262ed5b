"""The reserve for API keys that use little of their share of an instance. Pure, but for `KeyShares`.

The queue is fair (`worker.engine.fair_queue`), but what runs is not stopped for another key: a key with much
load takes every row, KV block and prompt token of a step as soon as it is free, and a request of a key with
little load finds none. So while one key uses more than its share and another less than half of its own:

- Rows and KV blocks are kept free for the other, as many as its requests took at once lately.
- Its prompts go first, and in a step that has one nothing of the first key runs.
- In other steps few tokens of the first key's prompts run, so that a request does not find a long step begun.

A key's share is its weight among those of all keys that sent a request lately, and use is counted in tokens,
as the queue counts it. A single key has the whole as its share, so nothing is ever kept from it. Nor is
anything where several keys all use much: none of them would gain by it. Requests without a key count for
nobody.

Keeping part of a buffer free for who is not there is a dynamic threshold (Choudhury and Hahne, "Dynamic Queue
Length Thresholds for Shared-Memory Packet Switches", 1998); the gateway bounds its memory in the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from worker.engine.sequence import Sequence

ACTIVE_S: Final = 60.0  # a key that sent nothing for longer has no share
MEMORY_STEPS: Final = 16  # the tokens of so many full steps count as computed lately
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


@dataclass(slots=True)
class _Key:
    """The counts of one key. Times are those of arrivals."""

    weight: float
    arrived: float  # the last request
    num_here: int = 0
    num_needed: int = 0  # most here at once since `since`
    num_blocks: int = 0  # of the largest since then
    since: float = -math.inf
    tokens: float = 0.0  # computed lately, as counted at `counted_at`
    counted_at: float = 0.0


class KeyShares:
    """Owner of the counts for each key. Its clock is the newest arrival, and for tokens their own number."""

    def __init__(self, memory_tokens: int) -> None:
        """memory_tokens: of so many tokens ago the weight is 1/e."""
        self._memory_tokens = memory_tokens
        self._keys: dict[str, _Key] = {}
        self._num_tokens = 0.0
        self._newest = -math.inf

    def enter(self, seq: Sequence, num_blocks: int) -> None:
        """Note a request with a key that came; it is expected to hold so many KV blocks in the end."""
        key = seq.request.key
        one = self._keys.setdefault(key, _Key(seq.request.weight, seq.arrived, counted_at=self._num_tokens))
        one.weight, one.arrived = seq.request.weight, max(one.arrived, seq.arrived)
        self._newest = max(self._newest, one.arrived)
        one.num_here += 1
        if one.arrived > one.since + ACTIVE_S:
            one.since, one.num_needed, one.num_blocks = one.arrived, 0, 0
        one.num_needed = max(one.num_needed, one.num_here)
        one.num_blocks = max(one.num_blocks, num_blocks)

    def leave(self, seq: Sequence) -> None:
        """Note that a request is here no more."""
        if seq.request.key:
            self._keys[seq.request.key].num_here -= 1

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count tokens that are computed for the key of `seq`."""
        if one := self._keys.get(seq.request.key):
            self._num_tokens += num_tokens
            one.tokens = self._recent(one) + num_tokens
            one.counted_at = self._num_tokens

    def _recent(self, one: _Key) -> float:
        return one.tokens * math.exp((one.counted_at - self._num_tokens) / self._memory_tokens)

    def uses(self, running: Iterable[Sequence]) -> dict[str, KeyLoad]:
        """Return the uses of the active keys; empty for fewer than two."""
        if len(self._keys) < 2:
            return {}
        since = self._newest - ACTIVE_S
        self._keys = {key: one for key, one in self._keys.items() if one.num_here or one.arrived >= since}
        if len(self._keys) < 2:
            return {}
        num_running = Counter(seq.request.key for seq in running)
        recent = {key: self._recent(one) for key, one in self._keys.items()}
        total = sum(recent.values()) or 1.0
        return {
            key: KeyLoad(
                one.weight,
                recent[key] / total,
                one.num_needed,
                one.num_blocks,
                num_running[key],
            )
            for key, one in self._keys.items()
        }

    def check_integrity(self, here: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the keys are counted with the requests that are here."""
        counts = {key: one.num_here for key, one in self._keys.items() if one.num_here}
        assert counts == Counter(seq.request.key for seq in here if seq.request.key), counts
