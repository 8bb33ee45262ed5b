"""Stop strings in a stream of text: which text can go out, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the stop string that is completed first, however the text is divided in pieces."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return (text that can go out, whether a stop string was found); hold back what may begin one."""
        text = self._held + text
        end = self._first_stop(text)
        if end is not None:
            self._held = ""
            return text[:end], True
        keep = max(overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """Return what was held back: the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Return where the stop string that ends first begins; of several, the longest."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning, not all, of `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0
