"""From host memory into the pages of a variant, beside the running steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.memory import VirtualRange
from worker.morph.sums import ROW_BYTES, RowSums, num_rows
from worker.morph.variants_check import WrongVariant

# A millisecond on either: it may be stopped, and rests, after each. Smaller ones cost more calls (1 MiB on a
# CPU: half as long again).
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24

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
        self._what, self._image, self._sums, self._target = what, image, sums, target
        self._spans = list(spans)
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self._spans)

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Chunk by chunk, in any thread; asks after each and returns at once on False."""
        for begin, end in self._spans:
            for first in range(begin, end, self._chunk_bytes):
                self._copy(first, min(first + self._chunk_bytes, end))
                if not may_go_on():
                    return

    def _copy(self, begin: int, end: int) -> None:
        sums = RowSums(self._target.tensor(torch.uint8, (end - begin,), offset_bytes=begin))
        self._target.write(
            begin, self._image[begin:end], lambda start, stop: sums.take(start - begin, stop - begin)
        )
        found, first = sums.found, begin // ROW_BYTES
        wanted = self._sums[first : first + len(found)]
        if not found.equal(wanted):
            wrong = (found != wanted).nonzero().flatten() + first
            num_pieces = num_rows(self._image.numel())
            raise WrongVariant(
                f"{self._what}: {len(wrong)} of {num_pieces} pieces of {ROW_BYTES} bytes are not"
                f" what was made, the first at byte {int(wrong[0]) * ROW_BYTES}; memory of the device or of"
                " the host is damaged (to have the host's copy made anew, stop all workers of this model)"
            )
