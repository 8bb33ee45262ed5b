"""How fast work of one kind was lately, for whoever has to choose between two ways."""

from __future__ import annotations

# Of what was known, with each new piece of work: after ten of a size a tenth is left.
_KEPT = 0.8


class Rate:
    """Bytes by seconds, what was done lately weighing most. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._done = (0.0, 0.0)  # at once, since another thread reads it

    def add(self, nbytes: int, seconds: float) -> None:
        """What took no bytes or no time tells nothing."""
        if nbytes > 0 and seconds > 0:
            before_bytes, before_s = self._done
            self._done = before_bytes * _KEPT + nbytes, before_s * _KEPT + seconds

    @property
    def bytes_per_s(self) -> float:
        """0.0: nothing was ever measured."""
        nbytes, seconds = self._done
        return nbytes / seconds if seconds else 0.0
