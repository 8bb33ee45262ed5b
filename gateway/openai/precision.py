"""Which tokens of a choice were made in which shape: `precision` of an answer, for return_precision."""

from __future__ import annotations

from typing import Any

from bus.messages import StepOutput


class PrecisionTrack:
    """Spans of output tokens [start, end), each with the shape that made it, joined where it is the same."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[dict[str, Any]] = []

    def add(self, end: int, step: StepOutput) -> None:
        """The choice has `end` tokens now; those that are new were made by `step`."""
        start = self._spans[-1]["end"] if self._spans else 0
        if end == start:
            return
        shape = {"layers_below_full": step.layers_below_full, "fingerprint": step.fingerprint}
        if self._spans and shape.items() <= self._spans[-1].items():
            self._spans[-1]["end"] = end
        else:
            self._spans.append({"start": start, "end": end} | shape)

    def spans(self) -> list[dict[str, Any]]:
        return self._spans
