"""What happened to a flight, attempt by attempt. Kept only where it is traced, and for nothing but that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bus.messages import StepOutput

if TYPE_CHECKING:
    from gateway.delivery.inflight import Target

KEPT: Final = 8  # attempts; of more, some in the middle are forgotten
MAX_SHAPES: Final = 128  # of an attempt


@dataclass(frozen=True, slots=True)
class Shape:
    """What made the tokens from `index` on."""

    at: float
    index: int
    fingerprint: str
    layers_below_full: int


@dataclass(slots=True)
class Attempt:
    """It waits from `since` on. Times are those of the flight's clock; 0: that did not happen."""

    since: float
    number: int = 0
    target: Target | None = None
    num_known: int = 0  # tokens that it begins with: the prompt, and the output so far
    sent: float = 0.0
    began: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    num_tokens: int = 0  # made by it
    shapes: list[Shape] = field(default_factory=list)
    void: str = ""  # why it did not go on


class Journey:
    """`attempts[-1]` is the one of now."""

    def __init__(self, now: float) -> None:
        self.attempts = [Attempt(now)]

    @property
    def now(self) -> Attempt:
        return self.attempts[-1]

    def sent(self, target: Target, number: int, num_known: int, now: float) -> None:
        attempt = self.now
        attempt.target, attempt.number, attempt.num_known, attempt.sent = target, number, num_known, now

    def began(self, at: float) -> None:
        """A worker told how long ago its first step began."""
        self.now.began = max(at, self.now.sent)

    def made(self, step: StepOutput, index: int, num_tokens: int, now: float) -> None:
        """Output tokens from `index` on."""
        attempt = self.now
        if not attempt.num_tokens:
            attempt.first_token = now
        attempt.num_tokens += num_tokens
        shapes = attempt.shapes
        is_new = not shapes or shapes[-1].fingerprint != step.fingerprint
        if is_new and len(shapes) < MAX_SHAPES:
            shapes.append(Shape(now, index, step.fingerprint, step.layers_below_full))

    def void(self, reason: str, now: float) -> None:
        """It goes on with another attempt, or from anew."""
        self.now.ended, self.now.void = now, reason
        self.attempts.append(Attempt(now))
        if len(self.attempts) > KEPT:
            del self.attempts[KEPT // 2]

    def end(self, now: float) -> None:
        self.now.ended = now
