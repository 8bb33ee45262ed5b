"""The FFN rows that members miss when their group splits: from the host beside the steps, or from peers.

Rows of the host come beside the steps, those of peers between them. So with peers the split takes the seconds
of its steps plus those of the rows; with the host the longer of the two. All members go the same way, the one
that ends sooner. A way that has not been measured yet is not compared: then the host is read, which disturbs
the steps less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from bus.messages import Number
from worker.model.shard import Shard
from worker.morph.reshard import Resharder
from worker.shape.copier import Copier, Copy

MAX_COPIES = 2  # layers: one is copied, the next one waits with its pages mapped


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What a member has measured, and the bytes that it is about."""

    rows_missing_bytes: int  # of all layers, that its peers have
    rows_host_bytes: int  # that its host must read for these: from the checkpoint more than is missing
    rows_host_bytes_per_s: float  # of its copies so far; 0: none was made yet
    rows_peer_bytes_per_s: float  # of its exchanges so far

    def numbers(self) -> dict[str, Number]:
        """Return the fields for a vote."""
        return asdict(self)


def row_costs(numbers: Mapping[str, Number]) -> RowCosts:
    """Read the costs from a member's vote. Raises KeyError where they are missing."""
    return RowCosts(
        int(numbers["rows_missing_bytes"]),
        int(numbers["rows_host_bytes"]),
        numbers["rows_host_bytes_per_s"],
        numbers["rows_peer_bytes_per_s"],
    )


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Predicted seconds of the steps that a split takes anyhow, and of each way; None: unknown."""

    steps_s: float
    host_s: float | None
    peers_s: float | None

    @property
    def is_from_peers(self) -> bool:
        """True if peers are known to be faster."""
        if self.host_s is None or self.peers_s is None:
            return False
        return self.steps_s + self.peers_s < max(self.steps_s, self.host_s)

    def numbers(self) -> dict[str, Number]:
        """Return the predictions for a report; what is unknown is left out."""
        told = {"rows_host_predicted_seconds": self.host_s, "rows_peers_predicted_seconds": self.peers_s}
        known: dict[str, Number] = {name: round(s, 6) for name, s in told.items() if s is not None}
        return known | {"rows_from_peers": int(self.is_from_peers)}


def choose_rows(members: Sequence[RowCosts], num_steps: int, step_s: float) -> RowChoice:
    """Predict both ways for a split of `num_steps` steps of `step_s` seconds each.

    The slowest member decides: exchanges end for all at once, and no layer changes before all have it.
    """
    missing = max(each.rows_missing_bytes for each in members)
    peer_rates = [each.rows_peer_bytes_per_s for each in members if each.rows_peer_bytes_per_s]
    is_host_known = all(each.rows_host_bytes_per_s for each in members)
    return RowChoice(
        steps_s=num_steps * step_s,
        host_s=max(each.rows_host_bytes / each.rows_host_bytes_per_s for each in members)
        if is_host_known
        else None,
        peers_s=missing / min(peer_rates) if peer_rates else None,
    )


class RowSource(Protocol):
    """Brings the rows of layers that go back to a lower degree, the last layer first.

    Layers from `filled` on may change their degree after the next step: `finish`, then widen them. The
    engine's thread makes the calls, and what they raise ends the group.
    """

    filled: int
    seconds: float  # spent so far on bringing rows in, beside the steps or between them

    def advance(self) -> None:
        """Go on at a boundary between steps."""

    def finish(self, layer: int) -> None:
        """Complete a layer. Every member calls it, for the same layers in the same order."""

    def stop(self) -> None:
        """Stop writing; layers that were not widened keep what they had."""


class HostRows:
    """Rows from the host's images or the checkpoint, brought by each member's own copying thread."""

    def __init__(self, weights: Resharder, shard: Shard, num_layers: int, copier: Copier) -> None:
        self.filled, self.seconds = num_layers, 0.0
        self._weights, self._shard, self._copier = weights, shard, copier
        self._num_layers, self._next = num_layers, num_layers - 1
        self._copies: deque[tuple[int, Copy]] = deque()

    def advance(self) -> None:
        """Take finished copies and start the next. Raises OutOfPages, MappingFailed, and a copy's error."""
        while self._copies and self._copies[0][1].is_done:
            layer, copy = self._copies.popleft()
            copy.raise_error()
            self.filled, self.seconds = layer, self.seconds + copy.seconds
        while self._next >= 0 and len(self._copies) < MAX_COPIES:
            layer = self._next
            self._weights.map(layer, self._shard)
            self._copies.append((layer, self._copier.start(self._weights.fill(layer, self._shard))))
            self._next -= 1

    def finish(self, layer: int) -> None:
        """Do nothing: the host copy of a filled layer is complete."""

    def stop(self) -> None:
        """Stop the copies and unmap their pages."""
        for _, copy in self._copies:
            copy.stop()
        self._copies.clear()
        _unmap_extra(self._weights, self._shard, range(self._next + 1, self._num_layers))


class PeerRows:
    """Rows from peers: pages are mapped up to `ahead` layers ahead, and `finish` fills them."""

    def __init__(
        self,
        weights: Resharder,
        shard: Shard,
        num_layers: int,
        ahead: int,
        gather: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """gather: fills the pages of a layer, together with the peers. Raises PeerLost and WrongVariant."""
        self.filled, self.seconds = num_layers, 0.0
        self._weights, self._shard, self._gather, self._clock = weights, shard, gather, clock
        self._num_layers = self._finished = num_layers
        self._ahead = ahead

    def advance(self) -> None:
        """Map pages ahead. Raises OutOfPages and MappingFailed."""
        while self.filled > max(0, self._finished - self._ahead):
            self._weights.map(self.filled - 1, self._shard)
            self.filled -= 1

    def finish(self, layer: int) -> None:
        """Fill a layer's pages from the peers."""
        began = self._clock()
        self._gather(layer)
        self._finished = layer
        self.seconds += self._clock() - began

    def stop(self) -> None:
        """Unmap the pages of layers that were not widened."""
        _unmap_extra(self._weights, self._shard, range(self.filled, self._num_layers))


def _unmap_extra(weights: Resharder, shard: Shard, layers: Iterable[int]) -> None:
    for layer in layers:
        if weights.shard(layer) != shard:
            weights.unmap_extra(layer)
