"""How many tokens each planner of a group may run in a step: together no more than one worker does alone,
since that is what each has memory for beside weights and cache. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.parallel.canary import TOKENS


def even(max_tokens: int, size: int) -> int:
    """Each one's part where nothing is known of their needs. max_tokens: of a step, as one worker's; a canary
    fits beside the rest. At least 1: a planner without any would never end."""
    return max(1, (max_tokens - TOKENS) // size)


def allowances(ran: Sequence[int], allowed: Sequence[int], max_tokens: int) -> list[int]:
    """Of the next step, by planner. ran, allowed: tokens of the last one. Who ran all that it was allowed may
    have more to run, and gets what the others leave. These keep what they ran, and room for a beginning: with
    it they are soon among the first."""
    size = len(ran)
    part = even(max_tokens, size)
    is_full = [tokens >= limit for tokens, limit in zip(ran, allowed, strict=True)]
    kept = [min(part, tokens + max(1, part // 8)) for tokens in ran]
    if not any(is_full):
        return [part] * size
    left = part * size - sum(tokens for tokens, full in zip(kept, is_full, strict=True) if not full)
    return [left // sum(is_full) if full else tokens for tokens, full in zip(kept, is_full, strict=True)]
