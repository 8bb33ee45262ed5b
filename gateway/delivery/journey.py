"""The attempts of a traced request, for its spans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from bus.messages import StepOutput

KEPT: Final = 8  # attempts; of more, some in the middle are forgotten
MAX_SHAPES: Final = 128  # most shapes of an attempt


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """The shape that made the tokens from `index` on."""

    at: float
    index: int
    fingerprint: str
    layers_below_full: int


@dataclass(slots=True)
class Attempt:
    """One attempt, which waits from `since` on. Times are those of the request; 0: that did not happen."""

    since: float
    number: int = 0  # 0: it was never sent
    instance: str = ""
    worker: str = ""
    epoch: int = 0
    num_known: int = 0  # tokens that it begins with: the prompt and the output so far
    sent: float = 0.0
    began: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    num_tokens: int = 0  # tokens that it made
    shapes: list[ShapeChange] = field(default_factory=list)
    void: str = ""  # why it did not continue


class Journey:
    """The attempts of one request. `attempts[-1]` is the current one."""

    def __init__(self, now: float) -> None:
        self.attempts = [Attempt(now)]

    def sent(self, target: tuple[str, str, int], number: int, num_known: int, now: float) -> None:
        attempt = self.attempts[-1]
        attempt.instance, attempt.worker, attempt.epoch = target
        attempt.number, attempt.num_known, attempt.sent = number, num_known, now

    def began(self, at: float) -> None:
        """Note when the attempt's first step began."""
        attempt = self.attempts[-1]
        attempt.began = max(at, attempt.sent)

    def made(self, step: StepOutput, index: int, num_tokens: int, now: float) -> None:
        """Note output tokens from `index` on."""
        attempt = self.attempts[-1]
        if not attempt.num_tokens:
            attempt.first_token = now
        attempt.num_tokens += num_tokens
        shapes = attempt.shapes
        is_new = not shapes or shapes[-1].fingerprint != step.fingerprint
        if is_new and len(shapes) < MAX_SHAPES:
            shapes.append(ShapeChange(now, index, step.fingerprint, step.layers_below_full))

    def void(self, reason: str, now: float) -> None:
        """End the attempt; the request continues with another one."""
        self.attempts[-1].void = reason
        self.end(now)
        self.attempts.append(Attempt(now))
        if len(self.attempts) > KEPT:
            del self.attempts[KEPT // 2]

    def end(self, now: float) -> None:
        self.attempts[-1].ended = now
