"""From host memory into the pages of a variant, beside the running steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

# A millisecond at most, pages that are touched for the first time included.
_CPU_CHUNK_BYTES, _CUDA_CHUNK_BYTES = 1 << 20, 1 << 24


class HostCopy:
    """Fills the pages of one variant from its host image; holds no lock while it copies."""

    def __init__(self, image: torch.Tensor, target: torch.Tensor) -> None:
        """Of one size, uint8. Made in the engine's thread, called in another one."""
        self._image, self._target = image, target
        self._mapped: torch.cuda.Event | None = None
        if target.is_cuda:
            self._mapped = torch.cuda.current_stream(target.device).record_event()

    @property
    def nbytes(self) -> int:
        return int(self._image.numel())

    def __call__(self, may_go_on: Callable[[], bool]) -> None:
        """Chunk by chunk; asks after each and returns at once on False. When it returns, the device has what
        was copied."""
        if self._mapped is None:
            self._copy_on_cpu(may_go_on)
            return
        stream = torch.cuda.Stream(self._target.device)
        stream.wait_event(self._mapped)
        with torch.cuda.stream(stream):
            self._copy_on_cuda(stream, may_go_on)

    def _copy_on_cpu(self, may_go_on: Callable[[], bool]) -> None:
        source, target = self._image.data_ptr(), self._target.data_ptr()
        for first in range(0, self.nbytes, _CPU_CHUNK_BYTES):
            # One thread of its own, where torch's copy would take the team of threads that the steps run on.
            ctypes.memmove(target + first, source + first, min(_CPU_CHUNK_BYTES, self.nbytes - first))
            if not may_go_on():
                return

    def _copy_on_cuda(self, stream: torch.cuda.Stream, may_go_on: Callable[[], bool]) -> None:
        for first in range(0, self.nbytes, _CUDA_CHUNK_BYTES):
            chunk = slice(first, first + _CUDA_CHUNK_BYTES)
            self._target[chunk].copy_(self._image[chunk], non_blocking=True)
            stream.synchronize()
            if not may_go_on():
                return
