"""CUDA's driver, through cuda-bindings: the context that its calls need, and their errors."""

from __future__ import annotations

import weakref
from typing import Any

from cuda.bindings import driver

from worker.memory.backend import MappingFailed


class PrimaryContext:
    """The primary context of one GPU, the one that torch works in.

    The driver's calls act on the calling thread's current context. A fresh thread has none, and
    `torch.cuda.set_device` does not give it one (pytorch#195256). So what calls the driver calls
    `make_current` first, finalisers too: they run in whichever thread drops the last reference.
    """

    def __init__(self, ordinal: int) -> None:
        """Make the context unless there is one, and keep it while this object lives. Raises MappingFailed."""
        check(driver.cuInit(0))
        device = check(driver.cuDeviceGet(ordinal))
        self._handle = check(driver.cuDevicePrimaryCtxRetain(device))
        # Not at exit: the driver shuts down then and frees everything itself.
        weakref.finalize(self, _let_go, device).atexit = False

    def make_current(self) -> None:
        """Make it this thread's context, which it stays: a worker has one GPU. Raises MappingFailed."""
        check(driver.cuCtxSetCurrent(self._handle))


def check(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call, or raise MappingFailed with the driver's text."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise MappingFailed(f"{status.name}: {text.decode() if text else 'no description'}")
    return values[0] if values else None


def _let_go(device: Any) -> None:
    check(driver.cuDevicePrimaryCtxRelease(device))
