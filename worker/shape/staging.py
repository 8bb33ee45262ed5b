"""Bytes of a GPU on their way to host memory that is not pinned, or to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

PIECE_BYTES: Final = 1 << 24

# Begins to copy a piece of a device to a buffer; what it returns waits for the end.
Start = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]


def launch(buffer: torch.Tensor, piece: torch.Tensor) -> Callable[[], object]:
    """Copy a piece of a GPU to a pinned buffer, behind what this thread gave the GPU before."""
    buffer.copy_(piece, non_blocking=True)
    wait: Callable[[], object] = torch.cuda.current_stream(piece.device).record_event().synchronize
    return wait


class StagingBuffers:
    """Two pinned buffers: the GPU fills one while the caller reads the other.

    The driver takes bytes to memory that is not pinned by one thread, and meanwhile the GPU copies nothing.
    """

    def __init__(self, piece_bytes: int = PIECE_BYTES, start: Start = launch, *, pins: bool = True) -> None:
        """piece_bytes: of a buffer. pins: its buffers lie in memory that a GPU writes itself."""
        self._start = start
        self._buffers = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=pins) for _ in range(2)]

    def pieces(self, source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first, piece): the bytes of uint8 [n] from `first` on, until the next piece is asked for."""
        ahead: tuple[int, torch.Tensor, Callable[[], object]] | None = None
        for number, piece in enumerate(source.split(len(self._buffers[0]))):
            buffer = self._buffers[number % 2][: len(piece)]
            begun = number * len(self._buffers[0]), buffer, self._start(buffer, piece)
            if ahead:
                yield _ended(*ahead)
            ahead = begun
        if ahead:
            yield _ended(*ahead)


def _ended(first: int, buffer: torch.Tensor, wait: Callable[[], object]) -> tuple[int, torch.Tensor]:
    wait()
    return first, buffer
