"""Copy jobs: from a host image, or from the checkpoint, into the mapped pages of a variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.memory import VirtualRange
from worker.model.layout import RangePlan
from worker.model.sources import WeightSource
from worker.model.weights import tensors_in
from worker.shape.checks import CheckedPages, row_sums

# A millisecond on either: it may be stopped, and rests, after each. Smaller ones cost more calls (1 MiB on a
# CPU: half as long again).
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24

_ADVICE = (
    "memory of the device or of the host is damaged (to have the host's copy made anew, stop all workers of"
    " this model)"
)

ByteSpan = tuple[int, int]  # [begin, end) in bytes of a range


class HostCopy:
    """Fills the mapped pages of one variant from its host image, and reads them again: what lies in them then
    is what was made when the images were, or WrongVariant is raised."""

    def __init__(
        self,
        what: str,
        image: torch.Tensor,
        sums: torch.Tensor,
        target: VirtualRange,
        device: torch.device,
        spans: Sequence[ByteSpan],
    ) -> None:
        """image: uint8 [n], no more than the range has. sums: its `row_sums`. spans: which parts of it, each
        from the beginning of a page on and within pages that are mapped. what: for the error."""
        self._image, self._spans = image, list(spans)
        self._pages = CheckedPages(what, target, image.numel(), sums, _ADVICE)
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self._spans)

    @property
    def read_bytes(self) -> int:
        return self.nbytes

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Chunk by chunk, in any thread; asks after each and returns at once on False."""
        for begin, end in self._spans:
            for first in range(begin, end, self._chunk_bytes):
                self._pages.put(first, self._image[first : min(first + self._chunk_bytes, end)])
                if not may_go_on():
                    return


class SourceCopy:
    """Lays the half out in host memory as it was at load, tensor by tensor, and copies these parts of it."""

    def __init__(
        self,
        what: str,
        plan: RangePlan,
        source: WeightSource,
        target: VirtualRange,
        spans: Sequence[ByteSpan],
        device: torch.device,
    ) -> None:
        """plan: of full precision. spans: whole pages that are mapped."""
        self._what, self._plan, self._source = what, plan, source
        self._target, self._spans, self._device = target, spans, device

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self._spans)

    @property
    def read_bytes(self) -> int:
        """The whole half, however little of it is wanted."""
        return self._plan.nbytes

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Asks after each tensor, some tens of MiB, and then as a `HostCopy` does. Raises ModelError too."""
        where = self._device if self._source.depends_on_device else torch.device("cpu")
        try:
            image = lay_out(self._plan, self._source, where, may_go_on).cpu()
        except _CopyStopped:
            return
        HostCopy(self._what, image, row_sums(image), self._target, self._device, self._spans)(may_go_on)


class _CopyStopped(Exception):
    """It may not go on."""


def lay_out(
    plan: RangePlan, source: WeightSource, device: torch.device, may_go_on: Callable[[], bool] = lambda: True
) -> torch.Tensor:
    """uint8 [plan.nbytes] in full precision, as it lies in the pages of a model. Asks after each tensor."""
    laid_out = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    tensors = tensors_in(laid_out, plan)
    for each in plan.sources:
        source.fill(each.target(tensors), each)
        if not may_go_on():
            raise _CopyStopped
    return laid_out
