"""How many tokens each planner of a group may run in a step: together no more than one worker does alone,
since that is what each has memory for beside weights and cache. Pure.

A group is made for a long request, and gets less done than its workers do alone. So the long one comes first:
its prompt takes most of each step, and while it decodes, prompts of short ones take a part of a step only,
since all that is in a step makes it longer. Sooner over, the group can part, and everybody gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.parallel.canary import TOKENS

SHORT_SHARE = 4  # of a step beside a long request, short prompts get one part in so many


@dataclass(frozen=True, slots=True)
class Need:
    """Of one planner: tokens that it ran and was allowed in the last step, and sequences that may decode in
    the next. long_remaining: tokens to compute of a request that one worker alone could not hold, 1 while it
    decodes; 0: it has none."""

    ran: int
    allowed: int
    running: int = 0
    long_remaining: int = 0


def even(max_tokens: int, size: int) -> int:
    """Each one's part where nothing is known of their needs. max_tokens: of a step, as one worker's; a canary
    fits beside the rest. At least 1: a planner without any would never end."""
    return max(1, (max_tokens - TOKENS) // size)


def allowances(needs: Sequence[Need], max_tokens: int) -> list[int]:
    """Of the next step, by planner. Who ran all that it was allowed may have more to run, and gets what the
    others leave. These keep what they ran, and room for a beginning: with it they are soon among the
    first."""
    part = even(max_tokens, len(needs))
    if any(one.long_remaining for one in needs):
        short = [min(part, max(one.running + 1, part // SHORT_SHARE)) for one in needs]
        return _share(short, [one.long_remaining > 1 for one in needs], part)
    is_full = [one.ran >= one.allowed for one in needs]
    if not any(is_full):
        return [part] * len(needs)
    return _share([min(part, one.ran + max(1, part // 8)) for one in needs], is_full, part)


def _share(kept: Sequence[int], is_first: Sequence[bool], part: int) -> list[int]:
    """Each what it keeps; what that leaves goes to the first."""
    left = part * len(kept) - sum(tokens for tokens, first in zip(kept, is_first, strict=True) if not first)
    return [left // sum(is_first) if first else tokens for tokens, first in zip(kept, is_first, strict=True)]
