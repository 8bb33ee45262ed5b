"""One instance as morphs see it."""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import LayerShape
from bus.precisions import Precision
from worker.engine.core import EngineCore
from worker.engine.shape import precision_of
from worker.morph.plan import Half
from worker.morph.resizer import KVResizer
from worker.morph.verbs import Variants


class Target:
    """An instance, the variants of its layers and its KV cache."""

    def __init__(
        self, instance: EngineCore, variants: Variants, resizer: KVResizer, order: Sequence[int] = ()
    ) -> None:
        """order: in which layers lose bits; default front to back."""
        self.instance, self.variants, self.resizer = instance, variants, resizer
        self.order = list(order) or list(range(len(instance.shape)))
        # Layers below full, the last swapped last.
        self._swapped = [layer for layer in self.order if instance.shape[layer] != LayerShape()]
        self._left_mapped: set[tuple[Half, Precision]] = set()  # the system refused to unmap them

    def precision(self, half: Half) -> Precision:
        return precision_of(self.instance.shape[half.layer], half.part)

    def pages(self, half: Half, precision: Precision) -> int:
        return self.variants.pages(half.layer, half.part, precision)

    def order_towards(self, precision: Precision) -> list[int]:
        """Towards full the last swapped goes first."""
        if precision != "full":
            return self.order
        return [*reversed(self._swapped), *(layer for layer in self.order if layer not in self._swapped)]

    def install(self, half: Half, precision: Precision) -> None:
        """The next step runs on it, and tells."""
        self.variants.install(half.layer, half.part, precision)
        self.instance.reshaped()
        if half.layer in self._swapped:
            self._swapped.remove(half.layer)
        if self.instance.shape[half.layer] != LayerShape():
            self._swapped.append(half.layer)

    def unmap(self, half: Half, precision: Precision) -> None:
        """Its pages are free again, the KV cache's first. Raises MappingFailed; `unmap_rest` tries again."""
        self._left_mapped.add((half, precision))
        self.variants.unmap(half.layer, half.part, precision)
        self._left_mapped.remove((half, precision))
        self.resizer.gain(self.pages(half, precision))

    def unmap_rest(self) -> None:
        """What could not be unmapped when it should have been. Raises MappingFailed."""
        for half, precision in list(self._left_mapped):
            self.unmap(half, precision)

    def check_integrity(self, with_pool: bool = True) -> None:
        """Raises BrokenInvariant and AssertionError. The whole pool takes milliseconds on a large device."""
        self.instance.check_integrity()
        self.resizer.cache.check_integrity()
        if with_pool:
            self.resizer.cache.pool.check_integrity()
