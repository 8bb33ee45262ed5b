"""Pinned host memory: held as long as it is pinned, and a refusal that nobody else hears of."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.memory_backends import needs_cuda
from tests.support.memory_faults import FaultyDriver
from worker.memory import MappingFailed

GPU = torch.device("cuda:0")
BYTES = 4 * mmap.PAGESIZE


def test_memory_is_held_until_it_is_unpinned_and_unpinned_when_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FaultyDriver(monkeypatch)
    from worker.memory.pinned import Pinned

    memory = np.zeros(BYTES, dtype=np.uint8)
    address, is_there = memory.ctypes.data, weakref.ref(memory)
    first = Pinned(GPU, address, BYTES, memory)
    assert driver.pinned == {address: BYTES}
    with pytest.raises(MappingFailed, match="ALREADY_REGISTERED"):
        Pinned(GPU, address, BYTES, memory)
    first.close()
    first.close()
    assert not driver.pinned
    second = Pinned(GPU, address, BYTES, memory)
    del memory
    gc.collect()
    assert is_there() is not None and driver.pinned
    del first, second
    gc.collect()
    assert is_there() is None and not driver.pinned and not driver.num_contexts


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_copies_from_pinned_memory_and_goes_on_after_a_refusal() -> None:
    from worker.memory.pinned import Pinned

    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, BYTES), dtype=np.uint8))
    memory.fill_(7)
    pinned = Pinned(GPU, memory.data_ptr(), BYTES, memory)
    assert memory.is_pinned()
    for address, nbytes in ((memory.data_ptr(), BYTES), (mmap.PAGESIZE, BYTES)):  # pinned, nobody's
        with pytest.raises(MappingFailed):
            Pinned(GPU, address, nbytes, memory)
        assert int(torch.ones(8, device=GPU).sum()) == 8  # no error waits for the next launch
    assert bool((memory.to(GPU, non_blocking=True) == 7).all())
    pinned.close()
    assert not memory.is_pinned()


@pytest.mark.gpu
@needs_cuda
def test_a_gpu_copies_from_images_in_memory_that_nobody_may_write() -> None:
    pytest.importorskip("psutil")
    from worker.shape.host_store import HostStore

    image = torch.arange(BYTES).remainder(251).to(torch.uint8)

    def make(put: Callable[[str, torch.Tensor], None], _: object) -> None:
        put("a", image)

    store = HostStore(Path("/dev/shm"), f"a test of {os.getpid()}", {"a": BYTES}, make, gpu=GPU)
    assert store.is_pinned
    assert store.image("a").to(GPU, non_blocking=True).cpu().equal(image)
    store.close()
    assert not store.path.exists()
