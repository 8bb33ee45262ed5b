"""From host memory into the pages of a variant, beside the running steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.memory import VirtualRange
from worker.morph.sums import ROW_BYTES, num_rows, row_sums
from worker.morph.variants_check import WrongVariant

# A millisecond on either: it may be stopped, and rests, after each. Smaller ones cost more calls (1 MiB on a
# CPU: half as long again).
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 22, 1 << 24


class HostCopy:
    """Fills the mapped pages of one variant from its host image, and reads them again: what lies in them then
    is what was made when the images were, or WrongVariant is raised."""

    def __init__(
        self, what: str, image: torch.Tensor, sums: torch.Tensor, target: VirtualRange, device: torch.device
    ) -> None:
        """image: uint8 [n], no more than the range has. sums: its `row_sums`. what: for the error."""
        self._what, self._image, self._sums, self._target = what, image, sums, target
        self._pages = target.tensor(torch.uint8, image.shape)
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        return int(self._image.numel())

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Chunk by chunk, in any thread; asks after each and returns at once on False."""
        for first in range(0, self.nbytes, self._chunk_bytes):
            chunk = slice(first, min(first + self._chunk_bytes, self.nbytes))
            self._target.write(first, self._image[chunk])
            self._check(chunk)
            if not may_go_on():
                return

    def _check(self, chunk: slice) -> None:
        with self._target.beside():
            found = row_sums(self._pages[chunk])
        first = chunk.start // ROW_BYTES
        wanted = self._sums[first : first + len(found)]
        if not found.equal(wanted):
            wrong = (found != wanted).nonzero().flatten() + first
            raise WrongVariant(
                f"{self._what}: {len(wrong)} of {num_rows(self.nbytes)} pieces of {ROW_BYTES} bytes are not"
                f" what was made, the first at byte {int(wrong[0]) * ROW_BYTES}; memory of the device or of"
                " the host is damaged (to have the host's copy made anew, stop all workers of this model)"
            )
