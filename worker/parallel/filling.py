"""The weights of layers that go back to a lower degree, the last layer first: from the host beside the steps,
or from peers between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from worker.model.shard import Shard
from worker.shape.checks import CheckedPages
from worker.shape.copier import Copier, Copy, CopyJob
from worker.shape.copies import ByteSpan

MAX_COPIES = 2  # layers: one is copied, the next one waits with its pages mapped


class Weights(Protocol):
    """What a group asks of `worker.morph.reshard.Resharder`. In the engine's thread, between steps."""

    def shard(self, layer: int) -> Shard: ...

    def pages(self, layer: int, shard: Shard) -> int: ...

    def narrow(self, layer: int, shard: Shard) -> int: ...

    def map(self, layer: int, shard: Shard) -> int: ...

    def fill(self, layer: int, shard: Shard) -> CopyJob: ...

    def spans(self, layer: int, shard: Shard) -> list[ByteSpan]: ...

    def ffn(self, layer: int) -> CheckedPages: ...

    def rehearsal(self) -> CopyJob: ...

    def widen(self, layer: int, shard: Shard) -> None: ...

    def unmap_extra(self, layer: int) -> None: ...


class Rows(Protocol):
    """Layers from `filled` on may change their degree after the next step: `finish`, then widen them. The
    engine's thread makes the calls, and what they raise ends the group."""

    filled: int
    seconds: float  # spent so far on bringing rows in, beside the steps or between them

    def advance(self) -> None:
        """At every boundary between steps."""

    def finish(self, layer: int) -> None:
        """Now it has all that it needs. Every member calls it, for the same layers in the same order."""

    def stop(self) -> None:
        """Nothing writes any more, and layers that were not widened have what they had."""


class Filling:
    """Each member's own copying thread brings them, from the host's images or the checkpoint."""

    def __init__(self, weights: Weights, shard: Shard, num_layers: int, copier: Copier) -> None:
        self.filled, self.seconds = num_layers, 0.0
        self._weights, self._shard, self._copier = weights, shard, copier
        self._num_layers, self._next = num_layers, num_layers - 1
        self._copies: deque[tuple[int, Copy]] = deque()

    def advance(self) -> None:
        """Raises OutOfPages, MappingFailed, and what a copy raised."""
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
        """It is there."""

    def stop(self) -> None:
        for _, copy in self._copies:
            copy.stop()
        self._copies.clear()
        _unmap_extra(self._weights, self._shard, range(self._next + 1, self._num_layers))


class Fetching:
    """Pages are mapped ahead, `ahead` layers at most; what they are to hold comes with `finish`."""

    def __init__(
        self,
        weights: Weights,
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
        """Raises OutOfPages and MappingFailed."""
        while self.filled > max(0, self._finished - self._ahead):
            self._weights.map(self.filled - 1, self._shard)
            self.filled -= 1

    def finish(self, layer: int) -> None:
        began = self._clock()
        self._gather(layer)
        self._finished = layer
        self.seconds += self._clock() - began

    def stop(self) -> None:
        _unmap_extra(self._weights, self._shard, range(self.filled, self._num_layers))


def _unmap_extra(weights: Weights, shard: Shard, layers: Iterable[int]) -> None:
    """Of those that were not widened."""
    for layer in layers:
        if weights.shard(layer) != shard:
            weights.unmap_extra(layer)
