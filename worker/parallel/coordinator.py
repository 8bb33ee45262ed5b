"""Decide when a group's step is called, what each member may run in it, and what follows it. Pure.

A group is made for a long request, so that comes first: the sooner it ends, the sooner the group can split.
While it decodes, short prompts get a part of a step only, since they make the step longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.distributed.messages import Actions, CountBlocks, LendBlocks, Ready, Step
from worker.parallel.block_plans import loans

CANARY_TOKENS = 12  # a canary fits into each step beside the rest
SHORT_SHARE = 4  # short prompts get 1/4 of a step beside a long request


class StepCoordinator:
    """The leader's part of a step.

    A step is called when all members are ready and one has news, or an action is to follow. So an idle group
    costs nothing, and no member waits within a step for another.
    """

    def __init__(self, group: str, size: int) -> None:
        self.group, self.size = group, size
        self.step = 0  # the next to be called
        self.is_held = False  # no step is called
        self._has_counted = False  # at the last step: no member schedules before the next
        self.latest: list[Ready] = []  # messages of the last step, by rank
        self._ready: dict[int, Ready] = {}
        self._after: list[Actions] = []
        self._grants: dict[int, list[int]] = {}
        self._allowed: list[int] = []  # tokens of each member in the step to be called

    def add(self, action: Actions) -> None:
        """Have all members carry out `action` after the next step."""
        self._after.append(action)

    def take(self, ready: Ready) -> None:
        """Note what a member has for the next step; one for an earlier step is out of date."""
        if ready.step != self.step:
            return
        for taker, blocks in ready.given.items():
            self._grants.setdefault(taker, []).extend(blocks)
        self._ready[ready.rank] = ready

    @property
    def is_everyone_ready(self) -> bool:
        """True if all members are ready for the next step."""
        return len(self._ready) == self.size

    @property
    def has_heard_all(self) -> bool:
        """True if every member has reported at least once."""
        return len(self.latest) == self.size or len(self._ready) == self.size

    @property
    def reports(self) -> list[Ready]:
        """The last report of each member, by rank. Raises KeyError before the first of one."""
        latest = dict(enumerate(self.latest)) | self._ready
        return [latest[rank] for rank in range(self.size)]

    def call(self) -> Step | None:
        """Return the next step if it is due."""
        if self.is_held or not self.is_everyone_ready:
            return None
        ready = [self._ready[rank] for rank in range(self.size)]
        lending = self._lend(ready)
        if not (self._has_news(ready) or self._after or self._grants or lending):
            return None
        called = Step(
            group=self.group,
            step=self.step,
            works=[each.work for each in ready],
            allowed=self._allow(ready),
            used=[each.used for each in ready],
            num_used=[each.num_used for each in ready],
            grants=self._grants,
            after=[*self._after, *lending],
        )
        # What is counted must not change before a decision about it.
        self.is_held = self._has_counted = any(isinstance(action, CountBlocks) for action in self._after)
        self.latest = ready
        self._ready, self._after, self._grants = {}, [], {}
        self.step += 1
        return called

    def stop_counting(self) -> None:
        """Go on calling steps, since the count of blocks is not needed any more."""
        self._after = [action for action in self._after if not isinstance(action, CountBlocks)]
        self.is_held = False

    def _allow(self, ready: list[Ready]) -> list[int]:
        max_tokens = min(each.max_tokens for each in ready)
        allowed = self._allowed or [even_share(each.max_tokens, self.size) for each in ready]
        needs = [
            TokenNeed(each.work.num_tokens if each.work else 0, limit, each.running, each.long_remaining)
            for each, limit in zip(ready, allowed, strict=True)
        ]
        self._allowed = allowances(needs, max_tokens)
        return self._allowed

    def _has_news(self, ready: list[Ready]) -> bool:
        """Return whether there is work, or the last work has ended: all members report blocks in use."""
        used, reported = ([each.num_used for each in of] for of in (ready, self.latest))
        return any(each.work for each in ready) or self._has_counted or (bool(reported) and used != reported)

    def _lend(self, ready: list[Ready]) -> list[Actions]:
        """Plan loans of blocks; none beside other changes, which count blocks or renumber them."""
        if self._after or self._grants or any(each.given for each in ready):
            return []
        needs = ((each.spare, each.wanted, each.wanting_s) for each in ready)
        made = loans(*zip(*needs, strict=True))
        return [LendBlocks(giver=giver, taker=taker, blocks=blocks) for giver, taker, blocks in made]


# --------------------------------------------------------------------------- the tokens of a step


@dataclass(frozen=True, slots=True)
class TokenNeed:
    """The tokens that a member ran and was allowed in the last step, and its sequences.

    `long_remaining`: tokens to compute of a request that no worker alone could hold, 1 while it decodes; 0:
    none.
    """

    ran: int
    allowed: int
    running: int = 0
    long_remaining: int = 0


def even_share(max_tokens: int, size: int) -> int:
    """Return each member's tokens of `max_tokens` where no needs are known; at least 1."""
    return max(1, (max_tokens - CANARY_TOKENS) // size)


def allowances(needs: Sequence[TokenNeed], max_tokens: int) -> list[int]:
    """Return the tokens of each member in the next step, in all no more than one worker has memory for.

    A member that ran all that it was allowed may have more to run, and gets what the others leave. These keep
    what they ran, and room to begin: with it they are soon among the first.
    """
    part = even_share(max_tokens, len(needs))
    if any(one.long_remaining for one in needs):
        short = [min(part, max(one.running + 1, part // SHORT_SHARE)) for one in needs]
        return _distribute(short, [one.long_remaining > 1 for one in needs], part)
    is_full = [one.ran >= one.allowed for one in needs]
    if not any(is_full):
        return [part] * len(needs)
    return _distribute([min(part, one.ran + max(1, part // 8)) for one in needs], is_full, part)


def _distribute(kept: Sequence[int], is_first: Sequence[bool], part: int) -> list[int]:
    """Give each member what it keeps, and what that leaves of all parts to the first ones."""
    left = part * len(kept) - sum(tokens for tokens, first in zip(kept, is_first, strict=True) if not first)
    return [left // sum(is_first) if first else tokens for tokens, first in zip(kept, is_first, strict=True)]
