"""The devices that the memory tests run on: the same suite for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from worker.memory import CpuBackend, PagePool
from worker.memory.backend import Backend

SMALL_PAGE = 4096  # many pages in little memory


def cpu() -> Backend:
    return CpuBackend(SMALL_PAGE)


def cuda() -> Backend:
    from worker.memory.cuda import CudaBackend

    return CudaBackend()


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BackendFactory = Callable[[], Backend]
BACKENDS = [
    pytest.param(cpu, id="cpu"),
    pytest.param(cuda, id="cuda", marks=[pytest.mark.gpu, needs_cuda]),
]


@contextmanager
def checked_pool(factory: BackendFactory, num_pages: int) -> Iterator[PagePool]:
    """A pool of so many pages, whose books are looked at in the end."""
    backend = factory()
    pool = PagePool(backend, num_pages * backend.page_bytes)
    yield pool
    pool.check_integrity()
    pool.close()
