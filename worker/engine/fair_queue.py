"""The queue of an instance: whose request is the next, fair by tokens between API keys. Pure.

The method is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
algorithm 2), with weights. Every key has a counter of the tokens of prompts and outputs that were computed
for it, divided by its weight; the key with the lowest is the next. A key that comes back is lifted to the
lowest of those that wait, so it saves up nothing while it is away. Within a key the lowest priority goes
first, as in vLLM, and of equal ones the first that came. So a priority takes nothing from another key.

While two keys wait, their counters differ by no more than the tokens of what is served at once, whatever the
number of their requests. So the wait of a key does not depend on how long the queue of another is. Every call
costs by the keys that wait, not by those that are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from typing import Final

from worker.engine.sequence import Sequence

MOST_IDLE_KEYS: Final = 1024  # of more, those that wait for nothing are forgotten


@dataclass(slots=True)
class _KeyQueue:
    """The waiting sequences of one key, in their order."""

    seqs: deque[Sequence] = field(default_factory=deque)
    served: float = 0.0  # tokens by weight
    turn: int = 0  # the last time that it was the next; among equals the longest ago goes first


class FairQueue:
    """The waiting sequences of one instance. `head` is the next; it changes only with a call."""

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()  # they ran before, and go before all others
        self._lines: dict[str, _KeyQueue] = {}  # of all known keys
        self._busy: dict[str, _KeyQueue] = {}  # of these, the keys that wait
        self._num_lined = 0
        self._num_prioritised = 0  # of these, with another priority than 0
        self._turn = 0
        self._floor = 0.0  # the counter of the key that was the next last

    def __len__(self) -> int:
        return len(self._returned) + self._num_lined

    def __iter__(self) -> Iterator[Sequence]:
        """Yield those that ran before, then the others in order of arrival."""
        lines = [line.seqs for line in self._busy.values()]
        if self._num_prioritised:
            return chain(self._returned, sorted(chain(*lines), key=_arrival))
        return chain(self._returned, merge(*lines, key=_arrival))

    def __reversed__(self) -> Iterator[Sequence]:
        """Yield the latest first."""
        is_one = len(self._busy) <= 1 and not self._num_prioritised
        return self._reversed_of_one() if is_one else reversed(list(self))

    def _reversed_of_one(self) -> Iterator[Sequence]:
        lines = (reversed(line.seqs) for line in self._busy.values())
        return chain(*lines, reversed(self._returned))

    @property
    def head(self) -> Sequence:
        """The next sequence. Raises IndexError if the queue is empty."""
        if self._returned:
            return self._returned[0]
        return self._next(self._busy.values()).seqs[0]

    def first_without(self, keys: Collection[str]) -> Sequence | None:
        """Return the sequence that is the next but for those of `keys`; None if there is no other."""
        for seq in self._returned:
            if seq.request.key not in keys:
                return seq
        lines = [line for key, line in self._busy.items() if key not in keys]
        return self._next(lines).seqs[0] if lines else None

    def add(self, seq: Sequence) -> None:
        """Put a sequence in its place among those of its key."""
        line = self._lines.setdefault(seq.request.key, _KeyQueue())
        if not line.seqs:
            waiting = (each.served for each in self._busy.values())
            line.served = max(line.served, min(waiting, default=self._floor))
            self._busy[seq.request.key] = line
        _insert(line.seqs, seq)
        self._num_lined += 1
        self._num_prioritised += seq.request.priority != 0

    def put_back(self, seq: Sequence) -> None:
        """Let a sequence that has run be the next."""
        self._returned.appendleft(seq)

    def pop(self, seq: Sequence | None = None) -> Sequence:
        """Take the head, or `seq` of `first_without`. Raises IndexError if the queue is empty."""
        seq = seq or self.head
        if seq in self._returned:
            self._returned.remove(seq)
            return seq
        line = self._lines[seq.request.key]
        self._turn += 1
        self._floor, line.turn = line.served, self._turn
        line.seqs.popleft()
        self._on_left(seq, line)
        self._forget_idle()
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is. Raises ValueError for a stranger."""
        line = self._lines.get(seq.request.key)
        if line is not None and seq in line.seqs:
            line.seqs.remove(seq)
            self._on_left(seq, line)
        else:
            self._returned.remove(seq)

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count tokens that are computed for the key of `seq`."""
        line = self._lines.get(seq.request.key)
        if line is not None:
            line.served += num_tokens / seq.request.weight

    @staticmethod
    def _next(lines: Iterable[_KeyQueue]) -> _KeyQueue:
        found = min(lines, key=lambda line: (line.served, line.turn), default=None)
        if found is None:
            raise IndexError("the queue is empty")
        return found

    def _on_left(self, seq: Sequence, line: _KeyQueue) -> None:
        self._num_lined -= 1
        self._num_prioritised -= seq.request.priority != 0
        if not line.seqs:
            del self._busy[seq.request.key]

    def _forget_idle(self) -> None:
        if len(self._lines) - len(self._busy) > MOST_IDLE_KEYS:
            self._lines = dict(self._busy)

    def check_integrity(self) -> None:
        """Raise AssertionError if a count of the waiting sequences, or the order of a key, is wrong."""
        lines = [[seq.request.priority for seq in line.seqs] for line in self._lines.values()]
        assert self._num_lined == sum(map(len, lines))
        assert self._num_prioritised == sum(priority != 0 for line in lines for priority in line)
        assert all(line == sorted(line) for line in lines)
        assert self._busy == {key: line for key, line in self._lines.items() if line.seqs}


def _insert(seqs: deque[Sequence], seq: Sequence) -> None:
    """Insert behind those of the same priority: nearly always at the end."""
    at = len(seqs)
    while at and seqs[at - 1].request.priority > seq.request.priority:
        at -= 1
    seqs.insert(at, seq)


def _arrival(seq: Sequence) -> float:
    return seq.arrived
