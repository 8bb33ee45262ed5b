"""The time that requests run at an instance."""

from __future__ import annotations

from typing import Final

WEIGHT: Final = 0.1  # of a request that ends, in the mean


class Residence:
    """The mean time from the first step of a request to its end; the last ones count more."""

    def __init__(self) -> None:
        self.mean_s = 0.0  # 0.0: none has ended yet

    def add(self, seconds: float) -> None:
        """Note a request that has ended."""
        weight = WEIGHT if self.mean_s else 1.0
        self.mean_s += weight * (seconds - self.mean_s)
