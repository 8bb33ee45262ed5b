"""A lease as its holder knows it, by its own clock. Pure.

A lease is a key that Redis deletes unless it is renewed. Its epoch only grows, and each holder has one of its
own: workers fence what they publish by it, the controller what it orders (there it is called a term).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lease:
    """epoch: the one that was granted last, 0 before. valid_until_s: when the holder stops relying on it.

    The time counts from before a command was sent, so the holder's clock is stricter than that of Redis.
    """

    epoch: int = 0
    valid_until_s: float = float("-inf")

    def is_valid(self, now_s: float) -> bool:
        return now_s < self.valid_until_s

    def asked(self, began_s: float, length_s: float) -> Lease:
        """Return the lease while the answer is on its way: Redis may shorten the lease, and it get lost."""
        return replace(self, valid_until_s=min(self.valid_until_s, began_s + length_s))

    def granted(self, epoch: int, began_s: float, length_s: float) -> Lease:
        """Return the lease after Redis took or renewed it. Raises ValueError for an epoch of the past."""
        if epoch < self.epoch:
            raise ValueError(f"epoch {epoch} was granted after epoch {self.epoch}; epochs only grow")
        return Lease(epoch, began_s + length_s)

    def lost(self) -> Lease:
        """Return the lease after Redis said that it is not held."""
        return replace(self, valid_until_s=float("-inf"))
