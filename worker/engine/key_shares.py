"""The use that API keys made of an instance lately, by which it keeps something free for some of them.

What that is decides `worker.engine.reserve`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from worker.engine.reserve import NOTHING, KeyLoad, Reserve, reserve_of
from worker.engine.sequence import Sequence

ACTIVE_S: Final = 60.0  # a key that sent nothing for longer has no share
MEMORY_STEPS: Final = 16  # the tokens of so many full steps count as computed lately


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
    """Owner of the counts for each key, and of the reserve that follows from them.

    Its clock is the newest arrival, and for tokens their own number.
    """

    def __init__(self, memory_tokens: int) -> None:
        """memory_tokens: of so many tokens ago the weight is 1/e."""
        self._memory_tokens = memory_tokens
        self._keys: dict[str, _Key] = {}
        self._num_tokens = 0.0
        self._newest = -math.inf
        self._reserve: Reserve | None = None  # None: to be decided anew

    def enter(self, seq: Sequence, num_blocks: int) -> None:
        """Note a request that came; with a key, it is expected to hold so many KV blocks in the end."""
        self._reserve = None
        if not (key := seq.request.key):
            return
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
        self._reserve = None
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

    def begin_step(self) -> None:
        """Decide the reserve anew for the next step."""
        self._reserve = None

    def reserve(self, running: Iterable[Sequence], max_seqs: int, max_blocks: int) -> Reserve:
        """Return the reserve of an instance with so many rows and KV blocks.

        It holds for a step, unless a request comes or leaves.
        """
        if self._reserve is None:
            uses = self.uses(running)
            self._reserve = reserve_of(uses, max_seqs, max_blocks) if uses else NOTHING
        return self._reserve

    def check_integrity(self, here: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the keys are counted with the requests that are here."""
        counts = {key: one.num_here for key, one in self._keys.items() if one.num_here}
        assert counts == Counter(seq.request.key for seq in here if seq.request.key), counts
