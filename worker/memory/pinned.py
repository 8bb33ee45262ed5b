"""Host memory that a GPU copies from by itself, beside the steps: pinned by CUDA's driver.

After a refusal, the runtime (`torch.cuda.cudart().cudaHostRegister`) keeps the error, and torch's next launch
raises it (vllm#50070). The driver keeps none.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from cuda.bindings import driver

from worker.memory.driver import PrimaryContext, check


class Pinned:
    """Pinned memory, until `close`, or until this object is gone. Any thread may make and close it."""

    def __init__(
        self, gpu: torch.device, address: int, nbytes: int, owner: object, *, is_read_only: bool = False
    ) -> None:
        """Pin `nbytes` at `address`, which `owner` keeps in place; it is held until they are unpinned.

        is_read_only: this process may not write there, which not every GPU takes. Raises MappingFailed, and
        has changed nothing then.
        """
        context = PrimaryContext(gpu.index or 0)
        context.make_current()
        flags = driver.CU_MEMHOSTREGISTER_READ_ONLY if is_read_only else 0
        check(driver.cuMemHostRegister(address, nbytes, flags))
        # Not at exit: the driver shuts down then and unpins everything itself.
        self._unpin = weakref.finalize(self, _unpin, context, address, owner)
        self._unpin.atexit = False

    def close(self) -> None:
        """Unpin the memory. No copy may run. Repeating it is harmless. Raises MappingFailed."""
        self._unpin()


def _unpin(context: PrimaryContext, address: int, owner: Any) -> None:
    context.make_current()
    check(driver.cuMemHostUnregister(address))
