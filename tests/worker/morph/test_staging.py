"""Bytes of a device come to the host by way of two buffers, whole and in their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from worker.shape.staging import StagingBuffers

STEP = 1000


def at_once(buffer: torch.Tensor, piece: torch.Tensor) -> Callable[[], object]:
    """Copy as early as a device can: a buffer that is still read would be overwritten."""
    buffer.copy_(piece)
    return lambda: None


def at_last(buffer: torch.Tensor, piece: torch.Tensor) -> Callable[[], object]:
    """Copy as late as a device can: a buffer that was not waited for would hold something else."""
    return lambda: buffer.copy_(piece)


def collected(staging: StagingBuffers, source: torch.Tensor) -> torch.Tensor:
    target, end = torch.full(source.shape, 77, dtype=torch.uint8), 0
    for first, piece in staging.pieces(source):
        assert first == end
        end += len(piece)
        target[first:end] = piece
    assert end == len(source)
    return target


@pytest.mark.parametrize("nbytes", [0, 1, STEP, STEP + 1, 5 * STEP, 7 * STEP - 13])
@pytest.mark.parametrize("start", [at_once, at_last])
def test_all_bytes_come_in_their_order(
    start: Callable[[torch.Tensor, torch.Tensor], Callable[[], object]], nbytes: int
) -> None:
    staging = StagingBuffers(STEP, start, pins=False)
    for seed in (1, 2):  # buffers are used again
        random = torch.Generator().manual_seed(seed)
        source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
        assert collected(staging, source).equal(source)


def test_the_next_piece_is_begun_before_a_piece_is_read() -> None:
    begun = 0

    def start(buffer: torch.Tensor, piece: torch.Tensor) -> Callable[[], object]:
        nonlocal begun
        begun += 1
        return at_once(buffer, piece)

    staging = StagingBuffers(STEP, start, pins=False)
    source = torch.zeros(4 * STEP, dtype=torch.uint8)
    assert [begun for _ in staging.pieces(source)] == [2, 3, 4, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bytes_of_a_gpu_come_to_the_host_while_it_computes() -> None:
    staging, numbers = StagingBuffers(), torch.arange(20_000_000, device="cuda")
    for seed in range(3):
        source = (numbers * (seed + 3) >> 5).view(torch.uint8)  # 160 MB, just launched
        assert collected(staging, source).equal(source.cpu())
