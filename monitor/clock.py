"""The clock of the messages, told from here. Pure."""

from __future__ import annotations


class MessageClock:
    """Entry ids carry Redis' time. An entry is read a little after it was added, or (a backlog) much after,
    never before: the largest difference seen between its time and ours is the best estimate."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def observe(self, entry_id: str, local_s: float) -> float:
        """An entry was read at `local_s` (monotonic). Returns the entry's own time in seconds."""
        at_s = int(entry_id.partition("-")[0]) / 1000
        ahead_s = at_s - local_s
        self._ahead_s = ahead_s if self._ahead_s is None else max(self._ahead_s, ahead_s)
        return at_s

    def now(self, local_s: float) -> float:
        """Seconds on Redis' clock when it is `local_s` here; before any entry, `local_s` itself."""
        return local_s + (self._ahead_s or 0.0)
