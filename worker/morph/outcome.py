"""The end of a morph that is not applied."""

from __future__ import annotations

from bus.messages import MorphOutcome, Number


class NotApplied(Exception):
    """Raised to end a morph, with what its MorphReport will say.

    Whatever it had not finished is undone, and the old shape goes on serving.
    """

    def __init__(self, state: MorphOutcome, reason: str, **numbers: Number) -> None:
        self.state, self.reason, self.numbers = state, reason, numbers
        super().__init__(reason)
