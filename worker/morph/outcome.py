"""How a morph that is not applied ends."""

from __future__ import annotations

from bus.messages import MorphOutcome, Number


class NotApplied(Exception):
    """A morph's end, as its MorphReport will say it. Whatever it had not finished is undone; the old shape
    serves on."""

    def __init__(self, state: MorphOutcome, reason: str, **numbers: Number) -> None:
        self.state, self.reason, self.numbers = state, reason, numbers
        super().__init__(reason)
