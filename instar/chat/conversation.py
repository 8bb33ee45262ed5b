"""A conversation: what has been said, and the body of the request that goes on with it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Conversation:
    """The messages between a user and a model, and the parameters of the answers that follow."""

    model: str
    system: str = ""  # "": none
    min_precision: str = ""  # "": any
    max_tokens: int | None = None
    temperature: float | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def body_for(self, text: str) -> dict[str, Any]:
        """Return the body of /v1/chat/completions that asks `text`. Changes nothing."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        optional = {
            "min_precision": self.min_precision or None,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        return {
            "model": self.model,
            "messages": [*head, *self.messages, {"role": "user", "content": text}],
        } | {name: value for name, value in optional.items() if value is not None}

    def add(self, text: str, answer: str) -> None:
        """Keep a question and its answer, or what came of it before it was stopped."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forget the messages, and keep model and parameters."""
        self.messages.clear()

    @property
    def num_answers(self) -> int:
        return len(self.messages) // 2
