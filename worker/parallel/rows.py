"""The FFN rows that members miss when their group splits: from the host beside the steps, or from peers.

With peers the split takes the seconds of its steps plus those of the rows; with the host the longer of the
two. All members go the way that ends sooner; the host is read while one is not measured.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bus.messages import Number
from worker.model.shard import Shard
from worker.morph.reshard import Resharder
from worker.shape.copier import Copier, Copy

MAX_COPIES = 2  # layers: one is copied, the next one waits with its pages mapped


@dataclass(frozen=True, slots=True)
class RowCosts:
    """A member's measured rates, and the bytes that they are about: a part of its vote."""

    rows_missing_bytes: int  # bytes of all layers that its peers have
    rows_host_bytes: int  # bytes its host must read for these: more than is missing
    rows_host_bytes_per_s: float  # rate of its copies so far; 0: none yet
    rows_peer_bytes_per_s: float  # rate of its exchanges so far


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
        predicted = {"rows_host_predicted_seconds": self.host_s, "rows_peers_predicted_seconds": self.peers_s}
        known: dict[str, Number] = {name: round(s, 6) for name, s in predicted.items() if s is not None}
        return known | {"rows_from_peers": int(self.is_from_peers)}


def choose_rows(members: Sequence[RowCosts], num_steps: int, step_s: float) -> RowChoice:
    """Predict both ways for a split of `num_steps` steps of `step_s` seconds. The slowest member decides."""
    missing = max(each.rows_missing_bytes for each in members)
    peer_rates = [each.rows_peer_bytes_per_s for each in members if each.rows_peer_bytes_per_s]
    host_s = None
    if all(each.rows_host_bytes_per_s for each in members):
        host_s = max(each.rows_host_bytes / each.rows_host_bytes_per_s for each in members)
    return RowChoice(num_steps * step_s, host_s, missing / min(peer_rates) if peer_rates else None)


class RowSource(ABC):
    """The rows of layers that go back to a lower degree, the last one first, as far as `filled`."""

    def __init__(self, weights: Resharder, shard: Shard, num_layers: int) -> None:
        self.filled, self.seconds = num_layers, 0.0  # spent on rows, beside the steps or between them
        self._weights, self._shard = weights, shard
        self._num_layers = self._mapped = num_layers  # layers from `_mapped` on have their pages

    @abstractmethod
    def advance(self) -> None:
        """Go on between two steps. Raises OutOfPages and MappingFailed, and a copy's error."""

    def finish(self, layer: int) -> None:  # noqa: B027 an optional step
        """Complete a layer. Every member calls it, for the same layers in the same order."""

    def stop(self) -> None:
        """Stop writing; layers that were not widened keep what they had."""
        for layer in range(self._mapped, self._num_layers):
            if self._weights.shard(layer) != self._shard:
                self._weights.unmap_extra(layer)

    def _map_next(self) -> int:
        layer = self._mapped - 1
        self._weights.map(layer, self._shard)
        self._mapped = layer
        return layer


class HostRows(RowSource):
    """Rows from the host's images or the checkpoint, brought by each member's own copying thread."""

    def __init__(self, weights: Resharder, shard: Shard, num_layers: int, copier: Copier) -> None:
        super().__init__(weights, shard, num_layers)
        self._copier = copier
        self._copies: deque[tuple[int, Copy]] = deque()

    def advance(self) -> None:
        while self._copies and self._copies[0][1].is_done:
            layer, copy = self._copies.popleft()
            copy.raise_error()
            self.filled, self.seconds = layer, self.seconds + copy.seconds
        while self._mapped and len(self._copies) < MAX_COPIES:
            layer = self._map_next()
            self._copies.append((layer, self._copier.start(self._weights.fill(layer, self._shard))))

    def stop(self) -> None:
        for _, copy in self._copies:
            copy.stop()
        self._copies.clear()
        super().stop()


class PeerRows(RowSource):
    """Rows from peers: pages are mapped up to `ahead` layers ahead, and `finish` fills them."""

    def __init__(
        self,
        weights: Resharder,
        shard: Shard,
        num_layers: int,
        ahead: int,
        gather: Callable[[int], None],
    ) -> None:
        """gather: fills the pages of a layer, together with the peers. Raises PeerLost and WrongVariant."""
        super().__init__(weights, shard, num_layers)
        self._ahead, self._gather = ahead, gather
        self._finished = num_layers

    def advance(self) -> None:
        while self.filled > max(0, self._finished - self._ahead):
            self.filled = self._map_next()

    def finish(self, layer: int) -> None:
        began = time.monotonic()
        self._gather(layer)
        self._finished = layer
        self.seconds += time.monotonic() - began
