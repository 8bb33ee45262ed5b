"""Decide when a group's step is called, and what follows it: the leader's part. Pure."""

from __future__ import annotations

from worker.distributed.messages import Actions, Census, Lend, Ready, Step
from worker.parallel.budget import Need, allowances, even
from worker.parallel.share import loans


class StepCoordinator:
    """A step is called when all members are ready for it and one of them has news, or there is something to
    do after it. So an idle group costs nothing, and nobody waits inside of a step for one that has not come.
    """

    def __init__(self, group: str, size: int) -> None:
        self.group, self.size = group, size
        self.step = 0  # the next to be called
        self.is_held = False  # no step is called
        self._has_counted = False  # at the last step: nobody plans any more before the next
        self.latest: list[Ready] = []  # of the step called last, by rank
        self._ready: dict[int, Ready] = {}
        self._after: list[Actions] = []
        self._grants: dict[int, list[int]] = {}
        self._allowed: list[int] = []  # tokens of each planner in the step to be called

    def add(self, action: Actions) -> None:
        """To be done by all after the next step."""
        self._after.append(action)

    def take(self, ready: Ready) -> None:
        """One for a step that was called already is out of date."""
        if ready.step != self.step:
            return
        for taker, blocks in ready.given.items():
            self._grants.setdefault(taker, []).extend(blocks)
        self._ready[ready.rank] = ready

    @property
    def is_everyone_ready(self) -> bool:
        return len(self._ready) == self.size

    def ready_of(self, rank: int) -> Ready:
        """What it told last. KeyError before its first word."""
        return self._ready[rank] if rank in self._ready or not self.latest else self.latest[rank]

    def call(self) -> Step | None:
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
        # What is counted must not change before it was decided about.
        self.is_held = self._has_counted = any(isinstance(action, Census) for action in self._after)
        self.latest = ready
        self._ready, self._after, self._grants = {}, [], {}
        self.step += 1
        return called

    def _allow(self, ready: list[Ready]) -> list[int]:
        max_tokens = min(each.max_tokens for each in ready)
        allowed = self._allowed or [even(each.max_tokens, self.size) for each in ready]
        needs = [
            Need(each.work.num_tokens if each.work else 0, limit, each.running, each.long_remaining)
            for each, limit in zip(ready, allowed, strict=True)
        ]
        self._allowed = allowances(needs, max_tokens)
        return self._allowed

    def _has_news(self, ready: list[Ready]) -> bool:
        """Work; or that the last work has ended, since all tell of the blocks in use."""
        used, told = ([each.num_used for each in of] for of in (ready, self.latest))
        return any(each.work for each in ready) or self._has_counted or (bool(told) and used != told)

    def give_up_census(self) -> None:
        """Nobody wants the count any more."""
        self._after = [action for action in self._after if not isinstance(action, Census)]
        self.is_held = False

    def _lend(self, ready: list[Ready]) -> list[Actions]:
        """Nothing beside other changes: blocks are counted, or change their numbers."""
        if self._after or self._grants or any(each.given for each in ready):
            return []
        told = ((each.spare, each.wanted, each.wanting_s) for each in ready)
        made = loans(*zip(*told, strict=True))
        return [Lend(giver=giver, taker=taker, blocks=blocks) for giver, taker, blocks in made]
