"""The KV blocks that sequences will hold at their peak, from how long answers have been lately. Pure.

The method is that of the Past-Future scheduler (Gong et al., ASPLOS 2025): the output lengths of requests
that have ended predict those of the running ones, given what these have made already. Sequences end one after
the other, so the peak is lower than the sum of what each holds at its end.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

MAX_LENGTHS = 256  # output lengths of the last requests
UNKNOWN_TOKENS = 256  # expected where nothing is known; a limit of many thousands would let only one run


class OutputLengths:
    """The numbers of output tokens of the last requests that ended."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._sorted: Counts | None = None
        self._sums: Counts | None = None  # sums of the longest 0, 1, ... lengths

    def add(self, num_tokens: int) -> None:
        """Note a request that ended."""
        self._lengths.append(num_tokens)
        self._sorted = None

    def remaining(self, made: Counts, most: Counts) -> Counts:
        """Return the tokens that sequences will still make, int64 [n].

        made: what each has made. most: what its limits leave. The prediction is the mean of the longer
        answers among the last ones, less what was made. Without a longer one, as before the first end, it is
        as much again as was made, at least UNKNOWN_TOKENS. It is never more than `most`.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.fromiter(self._lengths, np.int64, len(self._lengths)))
            self._sums = np.concatenate([[0], np.cumsum(self._sorted[::-1])])
        assert self._sums is not None
        longer = len(self._sorted) - np.searchsorted(self._sorted, made, side="right")
        mean = -(-self._sums[longer] // np.maximum(longer, 1))
        expected = np.where(longer > 0, mean - made, np.maximum(made, UNKNOWN_TOKENS))
        return np.clip(expected, np.minimum(1, most), most)


def peak_blocks(tokens: Counts, remaining: Counts, block_tokens: int) -> int:
    """Return the most blocks that sequences hold at once until the last has ended.

    tokens: that each has now, int64 [n]; remaining: that it will still add, one in each step. Every sequence
    holds its blocks until it ends, so the peak is at an end. O(n log n + n * block_tokens), without a loop.
    """
    if not len(tokens):
        return 0
    order = np.argsort(-remaining, kind="stable")
    # When the sequence with r tokens left ends, one with t tokens now holds (t - 1 + r) // block_tokens + 1
    # blocks. Without a division for each pair: the quotients add up, and the rests add a block where together
    # they fill one.
    quotients, rests = np.divmod(tokens[order] - 1, block_tokens)
    more_quotients, more_rests = np.divmod(remaining[order], block_tokens)
    num_there = np.arange(1, len(tokens) + 1)  # sequences with fewer left have ended before
    at_least = np.cumsum(rests[:, None] >= np.arange(block_tokens + 1), axis=0)  # by number there, and rest
    carried = at_least[num_there - 1, block_tokens - more_rests]
    return int((np.cumsum(quotients) + num_there * (1 + more_quotients) + carried).max())
