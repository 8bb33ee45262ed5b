"""The weights of layers that go back to a lower degree, brought in beside the steps, the last layer first."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from worker.model.shard import Shard
from worker.morph.copier import Copier, Copy
from worker.morph.verbs import CopyJob

MAX_COPIES = 2  # layers: one is copied, the next one waits with its pages mapped


class Weights(Protocol):
    """What a group asks of `worker.morph.reshard.Resharder`. In the engine's thread, between steps."""

    def shard(self, layer: int) -> Shard: ...

    def pages(self, layer: int, shard: Shard) -> int: ...

    def narrow(self, layer: int, shard: Shard) -> int: ...

    def map(self, layer: int, shard: Shard) -> int: ...

    def fill(self, layer: int, shard: Shard) -> CopyJob: ...

    def widen(self, layer: int, shard: Shard) -> None: ...

    def unmap_extra(self, layer: int) -> None: ...


class Filling:
    """Layers from `filled` on have all that `shard` needs; what is done with them is for others to say."""

    def __init__(self, weights: Weights, shard: Shard, num_layers: int, copier: Copier) -> None:
        self.filled = num_layers
        self._weights, self._shard, self._copier = weights, shard, copier
        self._num_layers, self._next = num_layers, num_layers - 1
        self._copies: deque[tuple[int, Copy]] = deque()

    def advance(self) -> None:
        """Raises OutOfPages, MappingFailed, and what a copy raised."""
        while self._copies and self._copies[0][1].is_done:
            layer, copy = self._copies.popleft()
            copy.raise_error()
            self.filled = layer
        while self._next >= 0 and len(self._copies) < MAX_COPIES:
            layer = self._next
            self._weights.map(layer, self._shard)
            self._copies.append((layer, self._copier.start(self._weights.fill(layer, self._shard))))
            self._next -= 1

    def stop(self) -> None:
        """Nothing writes any more, and layers that were not widened have what they had."""
        for _, copy in self._copies:
            copy.stop()
        self._copies.clear()
        for layer in range(self._next + 1, self._num_layers):
            if self._weights.shard(layer) != self._shard:
                self._weights.unmap_extra(layer)
