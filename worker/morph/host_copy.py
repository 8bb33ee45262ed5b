"""From host memory into the pages of a variant, beside the running steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.memory import VirtualRange
from worker.morph.checked_pages import CheckedPages

# A millisecond on either: it may be stopped, and rests, after each. Smaller ones cost more calls (1 MiB on a
# CPU: half as long again).
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24

_ADVICE = (
    "memory of the device or of the host is damaged (to have the host's copy made anew, stop all workers of"
    " this model)"
)

Span = tuple[int, int]  # [begin, end) in bytes of a range


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
        spans: Sequence[Span],
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
