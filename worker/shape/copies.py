"""Copy jobs: from a host image, or from the checkpoint, into the mapped pages of a variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.memory import VirtualRange
from worker.model.layout import RangePlan
from worker.model.sources import WeightSource
from worker.model.weights import tensors_in
from worker.shape.checks import CheckedPages, row_sums

# A millisecond on either device: a copy can be stopped, and rests, after each chunk. Smaller chunks cost more
# calls (1 MiB on a CPU: half as long again).
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24

_ADVICE = (
    "memory of the device or of the host is damaged (to make the host's copy again, stop all workers of this"
    " model)"
)

ByteSpan = tuple[int, int]  # [begin, end) in bytes of a range


class HostCopy:
    """A copy of a host image into the mapped pages of one variant.

    Every chunk is read again and compared with the sums made with the image; a difference raises
    WrongVariant.
    """

    def __init__(
        self,
        what: str,
        image: torch.Tensor,
        sums: torch.Tensor,
        target: VirtualRange,
        device: torch.device,
        spans: Sequence[ByteSpan],
    ) -> None:
        """Copy `spans` of an image, uint8 [n], whose `row_sums` are `sums`.

        The image has at most the bytes of the range. Each span begins with a page and lies in mapped pages.
        what: for the error.
        """
        self._image, self._spans = image, list(spans)
        self._pages = CheckedPages(what, target, image.numel(), sums, _ADVICE)
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES
        self.nbytes = self.read_bytes = sum(end - begin for begin, end in spans)

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Copy chunk by chunk, in any thread; ask after each, and return at once on False."""
        for begin, end in self._spans:
            for first in range(begin, end, self._chunk_bytes):
                self._pages.put(first, self._image[first : min(first + self._chunk_bytes, end)])
                if not may_go_on():
                    return


class SourceCopy:
    """A copy of parts of a half from the checkpoint, for layers without host images.

    The half is laid out in host memory as it was at load, tensor by tensor; then the spans are copied.
    """

    def __init__(
        self,
        what: str,
        plan: RangePlan,
        source: WeightSource,
        target: VirtualRange,
        spans: Sequence[ByteSpan],
        device: torch.device,
    ) -> None:
        """Copy `spans`, whole mapped pages, of the half that `plan` lays out in full precision."""
        self._what, self._plan, self._source = what, plan, source
        self._target, self._spans, self._device = target, spans, device
        self.nbytes = sum(end - begin for begin, end in spans)
        self.read_bytes = plan.nbytes  # the whole half, however few bytes are copied

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Copy; ask after each tensor, some tens of MiB, then as `HostCopy` does.

        Raises ModelError too.
        """
        where = self._device if self._source.depends_on_device else torch.device("cpu")
        try:
            image = lay_out(self._plan, self._source, where, may_go_on).cpu()
        except _CopyStopped:
            return
        HostCopy(self._what, image, row_sums(image), self._target, self._device, self._spans)(may_go_on)


class _CopyStopped(Exception):
    """The copy may not go on."""


def lay_out(
    plan: RangePlan, source: WeightSource, device: torch.device, may_go_on: Callable[[], bool] = lambda: True
) -> torch.Tensor:
    """Return uint8 [plan.nbytes] in full precision, as it lies in the pages of a model.

    Asks `may_go_on` after each tensor.
    """
    laid_out = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    tensors = tensors_in(laid_out, plan)
    for each in plan.sources:
        source.fill(each.target(tensors), each)
        if not may_go_on():
            raise _CopyStopped
    return laid_out
