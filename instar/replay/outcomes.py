"""The outcome of each request of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import msgspec

KEPT_BYTES: Final = 65536  # end of a stream, with finish reason, usage, error and precisions
DIGITS: Final = 6  # digits of seconds in run.json
NOT_SENT: Final = "not sent"  # the run was interrupted before it was due
INTERRUPTED: Final = "interrupted"  # the run was interrupted while it ran
UNFINISHED: Final = "unfinished"
CUT: Final = "stream ended early"  # without a finish reason, which OpenAI's clients take for success
LOST: Final = "connection lost"


@dataclass(slots=True)
class RequestOutcome:
    """Times of a request in seconds after the beginning of the run, None for events that did not happen.

    `opened_s` is the head of the answer, which Instar sends when a worker begins. `error` is "" for a request
    that was served to its end.
    """

    number: int
    due_s: float
    prompt_asked: int
    output_asked: int
    sent_s: float | None = None
    opened_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    longest_pause_s: float = 0.0
    status: int = 0
    error: str = ""
    finish: str = ""
    events: int = 0
    prompt_tokens: int | None = None  # tokens by the server's count; None: it did not report
    output_tokens: int | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)  # (tokens, layers below full)

    def rounded(self) -> RequestOutcome:
        """Return the outcome as run.json keeps it, with times in whole microseconds."""
        times: dict[str, Any] = {}
        for one in fields(self):
            if isinstance(value := getattr(self, one.name), float):
                times[one.name] = round(value, DIGITS)
        return replace(self, **times)

    @property
    def counts(self) -> bool:
        """False for requests that an interrupted run left."""
        return self.error not in (NOT_SENT, INTERRUPTED)

    @property
    def is_served(self) -> bool:
        return not self.error and self.first_s is not None

    @property
    def num_output(self) -> int:
        """Output tokens as the server counted them, else one for each event."""
        return self.events if self.output_tokens is None else self.output_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from when the request was due."""
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, None without a second token."""
        if self.first_s is None or self.last_s is None or self.num_output < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def queue_s(self) -> float | None:
        """Time from when the request was due to the head of the answer."""
        return None if self.opened_s is None else self.opened_s - self.due_s


def conclude(outcome: RequestOutcome, answer: bytes) -> None:
    """Read the end of the answer into `outcome`: a stream's last events, or the code of a refusal."""
    if outcome.status != 200:
        outcome.error = f"{outcome.status} {error_code(_decoded(answer))}".strip()
        return
    for line in answer.splitlines():  # the first may be incomplete
        if line.startswith(b"data:") and isinstance(event := _decoded(line[5:]), dict):
            _take_event(outcome, event)
    if not outcome.error and not outcome.finish:
        outcome.error = CUT


def _take_event(outcome: RequestOutcome, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        outcome.error = f"stream: {error_code(event) or str(error)[:60]}"
    if isinstance(usage := event.get("usage"), dict):
        outcome.prompt_tokens = usage.get("prompt_tokens")
        outcome.output_tokens = usage.get("completion_tokens")
        if not event.get("choices"):
            outcome.events -= 1  # counted before as one with text
    for choice in event.get("choices") or []:
        outcome.finish = choice.get("finish_reason") or outcome.finish
        for span in choice.get("precision") or []:
            outcome.spans.append((span["end"] - span["start"], span["layers_below_full"]))


def _decoded(text: bytes) -> Any:
    """Return the JSON value, None for other text."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def error_code(body: Any) -> str:
    """Return the `code`, else the `type`, of an error object, "" if there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return ""
    return str(error.get("code") or error.get("type") or "")
