"""Layers that keep the precision they were deployed in: those of a stage do not swap."""

from __future__ import annotations

from collections.abc import Sequence

from bus.messages import Part
from bus.precisions import Precision
from worker.morph.verbs import Variants
from worker.shape.copier import CopyJob


class KeptVariants:
    """Over those that they were loaded from. The layers behind this stage are known, and have no page
    here."""

    def __init__(self, loaded: Variants, precision: Precision, num_layers: int) -> None:
        self.precisions: Sequence[Precision] = (precision,)
        self._loaded, self._num_layers = loaded, num_layers

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        return self._loaded.pages(layer, part, precision) if layer < self._num_layers else 0

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        raise NotImplementedError

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob:
        raise NotImplementedError

    check = install = unmap = map

    def release(self) -> None:
        self._loaded.release()
