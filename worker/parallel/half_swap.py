"""One member's part in a swap of its group: a half of a layer, at its shard, from one variant to another."""

from __future__ import annotations

from worker.distributed.messages import PrepareHalf
from worker.morph.plan import Half
from worker.parallel.place import Place


class HalfSwap:
    """Mapped and being copied from the start; then `install` or `drop`."""

    def __init__(self, place: Place, order: PrepareHalf) -> None:
        """Raises MappingFailed and OutOfPages; then nothing has changed."""
        self._target, self._precision = place.target, order.precision
        self._half = Half(order.layer, order.part)
        self._where = (order.layer, order.part, order.precision)
        self._target.variants.map(*self._where)
        self._copy = place.copier.start(self._target.variants.copy_job(*self._where))

    @property
    def is_ready(self) -> bool:
        return self._copy.is_done

    def install(self) -> None:
        """The next step runs on it, and the old one's pages are free. Raises what the copy raised."""
        self._copy.raise_error()
        self._target.variants.check(*self._where)
        old = self._target.precision(self._half)
        self._target.install(self._half, self._precision)
        self._target.variants.unmap(self._half.layer, self._half.part, old)

    def drop(self) -> None:
        self._copy.stop()
        self._target.variants.unmap(*self._where)
