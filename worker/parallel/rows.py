"""Where a group that parts gets the FFN rows that its members miss: from peers, or each one's host. Pure.

The host's come beside the steps, the peers' between them. So with peers the group needs the seconds of its
steps and those of the rows; with the host the longer of the two. All members go the same way, the one that is
sooner done. What nobody has measured yet is not compared: then the host is asked, as that disturbs less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bus.messages import Number


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What a member has measured, and of what."""

    rows_missing_bytes: int  # of all layers, that its peers have
    rows_host_bytes: int  # that its host must read for these: from the checkpoint more than is missing
    rows_host_bytes_per_s: float  # of its copies so far; 0: none was made yet
    rows_peer_bytes_per_s: float  # of its exchanges so far

    def numbers(self) -> dict[str, Number]:
        return asdict(self)


def row_costs(numbers: Mapping[str, Number]) -> RowCosts:
    """As a member told them. KeyError where it did not."""
    return RowCosts(
        int(numbers["rows_missing_bytes"]),
        int(numbers["rows_host_bytes"]),
        numbers["rows_host_bytes_per_s"],
        numbers["rows_peer_bytes_per_s"],
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """`steps_s`: of the steps that the change takes anyhow. None: unknown."""

    steps_s: float
    host_s: float | None
    peers_s: float | None

    @property
    def is_from_peers(self) -> bool:
        if self.host_s is None or self.peers_s is None:
            return False
        return self.steps_s + self.peers_s < max(self.steps_s, self.host_s)

    def numbers(self) -> dict[str, Number]:
        """Of the rows alone, for a report; what is unknown is left out."""
        told = {"rows_host_predicted_seconds": self.host_s, "rows_peers_predicted_seconds": self.peers_s}
        known: dict[str, Number] = {name: round(s, 6) for name, s in told.items() if s is not None}
        return known | {"rows_from_peers": int(self.is_from_peers)}


def choose(members: Sequence[RowCosts], num_steps: int, step_s: float) -> Choice:
    """num_steps: that the boundary travels, each of so many seconds, 0 where nothing runs. The slowest member
    decides: exchanges end for all at once, and no layer changes before all have it."""
    missing = max(each.rows_missing_bytes for each in members)
    peer_rates = [each.rows_peer_bytes_per_s for each in members if each.rows_peer_bytes_per_s]
    is_host_known = all(each.rows_host_bytes_per_s for each in members)
    return Choice(
        steps_s=num_steps * step_s,
        host_s=max(each.rows_host_bytes / each.rows_host_bytes_per_s for each in members)
        if is_host_known
        else None,
        peers_s=missing / min(peer_rates) if peer_rates else None,
    )
