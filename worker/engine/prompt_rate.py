"""The speed at which an instance computes prompts."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 0.9  # weight that each step leaves of the steps before it


class PromptRate:
    """The prompt tokens per second of the last steps that had any; decodes in the same steps slow it."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Note a step; one without prompt tokens says nothing."""
        if num_tokens:
            self._tokens = MEMORY * self._tokens + num_tokens
            self._seconds = MEMORY * self._seconds + seconds

    @property
    def per_s(self) -> float:
        """Tokens per second; 0.0 while unknown."""
        return self._tokens / self._seconds if self._seconds else 0.0
