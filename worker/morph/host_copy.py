"""From host memory into the pages of a variant, beside the running steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.memory import VirtualRange

# Half a millisecond on either: it may be stopped, and rests, after each. Smaller ones cost more calls.
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 20, 1 << 24


class HostCopy:
    """Fills the mapped pages of one variant from its host image."""

    def __init__(self, image: torch.Tensor, target: VirtualRange, device: torch.device) -> None:
        """image: uint8 [n], no more than the range has."""
        self._image, self._target = image, target
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _CUDA_CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        return int(self._image.numel())

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Chunk by chunk, in any thread; asks after each and returns at once on False."""
        for first in range(0, self.nbytes, self._chunk_bytes):
            self._target.write(first, self._image[first : first + self._chunk_bytes])
            if not may_go_on():
                return
